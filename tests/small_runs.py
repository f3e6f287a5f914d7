"""Small runs as training leaves them, made without Flower."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.client.federation import Federation
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.plan_coverage import PlanCoverage
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.snapshot import TWO_CLASSES, RunSnapshot
from fedgauge.server.views.verdict import Verdict, verdict_of
from fedgauge.simulations.run import in_memory

SMALLEST: dict[str, Any] = {
    "rounds": 1,
    "clients": 2,
    "data": {"use": "mnist5k"},
    "model": {"use": "mlp", "hidden": [4]},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "audit": {"executor": "local"},
}

DEPLOYED = """
seed = 5
rounds = {rounds}
clients = {clients}
[data]
use = "mnist5k"
batch_size = 1
auxiliary = 200
[model]
use = "mlp"
hidden = [16]
[[chain]]
use = "local_sgd"
rate = 0.1
[simulation]
round_timeout = 100
[audit]
executor = "local"
"""  # what a deployment trains; more tables may follow, first of all those of the audit
ANALYTIC = '[[attack]]\nuse = "analytic"\n'
SEARCH = '[[attack]]\nuse = "inverting_gradients"\niterations = 3\n'


def in_this_process(run: Run, *_: object) -> None:
    """In the place of Flower and the attack service's process."""
    in_memory.train(run)
    serve(run, LocalExecutor())


def scenario(**changes: Any) -> Scenario:
    """A small scenario whose audit runs in this process; tables changed by name."""
    tables: dict[str, Any] = {
        "seed": 1,
        "rounds": 2,
        "clients": 3,
        "data": {"use": "mnist5k", "batch_size": 2, "auxiliary": 200},
        "model": {"use": "mlp", "hidden": [32]},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
        "attack": [
            {"use": "inverting_gradients", "iterations": 60},
            {"use": "analytic"},  # does not apply to two examples an update
        ],
        "audit": {"executor": "local"},
    }
    return Scenario.from_tables(tables | changes)


class LedgerAlone(RunSnapshot):
    """What a ledger without a run's folder holds by now; no more jobs come to it."""

    plan_coverage, built, state = PlanCoverage(), None, "complete"  # type: ignore[assignment]

    def __init__(self, ledger: Ledger, shares: Sequence[float] = TWO_CLASSES) -> None:
        self.ledger, self.tables, self.shares = ledger, {"data": {"batch_size": 4096}}, shares
        self.views = {}
        self.read()

    @property
    def class_shares(self) -> tuple[float, ...]:
        return tuple(self.shares)


def scores_of(ledger: Ledger) -> Scores:
    """The scores that are in a ledger by now, as every view reads them."""
    return LedgerAlone(ledger).scores


def verdict_on(ledger: Ledger, shares: Sequence[float] = TWO_CLASSES) -> Verdict:
    """The verdict on a ledger to which no more jobs come."""
    return verdict_of(LedgerAlone(ledger, shares))


def trained(folder: Path, chosen: Scenario) -> list[Observation]:
    """What the tape has after training by the real server app and the real client apps."""
    from fedgauge.simulations.run.in_memory import train  # imports Flower: seconds

    run = Run.create(folder, chosen)
    with run.ledger() as ledger:
        ledger.add_attacks(chosen.plan, {p.name: "card" for p in chosen.plan.attacks})
    train(run)
    with run.ledger() as ledger:
        rows = [o for o in ledger.observations() if o["status"] == "accepted"]
    return [run.tape().read(o["round"], o["client"], o["digest"]) for o in rows]


def taped(folder: Path, chosen: Scenario, rounds: int = 2, reason: str = "refused") -> Run:
    """A run as training leaves it: real updates on the tape, the last client's replies refused, jobs queued."""
    run = Run.create(folder, chosen)
    with run.ledger() as ledger:
        ledger.add_attacks(chosen.plan, {p.name: knowledge_card(chosen.federation, p) for p in chosen.plan.attacks})
        ledger.set_meta(rounds=str(chosen.protocol.rounds))
    return fill_tape(run, chosen, rounds, reason)


def fill_tape(run: Run, chosen: Scenario, rounds: int, refused: str = "") -> Run:
    """Put real updates on a run's tape; the last client's replies are refused if there is a reason."""
    federation = Federation(chosen.protocol)
    params, buffers = federation.initial()
    tape, clients = run.tape(), range(chosen.protocol.clients - bool(refused))
    with run.ledger() as ledger:
        ledger.record_round(0, 0.1, 2.3, 0.1)
        for r in range(1, rounds + 1):
            tape.write_round(r, params, buffers)
            digests = {c: tape.write_update(r, c, federation.client_update(params, buffers, c, r)) for c in clients}
            seen = [Participation(c, "accepted", "", federation.shards.batch_size, d) for c, d in digests.items()]
            seen += [Participation(len(clients), "rejected", refused)] if refused else []
            ledger.record_intake(r, seen, chosen.plan)
            ledger.record_round(r, 0.1 + 0.1 * r, 2.0, 1.0)
        ledger.set_meta(state="trained")
    return run
