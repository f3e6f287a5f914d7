"""Grids: cells are the products of axes, and what names an unknown cell, attack or figure is refused."""

from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.simulations.experiments.paper_table_files import load, names, parse
from fedgauge.simulations.experiments.paper_tables import AttackSpec, PaperTable

SGD = {"use": "local_sgd", "rate": 0.5}
IG = {"name": "ig", "use": "inverting_gradients", "iterations": 5}
TABLES: dict[str, Any] = {
    "n": 8,
    "data": {"use": "mnist5k"},
    "model": {"use": "mlp", "hidden": [8]},
    "axes": ["size", "defense"],
    "cell_name": "{defense}, {size}",
    "size": [{"name": "", "n": 4}, {"name": "B=2", "data": {"batch_size": 2}}],
    "defense": [{"name": "none", "chain": [SGD]}, {"name": "sign", "chain": [{"use": "sign"}, SGD]}],
    "attack": [IG, {"name": "analytic", "use": "analytic", "iterations": 1, "defenses": ["none"]}],
}


def grid(**changes: Any) -> PaperTable:
    return parse("grid", TABLES | changes)


def attack_of(table: PaperTable, cell: str, attack: str) -> AttackSpec:
    (found,) = [spec for c in table.cells if c.name == cell for spec in c.attacks if spec.name == attack]
    return found


def test_the_first_axis_varies_slowest_and_its_tables_are_joined_with_those_at_the_top() -> None:
    cells = grid().cells
    assert [cell.name for cell in cells] == ["none", "sign", "none, B=2", "sign, B=2"]
    assert [cell.n for cell in cells] == [4, 4, 8, 8]
    assert [(cell.images.use, cell.images.batch_size) for cell in cells[1:3]] == [("mnist5k", 1), ("mnist5k", 2)]
    assert [len(cell.chain) for cell in cells] == [1, 2, 1, 2]
    assert [[spec.name for spec in cell.attacks] for cell in cells] == 2 * [["ig", "analytic"], ["ig"]]


def test_what_holds_for_some_cells_only_names_them_and_the_last_one_holds() -> None:
    where = [
        {"defenses": ["sign"], "n": 2, "attacks": {"i*": {"iterations": 7}}},
        {"defenses": ["sign"], "sizes": ["B=2"], "n": 1},
    ]
    table = grid(where=where, attacks={"*": {"labels": "restored", "iterations": 9}})
    assert [cell.n for cell in table.cells] == [4, 2, 8, 1]
    iterations = [(spec.name, spec.budget.iterations) for cell in table.cells[:2] for spec in cell.attacks]
    assert iterations == [("ig", 5), ("analytic", 1), ("ig", 7)], "what is at the top holds where nothing else is said"
    assert {spec.labels for cell in table.cells for spec in cell.attacks} == {"restored"}


def test_figures_of_the_paper_are_given_by_cell_attack_and_metric() -> None:
    attack = [{**IG, "paper": {"n": 100, "iterations": 4800}}]
    table = grid(
        attack=attack, reference={"sign*": {"ig": {"psnr": 12}}, "none, B=2": {"*": {"psnr": 9.5, "spread": 1}}}
    )
    assert attack_of(table, "none", "ig").paper == {"n": 100, "iterations": 4800}
    assert attack_of(table, "sign", "ig").paper == {"n": 100, "iterations": 4800, "psnr": 12}
    assert attack_of(table, "none, B=2", "ig").paper["spread"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": ["size", "colour"]}, "axes: there is no [[colour]]"),
        ({"axes": []}, "axes is empty; name some"),
        ({"axes": ["size", "chain"]}, "axes: 'chain' is a key of paper tables"),
        ({"axes": ["size"]}, "the paper table: unknown key 'defense' (it has: title, note, seed"),
        ({"cell": [{"name": "a"}]}, "the paper table: unknown key 'cell'"),
        ({"size": {"name": "B=1"}}, "write [[size]] instead of [size]"),
        ({"size": [{"n": 4}]}, "[[size]] #1: name must be a text, got None"),
        ({"size": [{"name": "B=1", "defenses": ["none"]}]}, "[[size]] #1: unknown key 'defenses' (it has: name, attack"),
        ({"size": [{"name": "B=1"}, {"name": "B=1"}]}, "two cells are called 'none, B=1'"),
        ({"size": [{"name": "B=1", "data": 2}]}, "cell none, B=1: data must be a table, got 2"),
        ({"cell_name": "{defense}"}, "two cells are called 'none'"),
        ({"cell_name": "{colour}"}, "cell_name: '{colour}' may name the axes size, defense in braces, and no other"),
        ({"cell_name": "{defense"}, "cell_name: '{defense' may name"),
        ({"where": [{"defenses": ["noise"], "n": 1}]}, "[[where]] #1: unknown defense 'noise' (there are: none, sign)"),
        ({"where": [{"defenses": [], "n": 1}]}, "[[where]] #1: defenses is empty"),
        ({"where": [{"colours": ["red"], "n": 1}]}, "[[where]] #1: unknown key 'colours' (it has: attacks, n"),
        ({"where": [{"n": 1, "attacks": {"dlg": {}}}]}, "attacks: no attack is called 'dlg' (there are: ig, analytic)"),
        ({"attacks": {"*": 3}}, "cell none: * must be a table, got 3"),
        ({"attacks": 3}, "attacks must be a table, got 3"),
        ({"attack": [IG, {**IG, "sizes": ["B=2"]}]}, "cell none, B=2: two of its attacks are called 'ig'"),
        ({"attack": [{**IG, "defenses": ["none"]}]}, "cell sign: it has no attack"),
        ({"attack": [{**IG, "sizes": ["B=3"]}]}, "[[attack]] #1: unknown size 'B=3' (there are: , B=2)"),
        ({"reference": {"noise": {"ig": {"psnr": 1.0}}}}, "[reference] 'noise': no cell has this name (there are: none, sign"),
        ({"reference": {"sign": {"analytic": {"psnr": 1.0}}}}, "[reference] 'sign': no attack is called 'analytic' there (there"),
        ({"reference": {"sign": {"ig": {"ssim": 1.0}}}}, "cell sign, attack #1: the paper's figure 'ssim' is none of ig's"),
        ({"reference": {"sign": {"ig": {"psnr": "high"}}}}, "paper psnr must be a number, got 'high'"),
        ({"reference": {"sign": {"ig": 3}}}, "[reference] 'sign': ig must be a table, got 3"),
    ],
)  # fmt: skip
def test_what_a_grid_names_and_does_not_have_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        grid(**changes)
    assert message in str(error.value)


