"""Fifty replies a round are recorded intact, with flat memory.

The replies are synthetic, as their content does not matter here; validator, recorder, ledger and strategy are real.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedgauge.client.rng import generator
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run.create import new_run
from fedgauge.simulations.run.in_memory import MemoryGrid
from tests.load.memory_use import MB, MemoryUse, audit, in_a_process, train

CLIENTS, ROUNDS = 50, 6
TABLES = {
    "rounds": ROUNDS,
    "clients": CLIENTS,
    "data": {"use": "mnist5k"},
    "model": {"use": "mlp", "hidden": [250]},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "analytic"}],
    "audit": {"executor": "local"},
}


class Synthetic(MemoryGrid):
    """Clients that answer with random updates, seeded by client and round."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return [self._drawn(message) for message in messages]

    def _drawn(self, message: Message) -> Message:
        round = message.content.config_records["config"]["server-round"]
        params = message.content.array_records["arrays"].to_torch_state_dict()
        update = synthetic(dict(params), self.clients[message.metadata.dst_node_id], int(str(round)))
        content = RecordDict({"update": ArrayRecord(update), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)


def synthetic(params: dict[str, Tensor], client: int, round: int) -> dict[str, Tensor]:
    rng = generator("load", client, round)
    return {k: 1e-3 * torch.randn(t.shape, generator=rng) for k, t in params.items()}


def serve_synthetic(run: Run) -> list[MemoryUse]:
    return train(run, Synthetic)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc: Linux")
def test_no_reply_is_lost_or_changed_and_memory_stays_flat(tmp_path: Path) -> None:
    scenario = Scenario.from_tables(TABLES)
    run = new_run(scenario, "load", tmp_path)
    seen = in_a_process(serve_synthetic, run)
    with run.ledger() as ledger:
        rows = [(o["round"], o["client"]) for o in ledger.observations() if o["status"] == "accepted"]
        assert ledger.progress().total == CLIENTS * ROUNDS * len(scenario.plan.attacks)
    assert sorted(rows) == [(round, client) for round in range(1, ROUNDS + 1) for client in range(CLIENTS)]
    params, tape = scenario.federation.initial()[0], run.tape()
    for round, client in rows:
        read, sent = tape.read(round, client).update, synthetic(params, client, round)
        assert read.keys() == sent.keys() and all(torch.equal(read[k], t) for k, t in sent.items())
    a_round = sum(p.stat().st_size for p in (run.folder / "tape").glob("round-00001-*")) / MB
    assert seen[-1].resident - seen[1].resident < a_round
    attacked = in_a_process(audit, run)
    assert attacked[-1].resident - attacked[1].resident < a_round
    with run.ledger() as ledger:
        assert ledger.progress().done == ledger.progress().total
