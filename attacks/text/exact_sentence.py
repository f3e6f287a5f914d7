"""Reads one sentence exactly from shared embedding gradients: no optimisation, only a linear system.

A position's row of the update is its token's effect on the loss; a word's row is the sum of the rows of the positions where it
stands. Nonzero rows give the words and the length, and least squares gives the order: word rows = A position rows, with a
single 1 in each column of A. The head gives the label; in next_token it gives the last word.
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

SURE = 6.0  # standard deviations by which a row must exceed noise
NO_WORDS = "the gradient of the word embeddings is not shared: use dager, which does not need it"
NO_ORDER = (
    "word order comes from the gradients of position embeddings, and none are {}: use dager, which does not need them"
)


@dataclass(frozen=True)
class exact(Attack):
    """Words, length, order and label of one sentence per update, with a proof where the chain allows one."""

    on_cpu = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if reason := why_not_applicable(known) or _missing(wave, known):
            return not_applicable(wave, reason)
        assert isinstance(known.model, LanguageModel)
        return [self._one(GuessVerifier(wave, known, k), known.model) for k in range(len(wave))]

    def _one(self, verifier: GuessVerifier, model: LanguageModel) -> Reconstruction:
        started = time.perf_counter()
        if verifier.reason:
            return verifier.nothing(verifier.reason, time.perf_counter() - started)
        ids = _words(verifier, model)
        if not ids:
            return verifier.nothing("no position's row exceeds rounding or noise", time.perf_counter() - started)
        if model.task == "next_token":
            batch, error = complete_sentences(verifier, model, [ids])
        else:
            batch, error = verifier.best_labels(framed([ids], verifier.known.shape[0], model.pad))
        return verifier.answer(batch, error, time.perf_counter() - started)


def _missing(wave: Wave, known: Knowledge) -> str:
    """Why the update lacks what the attack needs; empty where nothing is missing."""
    assert isinstance(known.model, LanguageModel)
    parts = known.model.parts
    if known.batch_size != 1:
        return (
            f"it reads one sentence per update, and this update sums {known.batch_size}: use dager, which takes several"
        )
    if parts.word not in wave.update:
        return NO_WORDS
    if parts.position is None:
        return NO_ORDER.format("learned by this model")
    return "" if parts.position in wave.update else NO_ORDER.format("shared")


def _words(verifier: GuessVerifier, model: LanguageModel) -> list[int]:
    """The sentence's words in order; in next_token all but the last."""
    assert model.parts.position is not None
    positions = verifier.update[model.parts.position].double().cpu()
    words = verifier.update[model.parts.word].double().cpu()
    sigma = _noise(verifier.known)
    positions = positions[len(positions) - model.positions :][
        : verifier.known.shape[0]
    ]  # RoBERTa's first rows belong to no position
    used = _exceeds_noise(positions, sigma).nonzero()
    if not len(used):
        return []
    positions = positions[: int(used[-1]) + 1]
    if model.parts.tied:
        words, positions = _untied(words, positions, len(positions) * verifier.known.chain.local.steps)
    shares = words @ torch.linalg.pinv(positions)  # (V, T)
    shares[~_exceeds_noise(words, sigma)] = -torch.inf
    shares[model.pad] = -torch.inf  # padding only follows the sentence
    return [int(w) for w in shares.argmax(0)]


def _noise(known: Knowledge) -> float:
    """The standard deviation of an entry's noise, as far as the attacker knows it."""
    seen = known.chain.update_distribution
    return 0.0 if seen is None else math.sqrt(seen.sigma**2 + 2 * seen.scale**2)


def _exceeds_noise(rows: Tensor, sigma: float) -> Tensor:
    """Which rows (N, d) exceed rounding and noise, whose squared norm is about normal with mean d and variance 2 d."""
    squared, d = rows.square().sum(1), rows.shape[1]
    least = squared.max() * torch.finfo(torch.float32).eps ** 2
    floor = max(float(least), sigma**2 * (d + SURE * math.sqrt(2 * d)))
    exceeds: Tensor = squared > floor
    return exceeds


def _untied(words: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows without the head's share, which lies in the span of the `count` vectors it reads, one per predicted word and step.

    Most words do not occur, so their rows hold only this share: the weaker half of the rows spans it.
    """
    norms = words.norm(dim=1)
    alone = words[norms <= norms.median()]
    _, sizes, basis = torch.linalg.svd(alone, full_matrices=False)
    rank = int((sizes > sizes[0] * torch.finfo(torch.float32).eps * len(sizes) ** 0.5).sum())
    basis = basis[: min(rank, count)]
    return words - words @ basis.mT @ basis, positions - positions @ basis.mT @ basis
