"""The suite: its files hold together, and what others submit runs on a cell's terms."""

import re
import shlex
from pathlib import Path

import pytest

from fedgauge.attacks.base import LIMITS
from fedgauge.attacks.modality.registry import MODALITIES
from fedgauge.attacks.plan import modalities_of
from fedgauge.client.components import SpecError
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.experiments.results import rows_of
from fedgauge.simulations.reproduction.figures import head_of, read_figures
from fedgauge.simulations.reproduction.measures import ComparedFigure
from fedgauge.simulations.reproduction.paper_table_files import PAPERS, load, restrict, with_submissions

SUITES = ("suite_small", "suite_full")


@pytest.mark.parametrize("name", SUITES)
def test_every_attack_of_a_cell_spends_as_much_and_knows_as_much(name: str) -> None:
    for cell in load(name).cells:
        terms = {(a.budget, a.labels, a.lengths, a.metrics) for a in cell.attacks if a.role not in LIMITS}
        assert len(terms) == 1, cell.name
    assert {cell.images.batch_size for cell in load(name).cells} >= {1, 2, 4}


@pytest.mark.parametrize("name", SUITES)
def test_the_suite_has_every_kind_of_data_and_who_was_in_a_batch(name: str) -> None:
    cells = load(name).cells
    assert [cell.name for cell in cells] == [cell.name for cell in load(SUITES[0]).cells]
    kinds = {kind for cell in cells for kind in modalities_of(str(cell.attacks[0].table["use"]))}
    assert kinds == set(MODALITIES.values())
    assert any(cell.model.get("adapter") for cell in cells)
    assert {len(cell.chain) > 1 for cell in cells if cell.attacks[0].tests_membership} == {True, False}


@pytest.mark.parametrize("name", SUITES)
def test_a_limit_is_next_to_the_attacks_where_it_is_known_of_a_cells_noise(name: str) -> None:
    for cell in load(name).cells:
        noisy = any(link["use"] == "gaussian" for link in cell.chain)
        of_members = cell.attacks[0].tests_membership
        limited = {attack.name for attack in cell.attacks if attack.role in LIMITS}
        known = {"membership_limit"} if of_members else {"bayes_limit"} if cell.name.startswith("images") else set()
        assert limited == (known if noisy else set()), cell.name


def test_a_submission_runs_on_the_terms_of_the_cell() -> None:
    table = restrict(load("suite_small"), None, None, "prune")
    (cell,) = with_submissions(table, ["dlg name=mine restart_above=0.5"]).cells
    first, *_, mine = cell.attacks
    assert mine.name == "mine" and mine.table == {"use": "dlg", "restart_above": 0.5}
    assert (mine.budget, mine.labels, mine.metrics) == (first.budget, first.labels, first.metrics)


@pytest.mark.parametrize(
    ("attack", "named"),
    [
        ("dlgg", "dlgg"),
        ("dlg iterations=9", "iterations"),
        ("idlg", "idlg"),
        ("", "empty"),
        ("membership", "membership"),
        ("tag", "tag"),
    ],
)
def test_a_mistaken_submission_is_refused(attack: str, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        with_submissions(restrict(load("suite_small"), None, None, "prune"), [attack])


def test_a_test_of_membership_runs_where_members_are_detected_and_other_attacks_elsewhere() -> None:
    made = with_submissions(load("suite_small"), ["membership score=cosine name=mine", "dlg name=other"])
    names = {cell.name: {attack.name for attack in cell.attacks} for cell in made.cells}
    assert {cell for cell, of_it in names.items() if "mine" in of_it} == {c for c in names if c.startswith("members")}
    assert {cell for cell, of_it in names.items() if "other" in of_it} == {c for c in names if c.startswith("images")}


# ------------------------------------------------------------------------------------------------------ real figures


def test_the_kept_figures_are_of_todays_suite() -> None:
    ours, table = read_figures(next(PAPERS.glob("*/results/suite_small.json"))), load("suite_small")
    assert (ours["version"], ours["seed"]) == (table.version, table.seed)
    assert ours["computed"] == head_of(table)["computed"]
    assert {(row["cell"], row["attack"]) for row in ours["rows"]} == {
        (cell.name, attack.name) for cell in table.cells for attack in cell.attacks
    }


def test_a_submission_may_be_computed_alone() -> None:
    table = with_submissions(restrict(load("suite_small"), None, None, "images B=1"), ["dlg name=mine"])
    alone, beside = (restrict(table, None, None, "*", attacks, ["mine"]) for attacks in ("mine", "idlg"))
    assert {a.name for cell in alone.cells for a in cell.attacks} == {"mine"}
    assert {a.name for cell in beside.cells for a in cell.attacks} == {"mine", "idlg"}


def test_the_pages_own_attack_runs_in_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guide's own commands, in cells that take a second, with the mine.py of the page that it names."""
    docs = Path(__file__).parents[3] / "docs"
    own = re.findall(r"```python\n# mine.py\n(.*?)```", (docs / "bring-your-own.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text("\n".join(own))
    monkeypatch.chdir(tmp_path)
    section = (docs / "guides/suite.md").read_text().partition("## Submit")[2]
    (attack,) = map(shlex.split, re.findall(r"^fedgauge (.*)$", section, re.MULTILINE))
    less = ["--n", "1", "--budget", "2"]
    assert main([*attack, "--cells", "images B=1, prune", "--attacks", "descent", *less]) == 0
    assert "descent" in capsys.readouterr().out


@pytest.fixture(scope="module")
def of_members(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of figure of the cell whose members noise hides."""
    path = tmp_path_factory.mktemp("members") / "figures.json"
    cell = ["reproduce", "suite", "--cells", "members, images B=16, clip and noise", "--n", "2"]
    assert main([*cell, "--attacks", "*li*", "-o", str(path)]) == 0
    return path


def test_members_are_detected_by_a_score_and_no_better_than_the_limit(of_members: Path) -> None:
    rows = {
        row.attack: row for row in rows_of(read_figures(of_members), ComparedFigure, "") if row.metric == "membership"
    }
    told, limit = rows["likelihood_ratio"], rows["membership_limit"]
    assert told.n == limit.n == 32 and limit.floor is None
    assert told.here is not None and limit.here is not None and told.low is not None and told.high is not None
    assert told.floor is not None and 0.4 < told.floor < told.here < limit.here < 1
    assert 0 <= told.low <= told.here <= told.high <= 1
