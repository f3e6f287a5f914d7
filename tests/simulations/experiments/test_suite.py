"""The suite: its files hold together, what others submit runs on a cell's terms, and figures compare only if computed alike."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.experiments.kept_digest import figures_digest
from fedgauge.simulations.experiments.paper_table_files import load, restrict
from fedgauge.simulations.experiments.suite.compare_figures import compared, read_figures
from fedgauge.simulations.experiments.suite.submissions import with_submissions

SUITES = ("suite_small", "suite_full")


@pytest.mark.parametrize("name", SUITES)
def test_every_attack_of_a_cell_spends_as_much_and_knows_as_much(name: str) -> None:
    for cell in load(name).cells:
        terms = {(attack.budget, attack.labels, attack.lengths, attack.metrics) for attack in cell.attacks}
        assert len(terms) == 1, cell.name
    assert {cell.images.batch_size for cell in load(name).cells} >= {1, 2, 4}


def test_the_levels_have_the_same_cells() -> None:
    small, full = (load(name) for name in SUITES)
    assert [cell.name for cell in small.cells] == [cell.name for cell in full.cells]
    assert all(a.n <= b.n for a, b in zip(small.cells, full.cells, strict=True))


def test_a_submission_runs_on_the_terms_of_the_cell() -> None:
    table = restrict(load("suite_small"), None, None, "prune")
    (cell,) = with_submissions(table, ["dlg name=mine restart_above=0.5"], []).cells
    first, *_, mine = cell.attacks
    assert mine.name == "mine" and mine.table == {"use": "dlg", "restart_above": 0.5}
    assert (mine.budget, mine.labels, mine.metrics) == (first.budget, first.labels, first.metrics)


def test_a_defense_adds_a_cell_beside_each_that_has_none() -> None:
    table = restrict(load("suite_small"), None, None, "images B=4")
    made = with_submissions(table, [], ["gaussian sigma=0.1 name=fog"])
    before, more = table.cells, made.cells[len(table.cells) :]
    assert made.cells[: len(before)] == before
    assert [cell.name for cell in more] == [f"{cell.name}, fog" for cell in before]
    assert [cell.chain[0] for cell in more] == [{"use": "gaussian", "sigma": 0.1}] * len(before)


@pytest.mark.parametrize(
    ("attacks", "defenses", "says"),
    [
        (["dlgg"], [], "dlgg"),
        (["dlg iterations=9"], [], "iterations is the same for every attack of a cell"),
        (["idlg"], [], "has an attack called idlg already; add name=another"),
        ([""], [], "--attack is empty"),
        ([], ["fogg"], "fogg"),
    ],
)
def test_a_mistaken_submission_is_one_sentence(attacks: list[str], defenses: list[str], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        with_submissions(restrict(load("suite_small"), None, None, "prune"), attacks, defenses)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["reproduce", "lamp", "--level", "small"], "--level is the suite's"),
        (["compare", "a.json", "a.json"], "takes each file once"),
        (["compare", "a.json"], "there is no file a.json"),
    ],
)
def test_a_mistake_ends_with_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ real figures

PART = ["reproduce", "suite", "--cells", "prune", "--n", "1", "--budget", "2"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same part of the suite, and with an attack that somebody submits."""
    folder = tmp_path_factory.mktemp("figures")
    ours, theirs = folder / "ours.json", folder / "theirs.json"
    assert main([*PART, "--attacks", "idlg", "-o", str(ours)]) == 0
    assert main([*PART, "--attacks", "idlg", "--attack", "dlg name=mine", "-o", str(theirs)]) == 0
    return ours, theirs


def test_a_submission_stands_beside_what_both_computed(
    kept: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = (read_figures(path) for path in kept)
    found = compared({"ours": ours, "theirs": theirs})
    both, alone = (found["images B=1, prune", attack, "psnr"] for attack in ("idlg", "mine"))
    assert both["ours"].here == pytest.approx(both["theirs"].here) and alone.keys() == {"theirs"}
    assert main(["compare", *map(str, kept)]) == 0
    assert "mine" in capsys.readouterr().out


def changed(path: Path, folder: Path, change: Any, hashed: bool) -> Path:
    content = json.loads(path.read_text())
    change(content)
    if hashed:
        content["digest"] = figures_digest(content)
    (folder / "changed.json").write_text(json.dumps(content))
    return folder / "changed.json"


@pytest.mark.parametrize(
    ("change", "hashed", "says"),
    [
        (lambda c: c["rows"][0].update(here=99.0), False, "was altered"),
        (lambda c: c["computed"].update({next(iter(c["computed"])): "0" * 64}), True, "was computed otherwise than in"),
        (lambda c: c.update(name="lamp"), True, "they do not compare"),
        (lambda c: c.pop("digest"), False, "lacks 'digest'"),
        (lambda c: c.update(rows=[{"cell": 1}]), True, "is no file of figures"),
    ],
)
def test_what_does_not_compare_is_refused(
    kept: tuple[Path, Path], tmp_path: Path, change: Any, hashed: bool, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(kept[1], tmp_path, change, hashed)
    assert main(["compare", str(kept[0]), str(path)]) == 2
    assert says in capsys.readouterr().err


def test_altered_figures_are_not_continued(
    kept: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(kept[0], tmp_path, lambda c: c["rows"][0].update(here=99.0), hashed=False)
    assert main([*PART, "--attacks", "idlg", "-o", str(path)]) == 2
    assert "was altered" in capsys.readouterr().err
