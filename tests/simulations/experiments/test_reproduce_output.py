"""The file of a reproduction: it is written whole, continues after a kill, and takes no figures of anything else."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.experiments import reproduce as reproducing
from fedgauge.simulations.experiments.reproduce import reproduce
from fedgauge.simulations.experiments.reproduce_output import FiguresFile
from tests.simulations.experiments.small_tables import ANALYTIC, paper_table, quiet

CALL = ["reproduce", "dager", "--cells", "phrases*", "--n", "2", "--json"]
IDLG = {"use": "idlg", "labels": "restored", "iterations": 3, "metrics": ["mse", "success_gain"], "against": "analytic"}


def test_what_was_killed_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real reproduction is killed when its first cell has printed its rows; the second start runs the others alone."""
    kept = tmp_path / "figures.json"
    command = [sys.executable, "-m", "fedgauge.simulations.cli.main", *CALL, "-o", str(kept)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:  # the first attack of the second cell has printed all that the first cell has
            if json.loads(line)["cell"] == "phrases, tiny BERT, B=2":
                child.kill()
                break
    before = json.loads(kept.read_text())
    finished = {(row["cell"], row["attack"]) for row in before["rows"]}
    assert len(finished) >= 3 and {path.name for path in tmp_path.iterdir()} >= {"figures.json"}
    attacked: list[tuple[str, str]] = []
    whole = reproducing.run_attack

    def watched(spec: Any, setup: Any, *rest: Any) -> Any:
        attacked.append((spec.name, len(setup.truth[0].y)))
        return whole(spec, setup, *rest)

    monkeypatch.setattr(reproducing, "run_attack", watched)
    assert main([*CALL, "-o", str(kept)]) == 0
    printed, said = capsys.readouterr()
    assert f"{kept} holds {len(before['rows'])}" in said
    assert attacked == [("dager", 2), ("dager", 4)][len(finished) - 2 :], "what was done is not done again"
    after = json.loads(kept.read_text())
    assert after["rows"][: len(before["rows"])] == before["rows"]
    attacked.clear()
    assert main(CALL) == 0
    assert capsys.readouterr().out == printed, "as in one go"
    assert len(attacked) == 4


def test_what_it_is_compared_with_is_run_again_where_a_call_was_interrupted_between_the_two() -> None:
    attacks = [{**ANALYTIC, "metrics": ["success"]}, {**IDLG, "name": "idlg"}]
    table = paper_table(n=2, cell={"attack": attacks})
    (first, second), (continued,) = reproduce(table, quiet), reproduce(table, quiet, {("mlp", "analytic")})
    assert [(row.attack, row.metric, row.here) for row in continued] == [(r.attack, r.metric, r.here) for r in second]
    assert {row.attack for row in first} == {"analytic"}
    assert list(reproduce(table, quiet, {("mlp", "analytic"), ("mlp", "idlg")})) == []


def filled(path: Path, **changes: Any) -> dict[str, Any]:
    """A file of one attack's figures."""
    table = paper_table(n=2)
    (rows,) = reproduce(table, quiet)
    FiguresFile(path, table).add(rows, 1.0)
    kept: dict[str, Any] = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(kept))
    return kept


def test_a_finished_file_is_read_and_its_time_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    kept = filled(path)
    file = FiguresFile(path, paper_table(n=2))
    assert len(file.rows) == len(kept["rows"]) == 3 and file.done == {("mlp", "analytic")}
    file.add([], 2.0)
    assert json.loads(path.read_text())["seconds"] == 3.0


@pytest.mark.parametrize(
    ("changes", "table", "named"),
    [
        ({"name": "other"}, {}, "'other'"),
        ({}, {"seed": 3}, "seed"),
        ({}, {"n": 3}, "settings"),
        ({"environment": {"python": "2.7"}}, {}, "python"),
        ({"rows": [{"cell": "mlp"}]}, {}, "no file of figures"),
        ({"rows": [{"here": "abc"}]}, {}, "'abc'"),
    ],
)
def test_a_file_of_anything_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], table: dict[str, Any], named: str
) -> None:
    path = tmp_path / "figures.json"
    filled(path, **changes)
    before = path.read_bytes()
    with pytest.raises(SpecError, match=named):
        FiguresFile(path, paper_table(**{"n": 2, **table}))
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["figures", "[]", '{"rows": []}'])
def test_what_is_no_file_of_figures_is_refused_with_status_2(tmp_path: Path, text: str) -> None:
    path = tmp_path / "figures.json"
    path.write_text(text)
    assert main(["reproduce", "dlg", "--n", "1", "--budget", "1", "-o", str(path)]) == 2
    assert path.read_text() == text
