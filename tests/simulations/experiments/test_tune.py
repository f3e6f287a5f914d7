"""Tuning never uses reported images and treats all attacks alike."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.simulations.experiments.paper_table_files import load
from fedgauge.simulations.experiments.paper_tables import (
    PaperTable,
)
from fedgauge.simulations.experiments.run_attack import run_attack
from fedgauge.simulations.experiments.setups import build_setup
from fedgauge.simulations.experiments.tune import candidates, on_tuning_images, search_space, tune
from fedgauge.simulations.experiments.tune import main as tune_main
from tests.simulations.experiments.small_tables import ANALYTIC, only, paper_table


def matching_sheet(**attack_table: Any) -> PaperTable:
    matching = {"name": "ig", "use": "inverting_gradients", "iterations": 3, "tv": 0.5, **attack_table}
    return paper_table(cell={"attack": [matching, ANALYTIC], "model": {"use": "lenet"}})


def test_tuning_images_are_never_those_that_are_reported() -> None:
    for cell in load("bayes_table2").cells:
        moved = on_tuning_images(cell, 4)
        reported = range(cell.images.first, cell.images.first + cell.n * cell.images.batch_size)
        tuned = range(moved.images.first, moved.images.first + 4 * moved.images.batch_size)
        assert not set(reported) & set(tuned)
    with pytest.raises(SpecError, match="reports more than 500 images"):
        on_tuning_images(replace(only(paper_table()), n=501), 4)


def test_every_attack_of_a_cell_is_tried_at_the_same_places_of_its_ranges() -> None:
    (spec, _) = only(matching_sheet()).attacks
    found = list(candidates(spec, 5, seed=0, cell="a"))
    assert found == list(candidates(spec, 5, seed=0, cell="a"))
    assert len({c["tv"] for c in found}) == 5
    bounds = search_space(spec.table)
    assert all(bounds[k].low <= v <= bounds[k].high for c in found for k, v in c.items())
    assert found != list(candidates(spec, 5, seed=1, cell="a"))
    places = []
    for conditional in ("known", "squared", "cosine"):
        other = replace(spec, table={"use": "bayes", "conditional": conditional})
        tv = search_space(other.table)["tv"]
        drawn = [c["tv"] for c in candidates(other, 5, seed=0, cell="a")]
        places.append([math.log(v / tv.low) / math.log(tv.high / tv.low) for v in drawn])
    assert places[1] == places[2] == pytest.approx(places[0], abs=1e-3)  # to the three digits that are kept


def test_tuning_returns_settings_that_score_what_it_says_and_no_less_than_the_start() -> None:
    (best,) = tune(matching_sheet(), n=2, trials=4)  # the analytic attack has nothing to tune
    cell = on_tuning_images(only(matching_sheet()), 2)
    setup, spec = build_setup(cell, 0), cell.attacks[0]

    def score(settings: Mapping[str, float]) -> float:
        tried = replace(spec, table={**spec.table, **settings})
        return round(float(run_attack(tried, setup, cell.wave).psnr.mean()), 2)

    assert score(best.settings) == best.psnr
    assert best.psnr >= max(score(settings) for settings in candidates(spec, 2, 0, cell.name))
    assert best.trials == 4 and (best,) == tuple(tune(matching_sheet(), n=2, trials=4)), "seeded"


def test_tuning_tells_a_mistake_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_main(["geiping_table9"]) == 2
    assert "tune: no paper table is called 'geiping_table9'" in capsys.readouterr().err
