"""A leak that is no example, such as whether a batch has a class, is one file: run, shown and exported as any attack."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from fedgauge.attacks.modality import registry
from fedgauge.client.components import allowing
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.overview import overview
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reports.export import write_csv
from tests.simulations.test_new_modality import TABLES
from tests.test_docs_code import write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, make_taped: Callable[..., Run]) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("leak")
    write("adding-components.md", folder)
    kept = [(table, dict(table)) for table in (registry.MODALITIES, registry.MEASURED, registry.BASELINES)]
    with allowing(["mynumbers", "myleak"], [folder]):
        attacks = [*TABLES["attack"], {"use": "myleak:contains", "label": 0}]
        made = make_taped(folder / "run", Scenario.from_tables({**TABLES, "attack": attacks}))
        with made.ledger() as ledger:  # as `fedgauge run` writes it
            ledger.set_meta(main_metric="close")
        serve(made, LocalExecutor())
        yield made
    for name in ("mynumbers", "myleak"):
        sys.modules.pop(name, None)
    for table, before in kept:
        table.clear()
        table.update(before)  # type: ignore[arg-type]


def test_a_leak_is_a_row_of_its_own_metric_and_leaves_the_verdict_to_reconstructions(run: Run) -> None:
    with run.ledger() as ledger:
        found = {(row["metric"], row["value"]) for row in ledger.scores() if row["attack"] == "contains"}
        assert ledger.planned()["contains"].metric == "class_detected"
    assert found == {("class_detected", 1.0)}, "of one example, the sign tells its class"
    table = io.StringIO()
    write_csv(run, table)
    lines = [line for line in table.getvalue().splitlines() if ",contains," in line]
    assert len(lines) == 6 and all(",class_detected," in line and ",1.0," in line for line in lines)
    with closing(RunSnapshot(run)) as reading, reading.now():
        told, verdict = overview(reading), verdict_of(reading)
    assert {row["attack"] for row in told.summary.records} >= {"row_over_bias", "mean_number"}
    assert verdict.word == "leaks" and "row_over_bias" in verdict.sentence


def test_it_is_read_where_its_module_may_not_be_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.modules.pop("myleak")
    monkeypatch.setenv("FEDGAUGE_ALLOW", "mynumbers")
    assert main(["report", str(run.folder), "--allow", "mynumbers"]) == 0
    assert "contains" in (run.folder / "report.html").read_text()
