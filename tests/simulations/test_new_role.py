"""A baseline and a limit of a package of one's own, in one file, are run, shown, exported and judged as fedgauge's."""

import io
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fedgauge.client.psnr import in_db
from fedgauge.server.store.run import Run
from fedgauge.server.views.snapshot import read_once
from fedgauge.server.views.verdict import excesses
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reports.export import write_csv
from tests.simulations.test_new_modality import TABLES, attacked, page_of, swept

FILE = '''
from dataclasses import dataclass

from fedgauge.attacks.grading.baselines import Baseline
from fedgauge.attacks.limits import ErrorLimit


@dataclass(frozen=True)
class near(Baseline):
    """A guess that happens to be right for the first of a wave, so that it is the hardest to beat."""

    def guesses(self, public, wave, known, streams):
        exact = wave.update["weight"][:, :1] / wave.update["bias"][:, :1, None]
        return [*exact[:1], *(exact[1:] + 0.5)]


@dataclass(frozen=True)
class floor(ErrorLimit):
    """The least error, which is known here."""

    error_below: float = 1e-5

    def assumes(self, fed, batch):
        return [batch, "nothing else"]

    def error(self, case, rng):
        return self.error_below
'''
PLAN: dict[str, Any] = {**TABLES, "attack": [*TABLES["attack"], {"use": "myroles:near"}, {"use": "myroles:floor"}]}
BOUND = in_db(1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("roles")
    (folder / "myroles.py").write_text(FILE)
    with attacked(folder, PLAN, "mynumbers", "myroles") as made:
        yield made


@pytest.fixture(autouse=True)
def elsewhere(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not met the file and may not load it."""
    sys.modules.pop("myroles", None)
    monkeypatch.setenv("FEDGAUGE_ALLOW", "mynumbers")


def test_the_ledger_has_their_roles_and_no_wrong_client_of_theirs(run: Run) -> None:
    with run.ledger() as ledger:
        roles = {row["name"]: row["role"] for row in ledger.attacks()}
        assert roles == {"row_over_bias": "attack", "near": "baseline", "floor": "limit", "mean_number": "baseline"}
        assert {row["attack"] for row in ledger.scores()} == {*roles, "wrong_client(row_over_bias)"}
        fates = {row["attack"] for row in ledger.outcomes() if row["role"] == "attack"}
        assert fates == {"row_over_bias"} and ledger.best_so_far() == 100.0


def test_the_page_the_report_and_the_export_show_them_as_what_they_are(run: Run) -> None:
    with page_of(run) as asked:
        told = asked("overview")
    heads = [column["key"] for column in told["summary"]["columns"]]
    rows = {row[0]: dict(zip(heads, row, strict=True)) for row in told["summary"]["rows"]}
    assert [(name, row["kind"]) for name, row in rows.items()] == [
        ("row_over_bias", "attack"),
        ("floor", "limit"),
        ("near", "baseline"),
        ("mean_number", "baseline"),
        ("wrong_client(row_over_bias)", "baseline"),
    ]
    assert rows["floor"]["of_error"] == pytest.approx(BOUND) and rows["floor"]["n"] is None
    assert {card["name"]: card["parts"] for card in told["cards"]}["floor"][-1].endswith("nothing else")
    kinds = {s["name"]: s["role"] for figure in told["over_rounds"] for s in figure["series"]}
    assert (kinds["near"], kinds["floor"]) == ("baseline", "limit")
    assert {card["name"]: card["kind"] for card in told["cards"]}["near"] == "baseline"
    assert main(["report", str(run.folder)]) == 0
    report = (run.folder / "report.html").read_text()
    assert re.search(r"floor</td>\s*<td[^>]*>limit", report) and re.search(r"near</td>\s*<td[^>]*>baseline", report)
    table = io.StringIO()
    write_csv(run, table)
    lines = table.getvalue().splitlines()
    assert len([line for line in lines if ",floor," in line and ",mse," in line]) == 6
    assert len([line for line in lines if ",near," in line and ",close," in line]) == 6


def test_the_verdict_compares_with_the_harder_baseline(run: Run) -> None:
    with read_once(run) as reading:
        (excess,) = excesses(reading.scores)
        assert (excess.attack, excess.baseline, excess.attacks) == ("row_over_bias", "near", 1)


def test_the_gate_and_the_sweep_ask_attacks_only_and_the_sweep_has_the_limit(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = ["gate", str(run.folder), "--allow", "mynumbers"]
    assert main([*gate, "--fail-above", "close=50"]) == 1
    assert "by row_over_bias" in capsys.readouterr().out
    monkeypatch.setenv("FEDGAUGE_ALLOW", "mynumbers,myroles")
    rows, _ = swept(run.folder.parent, PLAN)
    assert [(row["attack"], row["bound"], row["limit"]) for row in rows] == [
        ("row_over_bias", pytest.approx(BOUND), None)
    ]
