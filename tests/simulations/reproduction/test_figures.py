"""The file of results: it is written whole, continues after a kill, and takes no rows of anything else."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.experiments.results import ResultsFile
from fedgauge.simulations.reproduction import paper_table_files
from fedgauge.simulations.reproduction import reproduce as reproducing
from fedgauge.simulations.reproduction.figures import compared, head_of, read_figures
from fedgauge.simulations.reproduction.measures import ComparedFigure
from fedgauge.simulations.reproduction.paper_tables import PaperTable
from fedgauge.simulations.reproduction.reproduce import reproduce
from tests.simulations.reproduction.small_tables import ANALYTIC, paper_table
from tests.test_docs_code import write

IDLG = {"use": "idlg", "labels": "restored", "iterations": 3, "metrics": ["mse", "success_gain"], "against": "analytic"}


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toys").mkdir()
    write("papers/README.md", tmp_path / "toys")
    monkeypatch.setattr(paper_table_files, "PAPERS", tmp_path)


@pytest.mark.usefixtures("toys")
def test_an_interrupted_table_continues_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second cell is interrupted; the second call attacks only that cell."""
    command = ["reproduce", "toy", "-o", str(tmp_path / "figures.json")]
    attacked: list[int] = []
    whole = reproducing.run_attack

    def interrupted(spec: Any, setup: Any, *rest: Any) -> Any:
        attacked.append(len(setup.auditor.federation.chain.links))
        if attacked == [1, 2]:
            raise KeyboardInterrupt
        return whole(spec, setup, *rest)

    monkeypatch.setattr(reproducing, "run_attack", interrupted)
    assert main(command) == 130
    before = json.loads((tmp_path / "figures.json").read_text())
    assert [row["cell"] for row in before["rows"]] == ["none"]
    assert main(command) == 0
    printed, errors = capsys.readouterr()
    assert "holds 1" in errors and attacked == [1, 2, 2], "what was done is not done again"
    after = json.loads((tmp_path / "figures.json").read_text())
    assert after["rows"][:1] == before["rows"] and [row["cell"] for row in after["rows"]] == ["none", "sign"]
    assert main(command[:2]) == 0
    assert capsys.readouterr().out == printed, "as in one go"
    assert "toy paper's table" in printed and "61.5" in printed


def test_what_it_is_compared_with_is_run_again_where_a_call_was_interrupted_between_the_two() -> None:
    attacks = [{**ANALYTIC, "metrics": ["success"]}, {**IDLG, "name": "idlg"}]
    table = paper_table(n=2, cell={"attack": attacks})
    (first, second), (continued,) = reproduce(table), reproduce(table, {("mlp", "analytic")})
    assert [(row.attack, row.metric, row.here) for row in continued] == [(r.attack, r.metric, r.here) for r in second]
    assert {row.attack for row in first} == {"analytic"}
    assert list(reproduce(table, {("mlp", "analytic"), ("mlp", "idlg")})) == []


def opened(path: Path, table: PaperTable) -> ResultsFile[ComparedFigure]:
    return ResultsFile(path, ComparedFigure, head_of(table))


def filled(path: Path, **changes: Any) -> dict[str, Any]:
    """A file of one attack's figures."""
    table = paper_table(n=2)
    (rows,) = reproduce(table)
    opened(path, table).write(rows)
    kept: dict[str, Any] = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(kept))
    return kept


def test_a_finished_file_is_read_and_its_time_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    kept = filled(path, seconds=100.0)
    file = opened(path, paper_table(n=2))
    assert [vars(row) for row in file.rows] == kept["rows"] and len(file.rows) == 3
    file.write(file.rows)
    assert json.loads(path.read_text())["seconds"] >= 100


@pytest.mark.parametrize(
    ("changes", "table"),
    [
        ({"name": "other"}, {}),
        ({"version": 2}, {}),
        ({}, {"seed": 3}),
        ({}, {"n": 3}),
        ({"environment": {"python": "2.7", "packages": {}}}, {}),
        ({"rows": [{"cell": "mlp"}]}, {}),
        ({"rows": [{"here": "abc"}]}, {}),
    ],
)
def test_a_file_of_anything_else_is_refused(tmp_path: Path, changes: dict[str, Any], table: dict[str, Any]) -> None:
    path = tmp_path / "figures.json"
    filled(path, **changes)
    before = path.read_bytes()
    with pytest.raises(SpecError):
        opened(path, paper_table(**{"n": 2, **table}))
    assert path.read_bytes() == before


@pytest.mark.full
@pytest.mark.usefixtures("toys")
def test_cells_in_processes_give_the_same_figures(tmp_path: Path) -> None:
    paths = [tmp_path / "one.json", tmp_path / "several.json"]
    for path, jobs in zip(paths, ("1", "2"), strict=True):
        assert main(["reproduce", "toy", "--jobs", jobs, "-o", str(path)]) == 0
    one, several = (sorted((r["cell"], r["here"]) for r in json.loads(path.read_text())["rows"]) for path in paths)
    assert [cell for cell, _ in one] == [cell for cell, _ in several] == ["none", "sign"]
    assert [here for _, here in one] == pytest.approx([here for _, here in several])


def test_only_figures_of_equal_settings_are_compared(tmp_path: Path) -> None:
    kept = json.loads((paper_table_files.PAPERS / "suite" / "results" / "suite_small.json").read_text())
    theirs = {**kept, "rows": [{**row, "here": None} for row in kept["rows"][1:]]}
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(theirs))
    table = compared({"ours": read_figures(Path("suite_small")), "theirs": read_figures(path)})
    assert len(table.rows) == len({(row["cell"], row["attack"], row["metric"]) for row in kept["rows"]})
    assert {row[4] for row in table.rows} == {"-"} and {row[3] for row in table.rows} != {"-"}
    assert main(["compare", "suite_small", str(path)]) == 0
    first = next(iter(kept["computed"]))
    for change in ({"computed": {**kept["computed"], first: "another"}}, {"version": -1}, {"rows": 3}):
        path.write_text(json.dumps({**theirs, **change}))
        assert main(["compare", "suite_small", str(path)]) == 2
