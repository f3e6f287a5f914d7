"""Runs with given scores."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.attacks.score_rows import ScoreRecord
from fedgauge.client.federation import Federation
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario

METRICS = ("psnr", "ssim", "mse", "identified", "label_accuracy")
Grade = Callable[[str, int, int], Mapping[str, float | None]]


def grade(attack: str, round: int, client: int) -> Mapping[str, float | None]:
    """Values that differ by attack, round and client."""
    if attack == "bayes_limit":
        return {"mse": 5e-4}
    psnr = {"first": 25.0, "second": 20.0}.get(attack, 10.0) + 2 * round + client
    return {
        "psnr": psnr,
        "ssim": psnr / 40,
        "mse": 10 ** (-psnr / 10),
        "identified": float(attack in ("first", "second") and (round + client) % 2),
        "label_accuracy": 0.5,
    }


def only_psnr(attack: str, round: int, client: int) -> Mapping[str, float | None]:
    return {m: v for m, v in grade(attack, round, client).items() if m == "psnr"}


def graded(
    folder: Path,
    how: Grade = grade,
    attacks: Sequence[str] = ("first", "second"),
    clients: int = 3,
    rounds: int = 3,
    accuracy: float = 0.3,
    limit: bool = True,
) -> Run:
    """A run whose attacks, baselines and limit were graded so; what came back is the negative of the truth."""
    chosen = Scenario.from_tables(
        {
            "seed": 1,
            "rounds": rounds,
            "clients": clients,
            "data": {"use": "mnist5k", "batch_size": 1, "auxiliary": 50},
            "model": {"use": "mlp", "hidden": [8]},
            "chain": [{"use": "local_sgd", "rate": 0.1}],
            "audit": {"executor": "local"},
        }
    )
    names = [*attacks, "mean_image", "random_image", *["bayes_limit"] * limit]
    plan = AttackPlan(tuple(PlannedAttack(name, {"use": "analytic" if name in attacks else name}) for name in names))
    run, federation = Run.create(folder, chosen), Federation(chosen.protocol)
    with run.ledger() as ledger:
        ledger.add_attacks(plan, {name: f"honest server; {name} knows it all" for name in names})
        ledger.record_round(0, 0.1, 2.3, 0.1)
        for r in range(1, rounds + 1):
            ledger.record_intake(r, [Participation(c, "accepted", "", 1, f"{r}-{c}") for c in range(clients)], plan)
            ledger.record_round(r, accuracy * r / rounds, 2.0, 1.0)
        while (lease := ledger.lease()) is not None:
            name, r = lease.attack.name, lease.round
            rows = {
                c: [ScoreRecord(r, c, name, 0, m, v, "converged", 0.1) for m, v in how(name, r, c).items()]
                for c in lease.clients
            }
            ledger.finish(lease, rows)
            for c in lease.clients if name in attacks else ():
                run.write_reconstruction(r, c, name, {"x": 1 - federation.batch_at(c, r).x})
    return run
