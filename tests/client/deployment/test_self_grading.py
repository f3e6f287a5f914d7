"""Grading at the client: numbers that say how much leaked, and too few of them, too coarse, to be a leak themselves."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedgauge.client.deployment.owner_file import GradingPolicy, OwnerConfig
from fedgauge.client.deployment.self_grading import batch_to_grade, grade, rounded
from fedgauge.client.deployment.server_terms import RequestRefused
from fedgauge.client.deployment.state_folder import ClientFolder, DrawnBatch, digest_of
from fedgauge.client.update import Batch

SCORES = GradingPolicy("scores")


def batch(examples: int = 2, pixels: int = 4, seed: int = 0) -> Batch:
    x = torch.rand(examples, 1, pixels, pixels, generator=torch.Generator().manual_seed(seed))
    return Batch(x, torch.zeros(examples, dtype=torch.int64))


def off_by(truth: Batch, psnr: float) -> Tensor:
    """Images at this PSNR exactly: each pixel is wrong by the same."""
    error = 10 ** (-psnr / 20)
    return torch.where(truth.x + error <= 1, truth.x + error, truth.x - error)


@pytest.mark.parametrize(
    ("psnr", "precision", "told"),
    [(20.1, 0.5, 20.0), (20.3, 0.5, 20.5), (13.7, 1.0, 14.0), (13.7, 3.0, 15.0), (24.96, 0.1, 25.0)],
)
def test_a_known_error_is_reported_to_the_precision(tmp_path: Path, psnr: float, precision: float, told: float) -> None:
    truth = batch()
    answer = grade(GradingPolicy("scores", precision), ClientFolder(tmp_path), 1, truth, {"dlg": off_by(truth, psnr)})
    assert answer.psnr["dlg"] == pytest.approx((told, told))
    assert answer.refused == {}


def test_an_exact_hit_is_sixty_decibels_and_the_worst_guess_none(tmp_path: Path) -> None:
    black = Batch(torch.zeros(1, 1, 4, 4), torch.zeros(1, dtype=torch.int64))
    answer = grade(SCORES, ClientFolder(tmp_path), 1, black, {"hit": black.x, "miss": torch.ones(1, 1, 4, 4)})
    assert dict(answer.psnr) == {"hit": (60.0,), "miss": (0.0,)}


@given(st.floats(0, 200), st.floats(0, 200), st.sampled_from([0.1, 0.5, 0.7, 1.0, 7.0, 8.5, 60.0]))
def test_answers_are_steps_below_the_cap_within_half_a_step_and_in_order(a: float, b: float, precision: float) -> None:
    told = rounded(a, precision)
    steps = (60 - told) / precision
    assert told == 0 or math.isclose(steps, round(steps), abs_tol=1e-9)
    assert 0 <= told <= 60 and abs(told - min(a, 60)) <= precision / 2 + 1e-9
    assert (a <= b) <= (told <= rounded(b, precision))


def test_images_are_paired_one_to_one_and_reported_in_their_own_order(tmp_path: Path) -> None:
    truth = batch(3)
    guess = torch.stack([off_by(truth, p)[i] for i, p in ((2, 10.0), (0, 20.0), (1, 30.0))])
    assert grade(SCORES, ClientFolder(tmp_path), 1, truth, {"dlg": guess}).psnr["dlg"] == (10.0, 20.0, 30.0)


def test_questions_far_outside_would_be_exact_and_are_not_answered(tmp_path: Path) -> None:
    """At 1e4, PSNR to half a dB would still be sharp in no pixel; at NaN or below 0 nothing is an image."""
    truth = batch(1)
    for value in (1e4, -1e-3, 1.001, math.nan, math.inf):
        guess = truth.x.clone()
        guess[0, 0, 0, 0] = value
        answer = grade(SCORES, ClientFolder(tmp_path), 1, truth, {"dlg": guess})
        assert (set(answer.psnr), set(answer.refused)) == (set(), {"dlg"})


# ------------------------------------------------------------------------------------------------------------------ counts


def test_the_same_question_has_the_stored_answer_and_counts_once(tmp_path: Path) -> None:
    truth, state = batch(), ClientFolder(tmp_path)
    guess = off_by(truth, 20.0)
    first = grade(GradingPolicy("scores", queries=1), state, 1, truth, {"dlg": guess})
    again = grade(GradingPolicy("scores", queries=1), ClientFolder(tmp_path), 1, truth, {"dlg": guess})
    assert first.psnr == again.psnr == {"dlg": (20.0, 20.0)}
    coarser = grade(GradingPolicy("scores", precision=7.0, queries=1), state, 1, truth, {"dlg": guess})
    assert coarser.psnr == first.psnr, "two roundings of one value would be a finer one"


def test_one_answer_an_attack_and_round(tmp_path: Path) -> None:
    truth, state = batch(), ClientFolder(tmp_path)
    grade(SCORES, state, 1, truth, {"dlg": off_by(truth, 20.0)})
    answer = grade(SCORES, state, 1, truth, {"dlg": off_by(truth, 25.0)})
    assert set(answer.refused) == {"dlg"}


def test_counts_outlive_the_process_and_are_of_one_batch_in_whatever_rounds(tmp_path: Path) -> None:
    truth, grading = batch(), GradingPolicy("scores", queries=3)
    for i in range(3):
        told = grade(grading, ClientFolder(tmp_path), 1, truth, {f"a{i}": off_by(truth, 10.0 + i)})
        assert told.psnr
    refused = grade(grading, ClientFolder(tmp_path), 1, truth, {"a3": off_by(truth, 20.0)})
    assert set(refused.refused) == {"a3"}
    assert not grade(grading, ClientFolder(tmp_path), 2, truth, {"a3": off_by(truth, 20.0)}).psnr, "the same examples"
    assert grade(grading, ClientFolder(tmp_path), 1, batch(seed=1), {"a3": batch(seed=2).x}).psnr, (
        "another batch, drawn anew"
    )


# ------------------------------------------------------------------------------------------------------- which batch it is


def owner(folder: Path, mode: str = "scores") -> OwnerConfig:
    text = f"""
    client = 0
    chain = [{{ use = "local_sgd", rate = 0.1 }}]
    data = {{ use = "mnist5k", whole = true }}
    grading = {{ mode = "{mode}" }}
    """
    return OwnerConfig.parse(text, folder / "client.toml")


def test_only_what_was_trained_on_is_graded(tmp_path: Path) -> None:
    who = owner(tmp_path)
    state = ClientFolder(who.state)
    drawn = who.batch([7, 3])
    state.keep_drawn(2, DrawnBatch(1, (7, 3), digest_of(drawn), sent=True))
    state.keep_drawn(2, DrawnBatch(5, (1, 2), digest_of(who.batch([1, 2])), sent=True))
    assert torch.equal(batch_to_grade(who, state, 1, 2).x, drawn.x), "another run's round 2 is another"
    state.keep_drawn(6, DrawnBatch(1, (7, 3), digest_of(drawn)))
    for config, run, round in ((who, 1, 3), (who, 4, 2), (owner(tmp_path, "off"), 1, 2), (who, 1, 6)):
        with pytest.raises(RequestRefused):
            batch_to_grade(config, state, run, round)


@pytest.mark.parametrize("rows", [(7, 4), (7, 10**6)])
def test_data_that_has_changed_since_is_not_graded(tmp_path: Path, rows: tuple[int, int]) -> None:
    who = owner(tmp_path)
    state = ClientFolder(who.state)
    state.keep_drawn(2, DrawnBatch(1, rows, digest_of(who.batch([7, 3])), sent=True))
    with pytest.raises(RequestRefused):
        batch_to_grade(who, state, 1, 2)
