"""Grading at the client: numbers that say how much leaked, and too few of them, too coarse, to be a leak themselves."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgauge.attacks.modality.images import ImageModality
from fedgauge.client.deployment.owner_file import GradingPolicy, OwnerConfig
from fedgauge.client.deployment.self_grading import batch_to_grade, grade, rounded
from fedgauge.client.deployment.server_terms import RequestRefused
from fedgauge.client.deployment.state_folder import ClientFolder, DrawnBatch, digest_of
from fedgauge.client.psnr import match, psnr_of
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


@pytest.mark.parametrize("precision", [0.1, 0.5, 0.7, 7.0, 8.5])
def test_an_exact_hit_is_reported_as_whole_and_nothing_ranks_above_it(precision: float) -> None:
    exact = rounded(math.inf, precision)
    assert ImageModality.main.came_back_whole(exact) and rounded(59.9, precision) <= exact
    told = {rounded(v / 1000, precision) for v in range(0, 200_000)}
    assert len(told) <= 60 / precision + 1.5, "an exact hit takes no value more than the steps have"


def test_images_are_paired_one_to_one_and_reported_in_their_own_order(tmp_path: Path) -> None:
    truth = batch(3)
    guess = torch.stack([off_by(truth, p)[i] for i, p in ((2, 10.0), (0, 20.0), (1, 30.0))])
    assert grade(SCORES, ClientFolder(tmp_path), 1, truth, {"dlg": guess}).psnr["dlg"] == (10.0, 20.0, 30.0)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_the_scores_are_those_of_the_best_pairing(seed: int, examples: int) -> None:
    """As an attacker's own grader pairs them, over random batches."""
    truth, guess = batch(examples, seed=seed), batch(examples, seed=seed + 1).x
    theirs = psnr_of(truth.x, guess[match(truth.x, guess)])
    order = match(guess, truth.x)
    ours = psnr_of(guess, truth.x[order])
    torch.testing.assert_close(theirs.sort().values, ours.sort().values)


# --------------------------------------------------------------------------------------------------------- it is an oracle


def solve(images: list[Tensor], answers: list[float]) -> Tensor:
    """The image from squared errors: |x - g|^2 - |x - g0|^2 = |g|^2 - |g0|^2 - 2 (g - g0) x, in least squares."""
    g = torch.stack([i.flatten().double() for i in images])
    d = g.shape[1]
    squares = torch.tensor([d * 10 ** (-psnr / 10) for psnr in answers], dtype=torch.float64)
    left = 2 * (g[1:] - g[0])
    right = g[1:].square().sum(1) - g[0].square().sum() - squares[1:] + squares[0]
    return torch.linalg.lstsq(left, right, driver="gelsd").solution


def test_d_plus_one_exact_answers_give_the_image_and_what_a_client_answers_does_not(tmp_path: Path) -> None:
    """784 pixels: exactly graded, 785 questions are the image. Rounded and counted they are worse than no question at all."""
    pixels = 28
    d, truth = pixels**2, batch(1, pixels)
    base = torch.zeros(1, 1, pixels, pixels)
    questions = [base]
    for k in range(d):
        other = base.clone()
        other.view(-1)[k] = 1.0
        questions.append(other)
    wanted = truth.x.flatten().double()

    exact = [float(psnr_of(truth.x, q)) for q in questions]
    assert float((solve(questions, exact) - wanted).square().mean().sqrt()) < 1e-5, "the attack works"

    state, answers = ClientFolder(tmp_path), []
    for start in range(0, d + 1, 50):
        asked = {f"attack{start + i}": q for i, q in enumerate(questions[start : start + 50])}
        told = grade(SCORES, state, 1, truth, asked)
        answers += [told.psnr[name][0] for name in asked if name in told.psnr]
    assert len(answers) == 8, "and no more, however often it asks"

    guess = (wanted - 0.5).square().mean().sqrt()  # of somebody who asks nothing
    with_eight = solve(questions[:8], answers)
    unasked = torch.cat([with_eight[:7], torch.full((d - 7,), 0.5, dtype=torch.float64)])
    assert float((unasked - wanted).square().mean().sqrt()) > 0.98 * float(guess)
    coarse = solve(questions, [rounded(v, 0.5) for v in exact])  # if it had been given all of them
    assert float((coarse - wanted).square().mean().sqrt()) > float(guess)


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
