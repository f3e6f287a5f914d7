"""Sentence assembly: an encoder's sentences from candidate words, by exchanging words until their inputs lie in a span."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product

import torch
from torch import Generator, Tensor

from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.text.spans import LOOSEST
from fedgauge.client.models.language import LanguageModel

EXHAUSTIVE = 512  # combinations of words up to which each is tried
TRIES = 3  # searches in a row that may find no sentence beyond doubt
SPARE = 2  # sentences more than the batch has, from which sets of sentences are made

Ids = tuple[int, ...]
Distances = dict[Ids, tuple[float, float]]  # of sentences: the mean and the largest distance of their inputs


@dataclass(eq=False)
class SentenceAssembly:
    """Assembles an encoder's sentences from the words that passed the first block, by their distance in the second.

    In an encoder every word changes every input, and a sentence with one wrong word is nearer than one with two: words are
    exchanged for those that bring the sentence nearest, until no exchange helps. The words of a sentence that was found leave
    the pool, unless a position has fewer words than there are sentences.

    Args:
        words: candidates of each position, the nearest first.
        count: sentences in the batch.
        distances: how far sentences' inputs (N, L) of the second block lie outside its span.
        judged: positions whose inputs count, from the first on.
        rounding: the mean distance that rounding alone explains; every wrong word moves a sentence farther.
        starts: random sentences from which a search begins.
    """

    model: LanguageModel
    words: Sequence[list[int]]
    count: int
    distances: Callable[[Sequence[Ids]], Tensor]
    judged: int
    rounding: float
    starts: int
    rng: Generator
    deadline: Deadline

    def sentences(self) -> list[Ids]:
        """As many as the batch has, and a few others that came near, the likeliest first."""
        passed: list[Ids] = []  # beyond doubt
        near: dict[Ids, float] = {}
        idle = 0
        while len(passed) < self.count and not self.deadline.over():
            before = len(passed)
            for length in self._lengths():
                close = {ids: mean for ids, mean, worst in self._search(length, passed, idle) if worst <= LOOSEST}
                near.update(close)
                passed += [ids for ids, mean in close.items() if mean <= self.rounding and ids not in passed]
                if len(passed) >= self.count:
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
        words, frame = self.words, len(self.model.start) + len(self.model.end)
        if not self.model.end:
            return list(range(len(words), frame, -1))
        return [t + 1 for t, some in enumerate(words) if self.model.end[-1] in some and t + 1 > frame]

    def _pool(self, length: int) -> list[list[int]]:
        words, start, end = self.words, self.model.start, self.model.end
        pool = [[w for w in some if w not in (*start, *end)] or some for some in words[:length]]
        pool[: len(start)] = [[w] for w in start]
        if end:
            pool[length - len(end) :] = [[w] for w in end]
        return pool

    def _search(self, length: int, passed: Sequence[Ids], idle: int) -> list[tuple[Ids, float, float]]:
        """Sentences of one length, with the mean and the worst distance of their inputs.

        Args:
            idle: searches before this one that found nothing; words of sentences found before may then occur again.
        """
        pool = self._pool(length)
        fresh = [self._unused(some, position, passed) for position, some in enumerate(pool)]
        if math.prod(map(len, pool)) <= EXHAUSTIVE:
            every = [ids for ids in product(*pool) if ids not in passed]
            return self._measured(every) if every else []
        drawn = [
            [some[int(torch.randint(len(some), (), generator=self.rng))] for some in fresh] for _ in range(self.starts)
        ]
        return self._descend([tuple(ids) for ids in drawn], pool if idle else fresh)

    def _unused(self, some: list[int], position: int, passed: Sequence[Ids]) -> list[int]:
        """Words of a position that no found sentence uses yet; all of them where none is left."""
        used = {ids[position] for ids in passed if position < len(ids)}
        return [w for w in some if w not in used] or some

    def _measured(self, sentences: Sequence[Ids]) -> list[tuple[Ids, float, float]]:
        distances = self.distances(sentences)[:, : self.judged]
        sums, worst = distances.sum(1).tolist(), distances.amax(1).tolist()
        return [(ids, s / min(len(ids), self.judged), w) for ids, s, w in zip(sentences, sums, worst, strict=True)]

    def _descend(self, sentences: list[Ids], pool: Sequence[Sequence[int]]) -> list[tuple[Ids, float, float]]:
        """Exchange words of each sentence for better ones, until a whole pass brings no sentence nearer."""
        best = {ids: (mean, worst) for ids, mean, worst in self._measured(sorted(set(sentences)))}
        moves = [partial(_exchanged, position=i, words=words) for i, words in enumerate(pool) if len(words) > 1]
        before = None
        while before != best and not self.deadline.over():
            before = best
            for move in [*moves, partial(_swapped, pool=pool)]:
                best = self._nearer(best, move)
                if any(mean <= self.rounding for mean, _ in best.values()):
                    return [(ids, *values) for ids, values in best.items()]
        return [(ids, *values) for ids, values in best.items()]

    def _nearer(self, best: Distances, move: Callable[[Ids], Sequence[Ids]]) -> Distances:
        """Each sentence, or the nearest of those that a move makes of it."""
        made = [(ids, other) for ids in best for other in move(ids)]
        if not made:
            return best
        after = {ids: (ids, *values) for ids, values in best.items()}
        for (ids, _), measured in zip(made, self._measured([other for _, other in made]), strict=True):
            if measured[1] < after[ids][1]:
                after[ids] = measured
        return {ids: (mean, worst) for ids, mean, worst in after.values()}


def _exchanged(ids: Ids, position: int, words: Sequence[int]) -> list[Ids]:
    """A sentence with each of the other words in one position."""
    return [(*ids[:position], word, *ids[position + 1 :]) for word in words if word != ids[position]]


def _swapped(ids: Ids, pool: Sequence[Sequence[int]]) -> list[Ids]:
    """A sentence with two of its words swapped, where both fit: an exchange of either alone would make it worse."""
    swapped = []
    for a, b in combinations(range(len(ids)), 2):
        if ids[a] != ids[b] and ids[a] in pool[b] and ids[b] in pool[a]:
            swapped.append((*ids[:a], ids[b], *ids[a + 1 : b], ids[a], *ids[b + 1 :]))
    return swapped
