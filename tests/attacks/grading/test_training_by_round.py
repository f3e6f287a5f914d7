"""One result of all compared rounds: the worst one, with the rounds and clients of each."""

from fedgauge.attacks.grading.rate_and_steps import RateTimesSteps
from fedgauge.attacks.grading.training_by_round import from_json, over_rounds, to_json
from fedgauge.attacks.grading.training_evidence import TrainingEvidence

FITS = TrainingEvidence("sum of gradients", True, "fits")
WRONG = TrainingEvidence("noise", False, "WARNING: noise")
OPEN = TrainingEvidence("undecided", None, "not told")


def test_the_worst_of_the_rounds_is_the_result() -> None:
    assert over_rounds({(1, 0): FITS}) == FITS
    assert over_rounds({(1, 0): FITS, (2, 0): FITS}).fits is True
    assert over_rounds({(1, 0): FITS, (2, 0): OPEN}).fits is None
    found = over_rounds({(1, 0): FITS, (2, 0): OPEN, (3, 1): WRONG})
    assert (found.kind, found.fits) == ("noise", False)
    assert "client 1, round 3" in found.words and "1 updates of 3" in found.words


def test_a_rate_that_changed_beyond_both_intervals_fits_no_longer() -> None:
    def of(value: float) -> TrainingEvidence:
        rates = RateTimesSteps(value, value / 1.3, value * 1.3)
        return TrainingEvidence("sum of gradients", True, "fits", rates)

    assert over_rounds({(1, 0): of(0.1), (2, 0): of(0.08)}).fits is True
    assert over_rounds({(1, 0): of(0.1), (2, 1): of(0.05)}).fits is True, "of another client"
    found = over_rounds({(1, 0): of(0.1), (2, 0): of(0.05)})
    assert found.fits is False
    assert "0.1 (0.077 to 0.13) in round 1 and is 0.05 (0.038 to 0.065)" in found.words


def test_results_are_kept_as_json() -> None:
    found = {(1, 0): TrainingEvidence("Adam", True, "a", RateTimesSteps(1.0, 0.5, 2.0)), (2, 3): OPEN}
    assert from_json(to_json(found)) == found
