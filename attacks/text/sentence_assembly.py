"""Sentence assembly: an encoder's sentences from candidate words, by exchanging words until a span contains their inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.text.certificate import GuessVerifier
from fedgauge.attacks.text.layer_inputs import CHUNK, layer_inputs
from fedgauge.attacks.text.spans import LOOSEST, Spans
from fedgauge.client.models.tokenizer import framed

EXHAUSTIVE = 512  # combinations of words up to which each is tried
TRIES = 3  # searches in a row that may find no sentence beyond doubt
SPARE = 2  # sentences more than the batch has, from which sets of sentences are made

Ids = tuple[int, ...]
Distances = dict[Ids, tuple[float, float]]  # of sentences: the mean and the largest distance of their inputs


@dataclass(frozen=True, eq=False)
class SentenceJudge:
    """Judges sentences by the distance of their inputs in an attention block from the span of the true ones.

    Args:
        spans: None: nothing judges, as a single sentence needs no judge.
        block: the block's number, from 0; positions: how many count, from the first on.
    """

    verifier: GuessVerifier
    spans: Spans | None
    block: int
    positions: int

    @property
    def rounding(self) -> float:
        """The relative size of a vector's own rounding, as the spans see it."""
        eps: float = torch.finfo(next(iter(self.verifier.update.values())).dtype).eps
        return eps * math.sqrt(self.verifier.model.width) * (self.spans.stretch if self.spans else 1.0)

    def distances(self, sentences: Sequence[Ids]) -> Tensor:
        """The distances (N, L), zero behind a sentence's end."""
        model, length = self.verifier.model, self.verifier.known.shape[0]
        if self.spans is None:
            return torch.zeros(len(sentences), length)
        parts = [model.parts.layers[self.block].query.weight]
        distances = []
        for first in range(0, len(sentences), CHUNK):
            some = sentences[first : first + CHUNK]
            x = framed(some, max(map(len, some)), model.pad)
            measured = self.spans.distance(layer_inputs(model, self.verifier.params, parts, x)[0]).cpu()
            distances.append(F.pad(measured * (x != model.pad), (0, length - x.shape[1])))
        return torch.cat(distances)


@dataclass(eq=False)
class SentenceAssembly:
    """Assembles an encoder's sentences from the words that passed the first block, by their distance in the second.

    In an encoder every word changes every input, and a sentence with one wrong word is nearer than one with two: words are
    exchanged for those that bring the sentence nearest, until no exchange helps. The words of a sentence that was found leave
    the pool, unless a position has fewer words than there are sentences.

    Args:
        words: candidates of each position, the nearest first.
        starts: random sentences from which a search begins.
    """

    judge: SentenceJudge
    words: Sequence[list[int]]
    starts: int
    rng: Generator
    deadline: Deadline

    def sentences(self) -> list[Ids]:
        """As many as the batch has, and a few others that came near, the likeliest first."""
        count = self.judge.verifier.known.batch_size
        passed: list[Ids] = []  # beyond doubt
        near: dict[Ids, float] = {}
        idle = 0
        while len(passed) < count and not self.deadline.over():
            before = len(passed)
            for length in self._lengths():
                found = self._search(length, passed, idle)
                close = {ids: mean for ids, (mean, worst) in found.items() if worst <= LOOSEST}
                near.update(close)
                passed += [ids for ids, mean in close.items() if mean <= self.judge.rounding and ids not in passed]
                if len(passed) >= count:
                    break
            idle = 0 if len(passed) > before else idle + 1
            if idle >= TRIES:
                # only the nearest: others that share its words are nearly as near where a block hardly mixes words
                left = [ids for ids in near if ids not in passed]
                if not left:
                    break
                passed.append(min(left, key=near.__getitem__))
        others = sorted((ids for ids in near if ids not in passed), key=near.__getitem__)
        return [*passed, *others[:SPARE]] or [tuple(some[0] for some in self.words)]

    def _lengths(self) -> list[int]:
        """Possible lengths: up to a token that ends sentences, where the model has one."""
        model, words = self.judge.verifier.model, self.words
        frame = len(model.start) + len(model.end)
        if not model.end:
            return list(range(len(words), frame, -1))
        return [t + 1 for t, some in enumerate(words) if model.end[-1] in some and t + 1 > frame]

    def _pool(self, length: int) -> list[list[int]]:
        start, end = self.judge.verifier.model.start, self.judge.verifier.model.end
        pool = [[w for w in some if w not in (*start, *end)] or some for some in self.words[:length]]
        pool[: len(start)] = [[w] for w in start]
        if end:
            pool[length - len(end) :] = [[w] for w in end]
        return pool

    def _search(self, length: int, passed: Sequence[Ids], idle: int) -> Distances:
        """Sentences of one length.

        Args:
            idle: searches before this one that found nothing; words of sentences found before may then occur again.
        """
        pool, fresh = self._pool(length), []
        for position, some in enumerate(pool):
            used = {ids[position] for ids in passed if position < len(ids)}
            fresh.append([w for w in some if w not in used] or some)
        if math.prod(map(len, pool)) <= EXHAUSTIVE:
            return self._measured([ids for ids in product(*pool) if ids not in passed])
        drawn = [
            tuple(some[int(torch.randint(len(some), (), generator=self.rng))] for some in fresh)
            for _ in range(self.starts)
        ]
        return self._descend(drawn, pool if idle else fresh)

    def _measured(self, sentences: Sequence[Ids]) -> Distances:
        if not sentences:
            return {}
        count = self.judge.positions
        distances = self.judge.distances(sentences)[:, :count]
        sums, worst = distances.sum(1).tolist(), distances.amax(1).tolist()
        return {ids: (s / min(len(ids), count), w) for ids, s, w in zip(sentences, sums, worst, strict=True)}

    def _descend(self, sentences: list[Ids], pool: Sequence[Sequence[int]]) -> Distances:
        """Exchange words of each sentence for better ones, until a whole pass brings no sentence nearer."""
        best, before = self._measured(sorted(set(sentences))), None
        moves = [partial(_exchanged, position=i, words=words) for i, words in enumerate(pool) if len(words) > 1]
        while before != best and not self.deadline.over():
            before = best
            for move in [*moves, partial(_swapped, pool=pool)]:
                made = {ids: move(ids) for ids in best}
                known = self._measured([other for some in made.values() for other in some]) | best
                nearest = [min([ids, *some], key=lambda i: known[i][0]) for ids, some in made.items()]
                best = {ids: known[ids] for ids in nearest}
                if any(mean <= self.judge.rounding for mean, _ in best.values()):
                    return best
        return best


def _exchanged(ids: Ids, position: int, words: Sequence[int]) -> list[Ids]:
    """A sentence with each of the other words in one position."""
    return [(*ids[:position], word, *ids[position + 1 :]) for word in words if word != ids[position]]


def _swapped(ids: Ids, pool: Sequence[Sequence[int]]) -> list[Ids]:
    """A sentence with two of its words swapped, where both fit: an exchange of only one would make it worse."""
    swapped = []
    for a, b in combinations(range(len(ids)), 2):
        if ids[a] != ids[b] and ids[a] in pool[b] and ids[b] in pool[a]:
            swapped.append((*ids[:a], ids[b], *ids[a + 1 : b], ids[a], *ids[b + 1 :]))
    return swapped