CELLS = {
    "adapters": 16,
    "bayes_fig2": 16, "bayes_fig5": 6, "bayes_table2": 16, "dager": 7, "feedback_blending": 4, "fishing": 5, "geiping_fig4": 5,
    "geiping_fig5": 11, "geiping_fig6": 3, "geiping_table1": 5, "geiping_table2": 11, "geiping_table3": 2, "gifd": 4,
    "gifd_resnet20": 1,
    "identity_convolutions": 6, "imprint": 4, "inconsistency": 3, "label_flipping": 2, "label_flipping_noise": 4, "loki": 4,
    "lamp_table1": 5, "lamp_table2": 3, "lamp_table4": 2, "lamp_table5": 3, "lamp_table7": 2, "lamp_table8": 6, "lamp_table9": 2,
    "lti_auxiliary": 2, "lti_lenet": 24, "lti_ood": 4, "lti_resnet20": 8, "lti_text": 8, "optimised_parameters": 5,
    "partial_matching": 2, "scale_mia": 8, "somp": 3, "spear": 7, "spear_plus_plus": 11, "trap_weights": 2,
    "suite_full": 19, "suite_small": 19, "tableak": 5, "tiger": 5,
}  # fmt: skip


def test_every_paper_has_the_cells_that_it_had_when_each_was_written_out() -> None:
    tables = {name: load(name) for name in names()}
    assert {name: len(table.cells) for name, table in tables.items() if table.cells} == CELLS
    assert sum(len(cell.attacks) for table in tables.values() for cell in table.cells) == 605


def test_cells_of_the_papers_grids_are_what_they_were_when_they_were_written_out() -> None:
    lenet = {cell.name: cell for cell in load("lti_lenet").cells}
    assert list(lenet)[:4] == ["none B=1", "none B=1, network", "none B=1, all attacks", "sign B=1"]
    cell = lenet["gauss B=4, all attacks"]
    assert (cell.n, cell.wave, cell.heavy, cell.images.batch_size, cell.auxiliary) == (16, 64, True, 4, 10000)
    assert cell.chain == ({"use": "gaussian", "sigma": 0.1, "each": True}, {"use": "local_sgd", "rate": 1.0})
    assert [spec.name for spec in cell.attacks] == ["ridge", "learning_to_invert", "ig", "gi_gip", "mean_image"]
    ig = cell.attacks[2]
    assert (ig.table, ig.budget.iterations, ig.paper) == ({"use": "bayes"}, 1000, {"mse": 0.206, "n": 1000})
    assert [spec.table.get("hidden") for spec in lenet["sign B=4, network"].attacks] == [10000, None]
    ats = {cell.name: cell for cell in load("bayes_fig2").cells}["ats step 50"]
    assert ats.train is not None and (ats.train.steps, ats.train.defended) == (50, True)
    noisy = {cell.name: cell for cell in load("bayes_table2").cells}["cifar10 pruning-laplacian step 500"]
    assert [spec.table["tv"] for spec in noisy.attacks] == [1250.0, 0.00265, 0.00265]
    assert [spec.paper["psnr"] for spec in noisy.attacks] == [18.51, 15.32, 15.51]
    blended = {cell.name: cell for cell in load("feedback_blending").cells}["cifar100 dlg"].attacks[1]
    searched = {"use": "dlg", "restart_above": 1e-5, "tolerance": 1e-5}
    assert blended.table == {"use": "feedback_blending", "attack": searched, "fit": 1e-5} and blended.against == "dlg"
    assert (blended.budget.iterations, blended.paper) == (800, {"success_gain": 18.08, "iterations_saved": 48.82})
