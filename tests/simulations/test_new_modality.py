"""A kind of data that one file adds is attacked, graded, judged and shown everywhere, with no other change."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.attacks.modality import registry
from fedgauge.client.components import SpecError, allowing
from fedgauge.client.entry_points import ALLOW
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.figures import rounds_figures
from fedgauge.server.views.gallery import Gallery, worst_cases
from fedgauge.server.views.overview import Overview
from fedgauge.server.views.snapshot import RunSnapshot, read_once
from fedgauge.server.views.tables import in_json
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.checks.preflight import preflight
from fedgauge.simulations.checks.scenario_check import check
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.live.view import progress_line
from fedgauge.simulations.reports.export import write_csv
from fedgauge.simulations.reports.report import write_report
from tests import small_runs
from tests.server.dashboard.pages import Http
from tests.test_docs_code import write

TABLES: dict[str, Any] = {
    "seed": 1,
    "rounds": 2,
    "clients": 4,
    "data": {"use": "mynumbers:numbers", "batch_size": 1, "auxiliary": 50},
    "model": {"use": "mynumbers:line"},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "mynumbers:row_over_bias"}],
    "audit": {"executor": "local"},
}


@contextmanager
def attacked(folder: Path, tables: dict[str, Any], *modules: str) -> Iterator[Run]:
    """A run with the guide's files, which this process has met only in here."""
    write("adding-components.md", folder)
    kept = [(table, dict(table)) for table in (registry.MODALITIES, registry.MEASURED)]
    with allowing(modules, [folder]):
        made = small_runs.taped(folder / "run", Scenario.from_tables(tables))
        with made.ledger() as ledger:  # as `fedgauge run` writes it
            ledger.set_meta(main_metric="close")
        serve(made, LocalExecutor())
        yield made
    for name in modules:
        sys.modules.pop(name, None)
    for table, before in kept:
        table.clear()
        table.update(before)  # type: ignore[arg-type]


def swept(folder: Path, tables: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The rows of a sweep of one cell, and its summary."""
    scenario = {key: value for key, value in tables.items() if key not in ("chain", "attack", "seed")}
    sweep = {"scenario": scenario, "defense": [{"name": "none", "chain": tables["chain"]}], "attack": tables["attack"]}
    (folder / "sweep.toml").write_text(tomli_w.dumps(sweep))
    assert main(["sweep", str(folder / "sweep.toml"), "-o", str(folder / "swept"), "--jobs", "1"]) == 0
    rows: list[dict[str, Any]] = json.loads((folder / "swept" / "sweep.json").read_text())["rows"]
    return rows, (folder / "swept" / "sweep.md").read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with attacked(tmp_path_factory.mktemp("numbers"), TABLES, "mynumbers") as made:
        yield made


def test_the_page_shows_every_number_and_the_verdict_counts_them(run: Run) -> None:
    with closing(RunSnapshot(run)) as reading, reading.now():
        gallery = Gallery(reading)
        page, told, worst = in_json(gallery.page()), Overview(reading), worst_cases(gallery, 3)
        found = verdict_of(reading)
        strengths, modality = gallery.attacked(), gallery.scores.modality
        lower = type("Lower", (modality,), {"main": replace(modality.main, higher_is_better=False)})
        gallery.__dict__["scores"] = replace(gallery.scores, modality=lower)
        assert gallery.attacked() == {place: -s for place, s in strengths.items()}, "a lower value leaks more"
    assert (page["kind"], page["noun"], page["total"]) == ("text", "number", 6)
    for card in page["cards"]:
        (tile,) = card["tiles"]
        assert tile["words"] == [[card["truth_words"][0], "right"]], tile["note"]
        assert tile["note"] == "100.0 %"
    assert len(worst) == 3 and told.measure.private == "number"
    rows = {row["attack"]: row for row in told.summary.records}
    assert (
        rows["row_over_bias"]["mean"] == 100.0
        and rows["mean_number"]["mean"] < 20
        and rows["mean_number"]["kind"] == "baseline"
    )
    assert found.word == "leaks" and "right numbers" in found.sentence and "numbers" in found.sentence


def test_the_report_the_export_the_figures_and_the_terminal_name_it(run: Run) -> None:
    report = write_report(run).read_text()
    assert "Private numbers and" in report and "right numbers" in report
    table = io.StringIO()
    write_csv(run, table)
    lines = [line for line in table.getvalue().splitlines() if ",row_over_bias," in line and ",close," in line]
    assert len(lines) == 6 and all(",100.0," in line for line in lines)
    with read_once(run) as reading:
        assert any(figure.metric == "close" for figure in rounds_figures(reading))
        assert "right numbers best 100.0 %" in progress_line(reading)


def test_a_gate_and_a_sweep_judge_by_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    gate = ["gate", str(run.folder), "--allow", "mynumbers"]
    assert main([*gate, "--fail-above", "close=50"]) == 1
    assert "of 6 by row_over_bias" in capsys.readouterr().out
    assert main([*gate, "--fail-above", "psnr=20"]) == 2, "of other data"
    rows, summary = swept(run.folder.parent, TABLES)
    assert [(row["attack"], row["metric"], row["mean"]) for row in rows] == [("row_over_bias", "close", 100.0)]
    assert "right numbers" in summary and "`row_over_bias`" in summary


@contextmanager
def page_of(run: Run) -> Iterator[Callable[[str], Any]]:
    """What the page's server answers about a run."""
    app = make_app(run.folder.parent)
    with Http(app, "http://localhost") as http:
        yield lambda view: http.get(f"/api/runs/{run.name}/{view}").json()


def forget_numbers() -> None:
    """As in a process that has not met this kind of data."""
    sys.modules.pop("mynumbers")
    for table, named in (
        (registry.MODALITIES, "Numbers"),
        (registry.MEASURED, "close"),
    ):
        for key in [k for k in table if getattr(k, "__name__", k) == named]:
            del table[key]  # type: ignore[attr-defined]


def test_a_process_that_has_not_met_the_kind_loads_it_where_its_package_is_allowed(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_numbers()
    with page_of(run) as asked:
        gallery = asked("gallery")
    assert (gallery["kind"], gallery["noun"]) == ("text", "number") and len(gallery["cards"]) == 3
    forget_numbers()
    monkeypatch.delenv(ALLOW)
    assert main(["report", str(run.folder)]) == 2
    assert "'mynumbers:numbers'" in capsys.readouterr().err
    assert main(["report", str(run.folder), "--allow", "mynumbers"]) == 0


def test_doctor_and_preflight_say_what_the_examples_are(run: Run) -> None:
    scenario = run.scenario()
    (data,) = [result for result in check(scenario) if result.name == "data"]
    assert data.message.startswith("180 + 20 numbers") and data.message.endswith("2 classes")
    found = {f.words for f in preflight(scenario)}
    assert any("1 unknown numbers of 1" in words for words in found)
    assert any("labels: 100" in words for words in found), "a network may be its only layer"
    assert not any("image" in words for words in found)


@pytest.mark.usefixtures("run")
def test_a_reconstruction_of_another_shape_is_refused_in_a_sentence() -> None:
    """This attack returns one number, whatever the batch."""
    two = {**TABLES, "data": {**TABLES["data"], "batch_size": 2}}
    tried = {result.name: result for result in check(Scenario.from_tables(two))}["attack row_over_bias"]
    assert not tried.works and "(2, 1)" in tried.message


def test_attacks_on_other_kinds_are_refused_by_what_they_reconstruct(run: Run) -> None:
    with pytest.raises(SpecError):
        Scenario.from_tables({**TABLES, "attack": [{"use": "inverting_gradients"}]})
