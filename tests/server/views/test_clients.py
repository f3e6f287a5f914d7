"""The heat map has the worst value of each client in each round."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from fedgauge.server.store.run import Run
from fedgauge.server.views.clients import heat_map
from fedgauge.server.views.reading import read_once
from tests.simulations.reports.figures.graded_runs import graded


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return graded(tmp_path_factory.mktemp("runs") / "graded")


def test_values_are_the_worst_case_of_each_client_and_round(run: Run) -> None:
    with read_once(run) as reading:
        heat = heat_map(reading, "psnr")
    assert heat is not None and heat.values == [[25.0 + 2 * r + c for r in (1, 2, 3)] for c in (0, 1, 2)]


def test_a_client_without_a_grade_is_blank_and_baselines_are_no_leak(tmp_path: Path) -> None:
    def one(attack: str, round: int, client: int) -> Mapping[str, float | None]:
        if attack == "mean_image":
            return {"psnr": 50.0}
        return {"psnr": math.inf if (round, client) == (2, 1) else None}

    with read_once(graded(tmp_path / "one", one, limit=False)) as reading:
        heat = heat_map(reading, "psnr")
    assert heat is not None and (heat.clients, heat.rounds, heat.values) == ([0, 1, 2], [2], [[None], [60.0], [None]])


def test_of_a_distance_the_lowest_value_is_the_worst(run: Run) -> None:
    with read_once(run) as reading:
        heat, rows = heat_map(reading, "mse"), reading.scores.of_metric("mse")
    assert heat is not None and heat.brightest == 0.0 < heat.darkest
    rows = rows.where(rows.by_attacks)
    for client, values in zip(heat.clients, heat.values, strict=True):
        for round, value in zip(heat.rounds, values, strict=True):
            assert value == rows.value[(rows.client == client) & (rows.round == round)].min()
