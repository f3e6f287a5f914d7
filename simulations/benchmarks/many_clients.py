"""Many clients at once: does the curious server record 50 replies a round intact, with flat memory over rounds?

The replies are synthetic, as their content does not matter here; validator, recorder, ledger and strategy are real.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedgauge.client.rng import generator
from fedgauge.server.recorder import UpdateRecorder
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.benchmarks.memory_growth import MB, MemoryUse, in_a_process, own_memory
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress
from fedgauge.simulations.run.create import new_run
from fedgauge.simulations.run.in_memory import InMemory, MemoryGrid, flower


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
    """A client's random update in a round."""
    rng = generator("load", client, round)
    return {k: 1e-3 * torch.randn(t.shape, generator=rng) for k, t in params.items()}


def load(progress: Progress, clients: int = 50, rounds: int = 20, hidden: int = 250) -> BenchmarkReport:
    """Lost replies, memory after the second and the last round, seconds per round."""
    with TemporaryDirectory(prefix="fedgauge-load-") as scratch:
        scenario = _scenario(clients, rounds, hidden)
        run = new_run(scenario, "load", Path(scratch))
        seen, seconds = in_a_process(serve, run)
        with run.ledger() as ledger:
            rows = [(o["round"], o["client"]) for o in ledger.observations() if o["status"] == "accepted"]
            jobs = ledger.progress().total
        read = sum(_as_sent(run, scenario, round, client) for round, client in rows)
        bytes_a_round = sum(p.stat().st_size for p in (run.folder / "tape").glob("round-00001-*")) / MB
        progress(1, 1)
    expected, planned = clients * rounds, clients * rounds * len(scenario.plan.attacks)
    grown = seen[-1].resident - seen[1].resident
    note = f"a server that kept each round's updates would grow by {bytes_a_round * (rounds - 2):.0f}"
    figures = (
        Figure("replies accepted and recorded", len(set(rows)), "", at_least=expected),
        Figure("updates on the tape, bit for bit", read, "", at_least=expected),
        Figure("attack jobs queued", jobs, "", at_least=planned),
        Figure("resident memory after round 2", seen[1].resident, "MiB"),
        Figure(f"resident memory after round {rounds}", seen[-1].resident, "MiB"),
        Figure("growth of resident memory", grown, "MiB", at_most=bytes_a_round, note=note),
        Figure("a round", seconds / rounds, "s"),
    )
    return BenchmarkReport(
        figures, dict(clients=clients, rounds=rounds, model=f"mlp, {hidden} hidden", replies="synthetic")
    )


def serve(run: Run) -> tuple[list[MemoryUse], float]:
    """Serve all rounds of a run in this process; its memory after each round, and the seconds of all."""
    torch.set_num_threads(1)
    scenario, seen = run.scenario(), []
    with flower(), run.ledger() as ledger:
        recorder = UpdateRecorder(ledger, run.tape(), scenario.plan)
        federation, started = InMemory(scenario, recorder, Synthetic(scenario.protocol)), time.perf_counter()
        for round in range(1, scenario.protocol.rounds + 1):
            federation.advance(round)
            seen.append(own_memory(round))
    return seen, time.perf_counter() - started


def _as_sent(run: Run, scenario: Scenario, round: int, client: int) -> bool:
    """Whether the tape holds an update exactly as the client sent it."""
    update = run.tape().read(round, client).update
    expected = synthetic(scenario.federation.initial()[0], client, round)
    return update.keys() == expected.keys() and all(torch.equal(update[k], t) for k, t in expected.items())


def _scenario(clients: int, rounds: int, hidden: int) -> Scenario:
    return Scenario.from_tables(
        {
            "seed": 0,
            "rounds": rounds,
            "clients": clients,
            "data": {"use": "mnist5k"},
            "model": {"use": "mlp", "hidden": [hidden]},
            "chain": [{"use": "local_sgd", "rate": 0.1}],
            "attack": [{"use": "analytic"}],
            "audit": {"executor": "local"},
        }
    )
