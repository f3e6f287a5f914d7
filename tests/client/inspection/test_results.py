"""Results of detectors: sorted by suspicion, and a score that is no number is the largest."""

import math

import pytest

from fedgauge.client.inspection.results import LARGEST, DetectorResult, DetectorResults


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_the_largest(wrong: float) -> None:
    for order in (1, -1):
        both = [DetectorResult("jump", "a", 0.1, "x"), DetectorResult("jump", "b", wrong, "y")][::order]
        found = DetectorResults.of(iter([*both, DetectorResult("architecture", "", 0.1, "z")]))
        assert [(f.layer, f.score) for f in found.alarms] == [("b", LARGEST)]
        assert found.results[0].layer == "b"


def test_findings_are_sorted_by_suspicion() -> None:
    found = DetectorResults.of(
        iter(
            [
                DetectorResult("jump", "a", 0.1, "x"),
                DetectorResult("jump", "b", 0.3, "y"),
                DetectorResult("architecture", "", 3.0, "z"),
            ]
        )
    )
    assert [(f.detector, f.layer) for f in found.results] == [("architecture", ""), ("jump", "b")]
    assert found.suspicion == pytest.approx(3)
    assert found.reasons == "the network: z"
    assert DetectorResults(()).suspicion == 0
