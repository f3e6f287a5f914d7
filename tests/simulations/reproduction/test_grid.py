"""Grids: cells are the products of axes, and what names an unknown cell, attack or figure is refused."""

from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.simulations.reproduction.paper_table_files import parse
from fedgauge.simulations.reproduction.paper_tables import AttackSpec, PaperTable

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


def test_settings_for_some_cells_name_them_and_the_last_wins() -> None:
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
    ("changes", "named"),
    [
        ({"axes": ["size"]}, "'defense'"),
        ({"size": {"name": "B=1"}}, "[[size]]"),
        ({"size": [{"n": 4}]}, "[[size]] #1: name"),
        ({"size": [{"name": "B=1", "defenses": ["none"]}]}, "'defenses'"),
        ({"where": [{"defenses": ["noise"], "n": 1}]}, "'noise'"),
        ({"where": [{"models": ["mlp"]}]}, "'models'"),
        ({"cell_name": "{defence}"}, "'{defence}'"),
        ({"cell_name": "{"}, "cell_name"),
        ({"defense": [{"name": "none"}, {"name": "none"}]}, "'none'"),
        ({"attack": [IG, IG]}, "'ig'"),
        ({"attack": [{**IG, "against": "dlg"}]}, "'dlg'"),
        ({"attack": [{**IG, "metrics": ["psnrr"]}]}, "'psnrr'"),
        ({"attack": [{"use": "membership", "metrics": ["membership"]}]}, "'train'"),
        ({"attacks": 3}, "attacks"),
        ({"attacks": {"ig": 3}}, "attacks: ig"),
        ({"model": {"use": "mlpp"}}, "'mlpp'"),
        ({"data": {"use": "mnis"}}, "'mnis'"),
        ({"n": 0, "size": [{"name": "one"}]}, "n must be at least 1"),
        ({"reference": 3}, "[reference]"),
        ({"reference": {"none": {"ig": 3}}}, "[reference] 'none', 'ig'"),
        ({"reference": {"prune": {"ig": {"psnr": 1.0}}}}, "'prune'"),
        ({"reference": {"none": {"dlg": {"psnr": 1.0}}}}, "'dlg'"),
    ],
)
def test_what_a_grid_names_and_does_not_have_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError) as error:
        grid(**changes)
    assert named in str(error.value)
