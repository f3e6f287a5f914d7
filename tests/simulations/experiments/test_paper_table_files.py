"""Paper tables say what the papers say, and mistakes in them are reported with their place."""

from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.simulations.experiments.paper_table_files import load, names, restrict
from tests.simulations.experiments.small_tables import ANALYTIC, paper_table

PAPERS = (
    "bayes_fig2", "bayes_fig5", "bayes_table2", "batchnorm", "dlg", "feedback_blending", "geiping_fig4",
    "geiping_fig5", "geiping_fig6", "geiping_table1", "geiping_table2", "geiping_table3",
    "lamp_table1", "lamp_table2", "lamp_table4", "lamp_table5", "lamp_table7", "lamp_table8", "lamp_table9", "lti_text",
    "dager",
)  # fmt: skip


def test_every_table_is_there_and_every_part_of_it_exists() -> None:
    assert set(names()) >= set(PAPERS)
    for name in names():
        found = load(name)
        assert found.title and found.note and found.cells
        assert len({cell.name for cell in found.cells}) == len(found.cells)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sede": 1}, "the paper table: unknown key 'sede' (it has: title, note, seed, version, axes, cell_name"),
        ({"cell": {"atack": []}}, "[[cell]] #1: unknown key 'atack' (it has: name, attack, attacks, n"),
        ({"cell": {"attack": []}}, "cell mlp: it has no attack"),
        ({"cell": {"attack": [{**ANALYTIC, "tv": 1.0}]}}, "attack #1: [[attack]] analytic: analytic() has no argument 'tv'"),
        ({"cell": {"attack": [{**ANALYTIC, "metrics": ["vif"]}]}}, "unknown metric 'vif' (there are: best_psnr, isolated_psnr"),
        ({"cell": {"attack": [{**ANALYTIC, "against": "dlg"}]}}, "against = 'dlg' is not one of its attacks"),
        ({"cell": {"attack": [{**ANALYTIC, "paper": {"psnr": "high"}}]}}, "paper psnr must be a number, got 'high'"),
        ({"cell": {"attack": [{**ANALYTIC, "paper": {"ssim": 0.1}}]}}, "the paper's figure 'ssim' is none of ana"),
        ({"cell": {"attack": [ANALYTIC, ANALYTIC]}}, "cell mlp: two of its attacks are called 'analytic'"),
        ({"cell": {"attack": [{"use": "analytic"}]}}, "cell mlp: the name of an attack must be a text, got None"),
        ({"cell": {"attack": [{**ANALYTIC, "iterations": 0}]}}, "iterations must be at least 1, got 0"),
        ({"chain": [{"use": "os:system"}]}, "chain #1: use = 'os:system' is not allowed here"),
        ({"data": {"use": "mnist5k", "part": "all"}}, "part must be one of 'train', 'test', got 'all'"),
        ({"n": "few"}, "n must be a whole number, got 'few'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_sheet_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        paper_table(**changes)
    assert message in str(error.value)


def test_restricting_changes_n_iterations_and_cells_and_nothing_else() -> None:
    whole = load("geiping_table1")
    few = restrict(whole, n=2, budget=7, cells="lenet*")
    assert [c.name for c in few.cells] == ["lenet untrained", "lenet untrained, 100 images", "lenet trained"]
    assert {(c.n, t.budget.iterations) for c in few.cells for t in c.attacks} == {(2, 7)}
    assert list(restrict(whole, None, None, None).cells) == [c for c in whole.cells if not c.heavy]
    assert [c.name for c in restrict(whole, None, None, "20 tr").cells] == ["resnet20 trained"]
    for arguments, message in (
        ((0, None, None), "--n must be at"),
        ((None, 0, None), "--budget"),
        ((1, 1, "vgg"), "'vgg'; it"),
        ((1, 1, None, "tag"), "'tag'; it has: "),
    ):
        with pytest.raises(SpecError, match=message):
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


def test_only_matching_can_be_blended() -> None:
    blending = {"name": "a", "use": "feedback_blending"}
    with pytest.raises(SpecError, match="analytic is no attack by gradient matching|analytic"):
        paper_table(cell={"attack": [{**blending, "attack": "analytic"}]})
    with pytest.raises(SpecError, match=r"feedback_blending\(\) has no argument 'beta'"):
        paper_table(cell={"attack": [{**blending, "beta": 0.5}]})
