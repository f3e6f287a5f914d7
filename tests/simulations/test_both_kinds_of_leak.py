"""A run that is asked for both kinds of leak shows both over rounds, wherever results are shown."""

import io
from collections.abc import Callable
from contextlib import closing

import pytest

from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.overview import Overview
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.tables import in_json
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.cli.run_summary import print_summary
from fedgauge.simulations.reports.export import write_csv
from fedgauge.simulations.reports.report import write_report

TESTS = [
    {"use": "idlg", "iterations": 30, "tune": "off"},
    {"use": "membership", "held": 5},
    {"use": "membership_over_rounds", "strangers": 200, "held": 5, "score": "matched_filter"},
]
NOISE = [{"use": "gaussian", "sigma": 0.001}, {"use": "local_sgd", "rate": 0.1}]


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run]
) -> Run:
    data = {"use": "mnist5k", "batch_size": 2, "auxiliary": 400}
    model = {"use": "mlp", "hidden": [8]}
    scenario = make_scenario(attack=TESTS, chain=NOISE, data=data, model=model)
    made = make_taped(tmp_path_factory.mktemp("both") / "run", scenario)
    serve(made, LocalExecutor())
    return made


def test_the_page_draws_membership_over_rounds_with_its_limit(run: Run) -> None:
    with closing(RunSnapshot(run)) as reading, reading.now():
        told, found = in_json(Overview(reading)), verdict_of(reading)
    curves = {figure["metric"]: figure["series"] for figure in told["over_rounds"]}
    member = {series["name"]: series for series in curves["membership"]}
    assert set(member) == {
        "membership",
        "label_frequency",
        "loss",
        "wrong_client(membership)",
        "membership_limit",
        "test accuracy (right)",
    }
    assert member["membership"]["x"] == [1, 2] and min(member["membership"]["mean"]) > 0.8
    assert member["membership_limit"]["role"] == "limit"
    assert {series["name"] for series in curves["dataset_membership"]} >= {"membership_over_rounds"}
    assert "membership" not in {series["name"] for series in curves["psnr"]}
    rows = {tuple(row[:2]) for row in told["membership_table"]["rows"]}
    assert ("Batch membership", "membership") in rows
    assert ("Dataset membership", "membership_over_rounds") in rows
    assert {row[0] for row in told["summary"]["rows"]} == {
        "idlg",
        "mean_image",
        "class_mean_image",
        "random_image",
        "wrong_client(idlg)",
        "bayes_limit",
        "candidate_bound",
    }
    assert found.members[0].leaks and found.members[0].limit is not None
    assert "Batch membership leaks" in found.sentence and "images" in found.sentence


def test_report_export_and_terminal_have_both(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    report = write_report(run).read_text()
    assert report.count("Batch membership leaks") >= 2  # the verdict, and the section
    table = io.StringIO()
    write_csv(run, table)
    lines = table.getvalue().splitlines()
    for metric in ("membership", "membership_at_1_percent", "dataset_membership", "psnr"):
        assert any(f",{metric}," in line for line in lines), metric
    print_summary(run, "auto")
    assert "Batch membership leaks" in " ".join(capsys.readouterr().out.split())
