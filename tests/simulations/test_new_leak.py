"""A leak that is no example, such as whether a batch has a class, is one file: run, shown, exported and judged as any attack."""

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fedgauge.attacks.modality import registry
from fedgauge.server.store.run import Run
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.snapshot import read_once
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.cli.run_summary import print_summary
from fedgauge.simulations.reports.export import write_csv
from tests.simulations.test_new_modality import TABLES, attacked, page_of, swept

WITH_LEAK: dict[str, Any] = {**TABLES, "attack": [*TABLES["attack"], {"use": "myleak:contains", "label": 0}]}
LABEL = "class in the batch detected"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with attacked(tmp_path_factory.mktemp("leak"), WITH_LEAK, "mynumbers", "myleak") as made:
        yield made


def forget_leak() -> None:
    """As in a process that has not met it."""
    sys.modules.pop("myleak", None)
    registry.MEASURED.pop("class_detected", None)


def test_a_leak_is_a_row_of_its_own_metric_in_the_ledger_and_in_the_export(run: Run) -> None:
    with run.ledger() as ledger:
        found = {(row["metric"], row["value"]) for row in ledger.scores() if row["attack"] == "contains"}
        assert ledger.planned()["contains"].metric == "class_detected"
    assert found == {("class_detected", 1.0)}, "of one example, the sign tells its class"
    table = io.StringIO()
    write_csv(run, table)
    lines = [line for line in table.getvalue().splitlines() if ",contains," in line]
    assert len(lines) == 6 and all(",class_detected," in line and ",1.0," in line for line in lines)


def test_page_report_and_terminal_show_its_number_and_leave_the_verdict_to_reconstructions(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_leak()
    with page_of(run) as asked:
        told = asked("overview")
    heads = [column["key"] for column in told["summary"]["columns"]]
    rows = {row[0]: dict(zip(heads, row, strict=True)) for row in told["summary"]["rows"]}
    assert (rows["contains"]["class_detected"], rows["contains"]["n"], rows["contains"].get("mean")) == (1.0, 6, None)
    assert rows["row_over_bias"]["mean"] == 100.0 and rows["row_over_bias"]["class_detected"] is None
    (figure,) = [each for each in told["over_rounds"] if each["metric"] == "class_detected"]
    assert [s["name"] for s in figure["series"] if s["role"] == "attack"] == ["contains"]
    (sentence,) = [each for each in told["sentences"] if each.startswith(LABEL)]
    assert "by contains, n = 6" in sentence and told["word"] == "leaks"
    with read_once(run) as reading:
        strongest = verdict_of(reading).strongest
    assert strongest is not None and strongest.attack == "row_over_bias"
    print_summary(run, quiet=False)
    assert sentence in capsys.readouterr().out
    assert sentence in (run.folder / "report.html").read_text()


def test_a_gate_and_a_sweep_judge_by_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    forget_leak()
    gate = ["gate", str(run.folder), "--allow", "mynumbers", "--fail-above", "class_detected=0.9"]
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setenv("FEDGAUGE_ALLOW", "")
        assert main(gate) == 2, "nothing known here has this metric"
    assert main([*gate, "--allow", "myleak"]) == 1
    assert "of 6 by contains" in capsys.readouterr().out
    rows, summary = swept(run.folder.parent, WITH_LEAK)
    assert [(row["attack"], row["metric"], row["mean"]) for row in rows] == [
        ("row_over_bias", "close", 100.0),
        ("contains", "class_detected", 1.0),
    ]
    assert f"| {LABEL} |" in summary and "1.000 by `contains`" in summary and "`row_over_bias`" in summary


@pytest.mark.parametrize("lost", ["contains", "row_over_bias"])
def test_a_failure_is_missing_only_under_its_own_metric(run: Run, lost: str) -> None:
    with read_once(run) as reading:
        metrics = {"contains": "class_detected", "row_over_bias": "close"}
        row = (9, 0, lost, -1, metrics[lost], "failed", None)
        scores = Scores.of([*reading.ledger.score_rows(), row], roles=reading.scores.roles)
    for name, metric in metrics.items():
        assert (9 in scores.of_metric(metric).round) == (name == lost)


def test_it_is_read_where_its_module_may_not_be_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_leak()
    monkeypatch.setenv("FEDGAUGE_ALLOW", "mynumbers")
    assert main(["report", str(run.folder), "--allow", "mynumbers"]) == 0
    assert "contains" in (run.folder / "report.html").read_text()
