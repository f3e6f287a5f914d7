"""Small ledgers for the tests: plans, observations and score rows."""

from pathlib import Path
from typing import Any

from fedgauge.attacks.base import Budget
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.attacks.score_rows import WHOLE_BATCH, ScoreRecord
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Lease, Participation

DLG = {"use": "dlg"}
FEEDBACK = {"use": "feedback_blending"}  # an attack with memory


def plan_of(*names: str, wave: int = 2, **options: Any) -> AttackPlan:
    """Attacks of these names; one whose name begins with m has memory, and a limit is itself."""
    limits = {name: {"use": name} for name in names if name.endswith(("_limit", "_bound"))}
    tables = limits | {name: FEEDBACK if name.startswith("m") else DLG for name in names if name not in limits}
    return AttackPlan(tuple(PlannedAttack(n, tables[n], Budget(5)) for n in names), wave=wave, **options)


def accepted(*clients: int, round: int = 1) -> list[Participation]:
    return [Participation(c, "accepted", "", 4, f"weights{round}:update{round}.{c}") for c in clients]


def filled(path: Path, plan: AttackPlan, rounds: int = 1, clients: int = 4) -> Ledger:
    """A ledger with the plan's jobs for some rounds."""
    ledger = Ledger(path, create=True)
    ledger.add_attacks(plan, {p.name: f"card of {p.name}" for p in plan.attacks})
    for round in range(1, rounds + 1):
        ledger.record_intake(round, accepted(*range(clients), round=round), plan)
    return ledger


def rows_of(lease: Lease, examples: int = 2) -> dict[int, list[ScoreRecord]]:
    """Scores as an audit writes them: per example, and graded against another client's truth."""
    found: dict[int, list[ScoreRecord]] = {}
    for c in lease.clients:
        found[c] = [
            ScoreRecord(lease.round, c, lease.attack.name, WHOLE_BATCH, "label_accuracy", 1.0, "converged", 0.1)
        ]
        for e in range(examples):
            found[c].append(ScoreRecord(lease.round, c, lease.attack.name, e, "psnr", 20.0 + e, "converged", 0.1))
        if c in lease.others:
            wrong = f"wrong_client({lease.attack.name})"
            found[c].append(ScoreRecord(lease.round, lease.others[c], wrong, 0, "psnr", 9.0, "converged", 0.1))
    return found


def jobs(ledger: Ledger) -> list[dict[str, Any]]:
    query = "SELECT j.*, a.name FROM jobs j JOIN attacks a ON a.id = j.attack_id ORDER BY j.id"
    return [dict(row) for row in ledger._db.execute(query)]


def take(ledger: Ledger) -> Lease:
    """The next wave, which there must be."""
    lease = ledger.lease()
    assert lease is not None
    return lease


def finish(ledger: Ledger, lease: Lease | None = None, told: str = "") -> Lease:
    """Done (default: the next wave), with memories that are called by round and client."""
    lease = lease or take(ledger)
    memories = {c: f"{told}{lease.round}.{c}" for c in lease.clients} if lease.attack.name[0] == "m" else None
    ledger.finish(lease, rows_of(lease), None, memories)
    return lease
