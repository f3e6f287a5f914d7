"""Labels that the threat model gives are no leak, and count as one nowhere."""

from pathlib import Path

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.server.store.run import Run
from fedgauge.server.views.compare import Comparison
from fedgauge.server.views.gate import Threshold, gate_of_run
from fedgauge.server.views.leak_tables import rounds_table, summary_table
from fedgauge.server.views.snapshot import read_once
from fedgauge.server.views.verdict import verdict_of
from tests.server.views.test_leakage_and_verdict import Cell, Values, score
from tests.small_runs import scenario

TOLD = (
    PlannedAttack("told", {"use": "inverting_gradients"}, labels="given"),
    PlannedAttack("class_mean_image", {"use": "class_mean_image"}, labels="given"),
)
RESTORES = PlannedAttack("restores", {"use": "inverting_gradients"})
OF_LABELS = "label_accuracy"


def run_of(folder: Path, *attacks: PlannedAttack) -> Run:
    """A finished run; who is given the labels has all of them, and of client 1 nothing came back."""
    plan, run = AttackPlan(attacks), Run.create(folder, scenario(rounds=1))
    cells: dict[Cell, Values | None] = {
        (1, client, p.name): {"psnr": [12.0] * 2, OF_LABELS: [1.0 if p.labels == "given" else 0.5]}
        for client in (0, 2)
        for p in attacks
    }
    cells |= {(1, 1, p.name): {"psnr": [None] * 2} for p in attacks}
    with run.ledger() as ledger:
        ledger.add_attacks(plan, {p.name: "" for p in attacks})
        score(ledger, cells, plan=plan)
        ledger.set_meta(state="trained")
    return run


def test_the_attack_that_restores_labels_is_the_strongest_at_them_everywhere(tmp_path: Path) -> None:
    with read_once(run_of(tmp_path / "run", *TOLD, RESTORES)) as reading:
        (gate,) = gate_of_run(reading, [Threshold(OF_LABELS, 0.9)])
        assert (gate.outcome, gate.value) == ("passed", 0.5)
        assert "by restores" in str(gate) and "told" not in str(gate), "nor did it fail at them"
        page = Comparison([reading], OF_LABELS)
        assert [(p["attack"], p["mean"]) for p in page.points.records] == [("restores", 0.5)]
        assert "floor" not in page.points.records[0]
        for table in (Comparison([reading]).points, summary_table(reading), rounds_table(reading)):
            rows = [row for row in table.records if row.get("kind", "attack") == "attack"]
            assert {row["attack"]: row["labels"] for row in rows} == {"told": None, "restores": 0.5}


def test_where_every_attack_is_given_the_labels_no_label_is_measured(tmp_path: Path) -> None:
    with read_once(run_of(tmp_path / "run", *TOLD)) as reading:
        assert reading.metrics == ["psnr"]
        (gate,) = gate_of_run(reading, [Threshold(OF_LABELS, 0.9)])
        assert gate.outcome == "not measured"
        assert "labels" not in verdict_of(reading).sentences[0]


def test_a_failed_attack_is_not_listed_under_a_measure_of_other_data(tmp_path: Path) -> None:
    with read_once(run_of(tmp_path / "run", RESTORES)) as reading:
        assert Comparison([reading], "psnr").points.rows and not Comparison([reading], "rouge1").points.rows
