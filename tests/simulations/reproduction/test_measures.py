"""Measures are ratios and means that can be computed by hand, with honest intervals."""

import numpy as np
import pytest

from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.server.views.intervals import clustered_interval
from fedgauge.server.views.scores import Scores
from fedgauge.simulations.reproduction.measures import AttackOutcome, all_measures, measured, metric_of
from tests.simulations.reproduction.small_tables import of_scores, outcome


def test_gains_are_ratios_that_can_be_done_on_paper() -> None:
    """Ours recovers 3 of 4 in 10, 20 and 30 iterations, theirs 2 of 4 in 40 and 60: 50 % more, in 60 % less."""
    ours = outcome([1e-4, 1e-4, 1e-4, 1.0], [10, 20, 30, 99])
    theirs = outcome([1e-4, 1.0, 1e-4, 1.0], [40, 99, 60, 99])
    value, low, high = measured("success_gain", ours, theirs)
    assert value == pytest.approx(50)
    assert low is not None and high is not None and low <= 50 <= high
    assert measured("iterations_saved", ours, theirs)[0] == pytest.approx(60)
    assert measured("iterations", ours, None)[0] == pytest.approx(20)
    assert measured("success", ours, None)[0] == 0.75
    nothing = outcome([1.0, 1.0], [5, 5])
    assert measured("iterations", nothing, None) == (None, None, None)
    assert measured("success_gain", nothing, nothing) == (None, None, None)
    assert measured("isolated_psnr", nothing, None) == (None, None, None)


def test_a_measure_reads_one_metric_and_has_no_value_without_it() -> None:
    some = {"psnr", "ssim", "lpips_alex", "identified", "psnr_augmented", "rouge1", "exact_sentence"}
    assert some <= set(all_measures())
    assert [metric_of(m) for m in ("verbatim", "success_gain", "exact_sentence")] == ["psnr", "mse", "exact"]
    assert measured("lpips_vgg", outcome([1e-4, 1e-4], [1, 1]), None) == (None, None, None), "without its weights"


def test_a_measure_of_whole_batches_is_of_so_many_batches() -> None:
    rows = [(1, client, "attack", WHOLE_BATCH, "class_detected", "converged", 1.0) for client in range(3)]
    assert AttackOutcome(Scores.of(rows), np.ones(3), 0, 0.0, {}).examples == 3
    assert outcome([1e-4, 1.0], [1, 1]).examples == 2


def test_intervals_resample_updates_and_one_update_gives_none() -> None:
    """Images of one update are alike here, so its interval is that of three numbers, not of twelve."""
    values = np.array([[10.0] * 4, [20.0] * 4, [30.0] * 4])
    value, low, high = measured("psnr", of_scores({"psnr": values}, [1] * 3), None)
    assert value == 20
    assert (low, high) == clustered_interval(np.array([10.0, 20.0, 30.0]), np.arange(3))
    one_by_one = clustered_interval(values.flatten(), np.arange(12))
    assert low is not None and one_by_one is not None and low < one_by_one[0]
    assert measured("psnr", of_scores({"psnr": values[:1]}, [1]), None) == (10.0, None, None)
