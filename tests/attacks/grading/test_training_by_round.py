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
    assert found.words.startswith("WARNING: noise")


def test_the_rounds_of_each_result_are_listed_by_client() -> None:
    alike = {(round, client): FITS for round in (1, 2, 3) for client in (0, 1, 2)}
    assert over_rounds(alike).words.endswith("Compared: clients 0 to 2: fits in rounds 1 to 3")
    late = alike | {(2, 1): WRONG, (3, 1): WRONG}
    assert over_rounds(late).words.endswith(
        "Compared: clients 0 and 2: fits in rounds 1 to 3; client 1: fits in round 1, does not fit from round 2 on"
    )
    once = {(1, 0): FITS, (2, 0): WRONG, (3, 0): OPEN, (5, 0): FITS}
    assert over_rounds(once).words.endswith(
        "client 0: fits in rounds 1 and 5, undecided in round 3, does not fit in round 2"
    )


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
