"""The heat map shows the worst PSNR of each client in each round."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.collections import QuadMesh

from fedgauge.server.store.run import Run
from fedgauge.server.views.clients import heat_map
from fedgauge.server.views.reading import read_once
from fedgauge.simulations.reports.figures.draw import draw_heat_map
from fedgauge.simulations.reports.figures.write import write_figures
from tests.simulations.reports.figures.graded_runs import drawn, graded


def test_the_heat_map_is_the_worst_psnr_of_each_client_and_round(run: Run) -> None:
    axes = drawn(run)["clients"].axes[0]
    (mesh,) = [c for c in axes.collections if isinstance(c, QuadMesh)]
    expected = [[25.0 + 2 * r + c for r in (1, 2, 3)] for c in (0, 1, 2)]
    np.testing.assert_array_equal(np.asarray(mesh.get_array()), expected)
    assert [t.get_text() for t in axes.texts] == [f"{v:.0f}" for row in expected for v in row]
    assert axes.yaxis_inverted(), "client 0 above"


def test_who_was_not_graded_is_blank_and_baselines_are_no_leak(tmp_path: Path) -> None:
    def one(attack: str, round: int, client: int) -> Mapping[str, float | None]:
        if attack == "mean_image":
            return {"psnr": 50.0}
        return {"psnr": math.inf if (round, client) == (2, 1) else None}

    run = graded(tmp_path / "one", one, limit=False)
    with read_once(run) as reading:
        heat = heat_map(reading, "psnr")
    assert heat is not None and (heat.clients, heat.rounds, heat.values) == ([0, 1, 2], [2], [[None], [60.0], [None]])
    (mesh,) = [c for c in drawn(run)["clients"].axes[0].collections if isinstance(c, QuadMesh)]
    assert np.ma.count_masked(mesh.get_array()) == 2
    assert write_figures([run], tmp_path / "figures")[1] == []


def test_where_a_lower_value_leaks_more_the_lowest_is_the_worst(run: Run) -> None:
    with read_once(run) as reading:
        heat, rows = heat_map(reading, "mse"), reading.scores.of_metric("mse")
    assert heat is not None and heat.brightest == 0.0 < heat.darkest
    rows = rows.where(rows.by_attacks)
    for client, values in zip(heat.clients, heat.values, strict=True):
        for round, value in zip(heat.rounds, values, strict=True):
            assert value == rows.value[(rows.client == client) & (rows.round == round)].min()
    (mesh,) = [c for c in draw_heat_map(heat).axes[0].collections if isinstance(c, QuadMesh)]
    assert sum(mesh.to_rgba(0.0)) > sum(mesh.to_rgba(heat.darkest)), "the brightest leaks most"


def test_many_cells_stay_a_small_file(tmp_path: Path) -> None:
    run = graded(tmp_path / "large", lambda a, r, c: {"psnr": 10.0 + r % 7 + c}, ("first",), clients=20, rounds=101)
    write_figures([run], tmp_path / "figures")
    assert (tmp_path / "figures" / "clients.svg").stat().st_size < 300_000
    assert {p.name for p in (tmp_path / "figures").glob("*.svg")} == {
        "leakage-psnr.svg", "success.svg", "clients.svg", "gallery.svg"
    }  # fmt: skip
