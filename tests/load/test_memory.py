"""Memory does not grow with the rounds: a server that kept past updates would grow by all of them."""

import sys
from pathlib import Path

import pytest

from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run.create import new_run
from tests.load.memory_use import MB, MemoryUse, audit, in_a_process, train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc: Linux")
CLIENTS, ROUNDS = 20, 5
HIDDEN = 800  # so that what a round sends is large beside what an allocator keeps


def a_run(folder: Path, rounds: int) -> Run:
    tables = {
        "rounds": rounds,
        "clients": CLIENTS,
        "data": {"use": "mnist5k"},
        "model": {"use": "mlp", "hidden": [HIDDEN]},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
        "attack": [{"use": "analytic"}],
        "audit": {"executor": "local"},
    }
    return new_run(Scenario.from_tables(tables), "memory", folder)


def grows_less_than_its_updates(seen: list[MemoryUse], run: Run) -> None:
    first, last = seen[1], seen[-1]  # the first round loads libraries
    round_of_updates = sum(p.stat().st_size for p in (run.folder / "tape").glob("round-00001-client-*")) / MB
    hoard = round_of_updates * (last.rounds - first.rounds)
    print(
        f"after rounds {first.rounds} and {last.rounds}: {first.resident:.0f}, {last.resident:.0f} MiB; hoard {hoard:.0f}"
    )
    assert last.resident - first.resident < hoard / 2
    assert last.peak - first.peak < hoard / 2


@pytest.mark.full
@pytest.mark.slow
def test_training_and_audit_keep_no_update_of_a_past_round(tmp_path: Path) -> None:
    run = a_run(tmp_path, rounds=ROUNDS)
    grows_less_than_its_updates(in_a_process(train, run), run)
    grows_less_than_its_updates(in_a_process(audit, run), run)
    with run.ledger() as ledger:
        assert sum(row["status"] == "accepted" for row in ledger.observations()) == ROUNDS * CLIENTS
        assert ledger.progress().done == ledger.progress().total
