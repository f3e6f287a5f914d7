"""Paper tables say what the papers say, and mistakes in them are reported with their place."""

from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.simulations.reproduction.measures import all_measures
from fedgauge.simulations.reproduction.paper_table_files import load, packaged, restrict
from fedgauge.simulations.reproduction.paper_tables import STRONGEST
from tests.simulations.reproduction.small_tables import ANALYTIC, paper_table

PAPERS = (
    "bayes_fig2", "bayes_fig5", "bayes_table2", "batchnorm", "dlg", "feedback_blending", "geiping_fig4",
    "geiping_fig5", "geiping_fig6", "geiping_table1", "geiping_table2", "geiping_table3",
    "lamp_table1", "lamp_table2", "lamp_table4", "lamp_table5", "lamp_table7", "lamp_table8", "lamp_table9", "lti_text",
    "dager",
)  # fmt: skip
BEYOND_METRICS = ("spread", "n", "iterations", "restarts")  # of what a paper reports of an attack


def test_every_table_is_there_and_every_part_of_it_exists() -> None:
    assert set(packaged()) >= set(PAPERS)
    for name in packaged():
        found = load(name)
        assert found.title and found.note and found.cells
        assert len({cell.name for cell in found.cells}) == len(found.cells)
        for cell in found.cells:
            attacks = {spec.name for spec in cell.attacks}
            assert attacks and len(attacks) == len(cell.attacks), cell.name
            for spec in cell.attacks:
                assert spec.against in {"", STRONGEST, *attacks} and set(spec.metrics) <= set(all_measures())
                assert spec.paper.keys() <= {*spec.metrics, *BEYOND_METRICS}, (cell.name, spec.name)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sede": 1}, "'sede'"),
        ({"cell": {"atack": []}}, "'atack'"),
        ({"cell": {"attack": [{**ANALYTIC, "tv": 1.0}]}}, "'tv'"),
        ({"data": {"use": "mnist5k", "part": "all"}}, "part"),
        ({"n": "few"}, "'few'"),
    ],
)
def test_a_mistake_in_a_sheet_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError) as error:
        paper_table(**changes)
    assert named in str(error.value)


def test_restricting_changes_n_iterations_and_cells_and_nothing_else() -> None:
    whole = load("geiping_table1")
    few = restrict(whole, n=2, budget=7, cells="lenet*")
    assert [c.name for c in few.cells] == ["lenet untrained", "lenet untrained, 100 images", "lenet trained"]
    assert {(c.n, t.budget.iterations) for c in few.cells for t in c.attacks} == {(2, 7)}
    assert list(restrict(whole, None, None, None).cells) == [c for c in whole.cells if not c.heavy]
    assert [c.name for c in restrict(whole, None, None, "20 tr").cells] == ["resnet20 trained"]
    for arguments in ((1, 1, "vgg"), (1, 1, None, "tag")):
        with pytest.raises(SpecError):
            restrict(whole, *arguments)


def test_an_attack_that_is_chosen_brings_what_it_is_measured_against() -> None:
    lamp, blending = load("lamp_table1"), load("feedback_blending")
    short, *_ = restrict(lamp, None, None, "short", "lamp*").cells
    assert [t.name for t in short.attacks] == ["lamp_cos"]
    first, *_ = restrict(blending, None, None, None, "idlg-half").cells
    assert [t.name for t in first.attacks] == ["idlg", "idlg-half"]


def test_heavy_cells_run_only_when_they_are_named() -> None:
    whole = load("geiping_fig6")
    heavy = {c.name for c in whole.cells if c.heavy}
    assert heavy == {"resnet32-10, batch of 100"}
    assert not heavy & {c.name for c in restrict(whole, None, None, None).cells}
    assert {c.name for c in restrict(whole, None, None, "resnet32-10*").cells} == heavy
