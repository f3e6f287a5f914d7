"""Reads one sentence exactly from shared embedding gradients: no optimisation, only a linear system.

A position's row of the update is its token's effect on the loss; a word's row is the sum of the rows of its
positions. Nonzero rows give the words and the length, and least squares gives the order: word rows = A position rows, with a
single 1 in each column of A. The head gives the label; in next_token it gives the last word.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.base import Budget, Stream
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.text.certificate import GuessVerifier, SentenceReader, Unreadable, labelled, noise_of
from fedgauge.client.update import Batch

SURE = 6.0  # standard deviations by which a row must exceed noise


@dataclass(frozen=True)
class exact(SentenceReader):
    """Words, length, order and label of one sentence per update, with a proof where the chain allows one."""

    on_cpu = True

    def read(self, verifier: GuessVerifier, budget: Budget, stream: Stream, deadline: Deadline) -> tuple[Batch, float]:
        parts, size, position = verifier.model.parts, verifier.known.batch_size, verifier.model.parts.position
        if size != 1:
            raise Unreadable(f"it reads one sentence per update, and this update sums {size}: use dager")
        if parts.word not in verifier.update or position is None or position not in verifier.update:
            raise Unreadable("the gradients of word and position embeddings are not both shared: use dager")
        return labelled(verifier, [_words(verifier, position)])


def _words(verifier: GuessVerifier, position: str) -> list[int]:
    """The sentence's words in order, in next_token all but the last; Unreadable if none is seen."""
    model, length = verifier.model, verifier.known.shape[0]
    positions = verifier.update[position].double().cpu()
    words = verifier.update[model.parts.word].double().cpu()
    sigma = noise_of(verifier.known)
    # RoBERTa's first rows belong to no position
    positions = positions[len(positions) - model.positions :][:length]
    used = _exceeds_noise(positions, sigma).nonzero()
    if not len(used):
        raise Unreadable("no position's row exceeds rounding or noise")
    positions = positions[: int(used[-1]) + 1]
    if model.parts.tied:
        words, positions = _untied(words, positions, len(positions) * verifier.known.chain.local.steps)
    shares = words @ torch.linalg.pinv(positions)  # (V, T)
    shares[~_exceeds_noise(words, sigma)] = -torch.inf
    shares[model.pad] = -torch.inf  # padding only follows the sentence
    return [int(w) for w in shares.argmax(0)]


def _exceeds_noise(rows: Tensor, sigma: float) -> Tensor:
    """Return the rows (N, d) above rounding and noise; noise has a squared norm of mean d and variance 2 d."""
    squared, d = rows.square().sum(1), rows.shape[1]
    least = squared.max() * torch.finfo(torch.float32).eps ** 2
    return squared > max(float(least), sigma**2 * (d + SURE * math.sqrt(2 * d)))


def _untied(words: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows without the head's share, a combination of the `count` vectors it reads, one per predicted word and step.

    Most words do not occur, so their rows hold only this share: the weaker half of the rows spans it.
    """
    norms = words.norm(dim=1)
    _, sizes, basis = torch.linalg.svd(words[norms <= norms.median()], full_matrices=False)
    rank = int((sizes > sizes[0] * torch.finfo(torch.float32).eps * len(sizes) ** 0.5).sum())
    basis = basis[: min(rank, count)]
    return words - words @ basis.mT @ basis, positions - positions @ basis.mT @ basis
