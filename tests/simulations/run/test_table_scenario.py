"""Claims about the tables' quickstart: it is sound, examined beforehand, and shows both kinds of leak, cell by cell."""

from contextlib import closing
from pathlib import Path

import pytest

from fedgauge.attacks.effort import attacks_by_effort
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.modality.membership import MEMBER
from fedgauge.attacks.source import FederationSource
from fedgauge.server.pool.tester_grading import _grade
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import FinishedJob
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.gallery import Gallery
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.tables import in_json
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.checks.preflight import preflight
from fedgauge.simulations.checks.scenario_check import check
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reports.report import write_report
from tests.small_runs import in_this_process

QUICKSTART = Path(__file__).parents[3] / "simulations" / "quickstart-table.toml"
SMALL = ["data.batch_size=2", "rounds=2", "clients=2", "audit.rounds=[1]"]


def test_the_doctor_finds_nothing_wrong_with_rows() -> None:
    found = {finding.name: finding for finding in check(Scenario.load(QUICKSTART))}
    assert not [f"{f.name}: {f.message}" for f in found.values() if f.works is False and f.needed]
    assert "3,200 + 800 rows of 34 entries" in found["data"].message


def test_preflight_reports_that_a_row_is_read_off_the_first_layer() -> None:
    alone = preflight(Scenario.load(QUICKSTART, ["data.batch_size=1"]))
    (leak,) = [f for f in alone if "analytic" in f.words]
    assert leak.severity == "leaks" and "8 of 8" in leak.words
    assert not any("dB" in f.words for f in alone)


def test_effort_chooses_what_reads_rows() -> None:
    def chosen(*settings: str) -> list[str]:
        return [table["use"] for table in attacks_by_effort("standard", Scenario.load(QUICKSTART, settings).federation)]

    assert chosen() == ["spear", "spear_plus_plus", "tableak", "tableak", "membership", "membership_over_rounds"]
    assert chosen("data.batch_size=1")[0] == "analytic"
    embedded = [use for use in chosen("model.use=embedding_mlp", "model.hidden=[16]") if use != "tableak"]
    assert embedded == ["membership", "membership_over_rounds"]


def as_graded(ledger: Ledger) -> set[tuple[object, ...]]:
    columns = ("client", "attack", "example", "metric", "value")
    return {tuple(row[c] for c in columns) for row in ledger.scores() if row["metric"] != MEMBER}


@pytest.mark.slow
def test_page_and_report_show_rows_side_by_side_and_both_kinds_of_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", in_this_process)
    settings = [part for setting in SMALL for part in ("--set", setting)]
    assert main(["run", str(QUICKSTART), "--runs", str(tmp_path), *settings]) == 0
    (ledger,) = tmp_path.glob("*/ledger.sqlite")
    run = Run(ledger.parent)
    with closing(RunSnapshot(run)) as reading, reading.now():
        page, found = in_json(Gallery(reading).page()), verdict_of(reading)
        scores = {(row["attack"], row["metric"]) for row in reading.ledger.scores()}
    assert (page["kind"], page["noun"], page["total"]) == ("text", "row", 4)
    for card in page["cards"]:
        assert card["headings"][:2] == ["age", "schooling"]
        tiles = {tile["attack"]: tile for tile in card["tiles"]}
        assert len(card["truth_words"]) == 10
        assert tiles["spear"]["words"] == [[word, "right"] for word in card["truth_words"]], tiles["spear"]["note"]
    assert {("tableak", "sure_categories"), ("mode_row", "cells"), ("membership", MEMBER)} <= scores
    # a tester who hands in the same rows gets the simulation's scores, those of the surest cells too
    with run.ledger() as ledger_:
        fed, before = run.scenario().federation, as_graded(ledger_)
        query = "SELECT j.id, name attack, round, client, other FROM jobs j JOIN attacks a ON a.id = attack_id"
        every = [FinishedJob(**row, status="converged") for row in ledger_._db.execute(query)]
        jobs = [job for job in every if run.reconstruction(1, job.client, job.attack).exists()]
        truth = {(1, client): fed.batch_at(client, 1) for client in range(2)}
        assert {_grade(run, ledger_, Auditor(FederationSource(fed)).grader, job, truth, 2) for job in jobs} == {""}
        assert as_graded(ledger_) == before
    assert found.word == "leaks" and "cells right" in found.sentence and "membership" in found.sentence
    report = write_report(run).read_text()
    assert "Private rows and" in report and "schooling" in report
    assert (
        "every cell right (%)" in report
        and ">identified" not in report.partition("Round by round")[2].partition("<h2>")[0]
    )
