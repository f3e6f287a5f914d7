"""Paper tables say what the papers say, and mistakes in them are reported with their place."""

from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.simulations.experiments.paper_table_files import load, names, restrict
from tests.simulations.experiments.small_tables import ANALYTIC, paper_table

PAPERS = (
    "bayes_fig2", "bayes_fig4", "bayes_fig5", "bayes_table2", "feedback_blending", "gaussian_world", "geiping_fig4",
    "geiping_fig5", "geiping_fig6", "geiping_table1", "geiping_table2", "geiping_table3",
    "lamp_table1", "lamp_table2", "lamp_table4", "lamp_table5", "lamp_table7", "lamp_table8", "lamp_table9", "lti_text",
    "dager",
)  # fmt: skip


def test_every_table_is_there_and_every_part_of_it_exists() -> None:
    assert set(names()) >= set(PAPERS)
    for name in names():
        found = load(name)
        assert found.title and found.note and (found.cells or found.world)
        assert len({cell.name for cell in found.cells}) == len(found.cells)


def test_sheets_say_what_the_papers_say() -> None:
    """Figures copied from the papers' tables by hand."""

    def references(name: str, attack: str) -> list[float | None]:
        cells = [c for c in load(name).cells]
        return [t.paper.get("psnr") for c in cells for t in c.attacks if t.name == attack]

    assert references("geiping_table1", "euclidean") == [46.25, 13.24, 10.29, 6.90]
    assert references("geiping_table1", "inverting_gradients") == [18.00, 18.00, 18.08, 19.83, 13.95], (
        "the first cell at the paper's own size, too"
    )
    assert references("geiping_table2", "inverting_gradients")[:5] == [16.92, 14.66, 16.49, 25.05, 16.58]
    assert references("geiping_fig4", "inverting_gradients") == [19.02, 22.04, 22.94, 21.59, 20.98]
    ablation = load("geiping_table3").cells[0]
    assert [t.paper["psnr"] for t in ablation.attacks] == [20.12, 15.13, 19.96, 5.13]
    table = load("bayes_table2")
    assert [t.paper["psnr"] for c in table.cells for t in c.attacks if t.name == "bayes"] == [
        19.63, 16.06, 19.48, 15.95, 18.40, 16.42, 18.27, 16.52, 21.86, 17.94, 21.87, 18.41, 20.73, 18.67, 20.54, 18.51,
    ]  # fmt: skip
    assert sum(len(c.attacks) for c in table.cells) == 48
    for cell in load("geiping_table2").cells:  # E epochs over n images in batches of B are E n / B steps
        words = cell.name.split(",")[0].split()
        epochs, n, batch = (int(w[1:]) for w in words[1:4])
        assert (cell.images.batch_size, cell.chain[0]["steps"], cell.chain[0]["batch_size"]) == (
            n,
            epochs * n // batch,
            batch,
        )


def test_sheets_of_lamp_say_what_the_paper_says() -> None:
    """Figures with [CLS] and [SEP], copied from the paper's tables by hand; cells for minutes repeat those of hours."""

    def references(name: str, attack: str) -> list[tuple[float | None, ...]]:
        keys = ("rouge1_special", "rouge2_special", "rougeL_special")
        specs = [t for c in load(name).cells if c.heavy for t in c.attacks if t.name == attack and t.paper]
        return [tuple(t.paper.get(k) for k in keys) for t in specs]

    assert references("lamp_table1", "dlg") == [(59.3, 7.7, 46.2)]
    assert references("lamp_table1", "tag") == [(78.9, 10.2, 53.3)]
    assert references("lamp_table1", "lamp_cos") == [(89.6, 51.9, 76.2), (88.8, 56.9, 77.7), (64.7, 16.3, 43.1)]
    assert references("lamp_table1", "lamp_l2l1") == [(87.5, 47.5, 73.2)]
    assert references("lamp_table2", "lamp_l2l1") == [(78.0, 31.4, 63.7), (66.2, 21.8, 55.2)]
    assert references("lamp_table4", "no_lm") == [(86.7, 26.6, 66.9)]
    assert references("lamp_table4", "no_discrete") == [(86.6, 29.6, 67.4)]
    assert references("lamp_table5", "lamp_cos") == [(81.2, 42.7, 69.4), (27.7, None, None)]
    assert references("lamp_table7", "lamp_cos") == [(87.8, 48.4, 74.6)]
    zeroed = references("lamp_table8", "lamp_cos")
    assert [row[0] for row in zeroed] == [79.4, 61.9, 39.0, 24.7, 66.5], "75, 90, 95, 99 %, and local training"
    assert [c.chain[0].get("keep") for c in load("lamp_table8").cells if c.heavy] == [0.25, 0.1, 0.05, 0.01, None]
    assert references("lamp_table9", "one_start") == [(87.3, 48.1, 73.2)]
    for name in (n for n in names() if n.startswith("lamp_")):
        first, *rest = load(name).cells
        assert not first.heavy and all(cell.heavy for cell in rest), "what nobody asks for by name takes minutes"
        assert all(t.lengths == "given" == t.labels for c in (first, *rest) for t in c.attacks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sede": 1}, "the paper table: unknown key 'sede' (it has: title, note, seed, version, world, axes, cell_name"),
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
        ({"world": {"name": "gaussian_world", "n": 2, "iterations": 2}}, "either [[cell]]s or a [world]"),
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
    with pytest.raises(SpecError, match="compares no attacks"):
        restrict(load("gaussian_world"), None, None, None, "map")


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
