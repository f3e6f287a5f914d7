"""Exact reading of one sentence whose embedding gradients are shared: no optimisation, a linear system.

A position's row of the update is what its token does to the loss; a word's row is the sum of the rows of the positions where
it stands. Rows that are not zero name the words and the length, and least squares names the order: word rows = A position
rows, with a single 1 in each column of A. The label comes from the head, and of next_token the last word.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.text.certificate import GuessVerifier, why_not_applicable
from fedgauge.attacks.text.last_words import complete_sentences
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.tokenizer import framed

SURE = 6.0  # standard deviations by which a row must stand out of noise
NO_WORDS = "the words' gradients are not shared: dager needs none of them"
NO_ORDER = "the order comes from gradients of positions, and none are {}: dager needs none of them"


@dataclass(frozen=True)
class exact(Attack):
    """Token set, length, order and label of one sentence an update, with a proof where the chain leaves one possible."""

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if reason := why_not_applicable(known) or _missing(wave, known):
            return not_applicable(wave, reason)
        assert isinstance(known.model, LanguageModel)
        return [self._one(GuessVerifier(wave, known, k), known.model) for k in range(len(wave))]

    def _one(self, trial: GuessVerifier, model: LanguageModel) -> Reconstruction:
        started = time.perf_counter()
        if trial.reason:
            return _nothing(trial, trial.reason, started)
        ids = _words(trial, model)
        if not ids:
            return _nothing(trial, "no position's row stands out", started)
        if model.task == "next_token":
            batch, error = complete_sentences(trial, model, [ids])
        else:
            batch, error = trial.judge(framed([ids], trial.known.shape[0], model.pad))
        return trial.answer(batch, error, time.perf_counter() - started)


def _nothing(trial: GuessVerifier, reason: str, started: float) -> Reconstruction:
    spent = time.perf_counter() - started
    return Reconstruction(None, None, float("nan"), trial.spent, spent, "not_applicable", reason)


def _missing(wave: Wave, known: Knowledge) -> str:
    """What of the update the attack needs and does not have."""
    assert isinstance(known.model, LanguageModel)
    parts = known.model.parts
    if known.batch_size != 1:
        return f"one sentence an update is exact; this one sums {known.batch_size}: dager takes several"
    if parts.word not in wave.update:
        return NO_WORDS
    if parts.position is None:
        return NO_ORDER.format("learned by this model")
    return "" if parts.position in wave.update else NO_ORDER.format("shared")


def _words(trial: GuessVerifier, model: LanguageModel) -> list[int]:
    """The sentence's words in their order; of next_token all but the last."""
    assert model.parts.position is not None
    places = trial.update[model.parts.position].double().cpu()
    words = trial.update[model.parts.word].double().cpu()
    sigma = _noise(trial.known)
    places = places[len(places) - model.positions :][: trial.known.shape[0]]  # RoBERTa's first rows stand for no place
    there = _standing_out(places, sigma).nonzero()
    if not len(there):
        return []
    places = places[: int(there[-1]) + 1]
    if model.parts.tied:
        words, places = _untied(words, places, len(places) * trial.known.chain.local.steps)
    shares = words @ torch.linalg.pinv(places)  # (V, T)
    shares[~_standing_out(words, sigma)] = -torch.inf
    shares[model.pad] = -torch.inf  # it stands behind the sentence alone
    return [int(w) for w in shares.argmax(0)]


def _noise(known: Knowledge) -> float:
    """The standard deviation of an entry's noise, as far as it is known."""
    seen = known.chain.update_distribution
    return 0.0 if seen is None else math.sqrt(seen.sigma**2 + 2 * seen.scale**2)


def _standing_out(rows: Tensor, sigma: float) -> Tensor:
    """Which rows (N, d) are more than rounding, or than noise: its squared norm is normal with mean d and variance 2 d."""
    squared, d = rows.square().sum(1), rows.shape[1]
    least = squared.max() * torch.finfo(torch.float32).eps ** 2
    floor = max(float(least), sigma**2 * (d + SURE * math.sqrt(2 * d)))
    found: Tensor = squared > floor
    return found


def _untied(words: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows without the head's share, which lies in the span of the so many vectors that it reads, one a predicted word and step.

    Most words do not occur, and their rows hold this share alone: the weaker half of the rows spans it.
    """
    norms = words.norm(dim=1)
    alone = words[norms <= norms.median()]
    _, sizes, basis = torch.linalg.svd(alone, full_matrices=False)
    rank = int((sizes > sizes[0] * torch.finfo(torch.float32).eps * len(sizes) ** 0.5).sum())
    basis = basis[: min(rank, count)]
    return words - words @ basis.mT @ basis, places - places @ basis.mT @ basis
