"""DAGER: sentences read exactly out of the span of the first two attention blocks' gradients (Petrov et al., NeurIPS 2024).

The gradient of a linear map is a weighted sum of its inputs: while there are fewer tokens than dimensions, its rows span the
inputs and nothing else. In the first block an input depends on one word and its position, so every word is tried in every
position. In the second it depends on the sentence (in a decoder: on the words before it), so sentences are assembled from the
words that passed until all their inputs there are in the span.

If weights are frozen and only LoRA's factors are trained, the spans are those of fedgauge.attacks.text.gradient_spans. The last
block of a classifier then judges sentences if the second cannot: its query has one input a sentence.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, islice, product, takewhile

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Stream
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.text.certificate import (
    TOLERANCE,
    GuessVerifier,
    SentenceReader,
    Unreadable,
    complete_sentences,
    nearest,
    two_blocks,
)
from fedgauge.attacks.text.gradient_spans import LOOSEST, PartialSpan, Spans, block_span
from fedgauge.attacks.text.layer_inputs import CHUNK, first_inputs, layer_inputs
from fedgauge.client.components import Count
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.language_parts import Projection
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.update import Batch

SAME_INPUT = 1e-5  # relative difference up to which a word's inputs in two positions are one
SETS = 8  # sets of sentences that are tried where more sentences came near than the batch has
EXHAUSTIVE = 512  # combinations of words up to which each is tried
TRIES = 8  # searches in a row that may find no sentence beyond doubt
MOST_MEASURED = 20_000  # sentences that a search may measure in the last block: about a minute of six layers on a core
# words kept for one position at most, in batch sizes; of the batch's words, where the first block reveals no positions
EACH = 4
STARTS = 8  # sentences from which an encoder's search begins; prefixes that a decoder's search keeps
SPARE = 2  # sentences more than the batch has, from which sets of sentences are made

Ids = tuple[int, ...]
Distances = dict[Ids, tuple[float, float]]  # of sentences: the mean and the largest distance of their inputs


def _exchanged(ids: Ids, position: int, words: Sequence[int]) -> list[Ids]:
    return [(*ids[:position], word, *ids[position + 1 :]) for word in words if word != ids[position]]


def _swapped(ids: Ids, pool: Sequence[Sequence[int]]) -> list[Ids]:
    """A sentence with two of its words swapped, where both fit: an exchange of only one would make it worse."""
    swapped = []
    for a, b in combinations(range(len(ids)), 2):
        if ids[a] != ids[b] and ids[a] in pool[b] and ids[b] in pool[a]:
            swapped.append((*ids[:a], ids[b], *ids[a + 1 : b], ids[a], *ids[b + 1 :]))
    return swapped


@dataclass(frozen=True)
class dager(SentenceReader):
    """Exact sentences of small batches, with a proof where the chain leaves one possible.

    Args:
        margin: dimensions that must be left outside the span; a span that LoRA's factor A shows must leave one.
    """

    margin: Count = 20

    def read(self, verifier: GuessVerifier, budget: Budget, stream: Stream, deadline: Deadline) -> tuple[Batch, float]:
        model, length, rng = verifier.model, verifier.known.shape[0], stream("dager")
        two_blocks(model)
        spans = self._span(verifier, 0, _maps(model, 0), length, rng)
        search = _SentenceSearch(verifier, *self._judge(verifier, rng), rng, deadline)
        first = first_inputs(model, verifier.params, torch.tensor([int(model.pad == 0)]), length)
        # whether a word's input depends on its position: not where attention alone turns queries and keys
        placed = bool((first - first[:, :1]).abs().max() > SAME_INPUT * first.abs().max())
        near: list[list[tuple[float, int]]] = [[] for _ in range(length if placed else 1)]
        for distance, word, place in spans.words(verifier.model, verifier.params, len(near)):
            near[place].append((distance, word))
        near = near if placed else near * length
        most = EACH * verifier.known.batch_size * (1 if placed else length)
        return search.read([sorted(some)[:most] for some in near], spans.threshold)

    def _span(
        self, verifier: GuessVerifier, block: int, maps: Sequence[Projection], positions: int, rng: Generator
    ) -> Spans | PartialSpan:
        """The span of a block's inputs at some positions; Unreadable where its gradient shows none."""
        most = verifier.known.batch_size * positions
        try:
            return block_span(verifier.update, verifier.params, maps, most, self.margin, rng)
        except Unreadable as why:
            raise Unreadable(f"the gradient of attention block {block + 1} {why}") from why

    def _judge(self, verifier: GuessVerifier, rng: Generator) -> tuple[Spans | None, int, int]:
        """The span that judges sentences, its block and positions: of the second block, else of a classifier's last query."""
        model, length = verifier.model, verifier.known.shape[0]
        last, classifies = len(model.parts.layers) - 1, model.task == "classification"
        choices = [] if classifies and last == 1 else [(1, _maps(model, 1), length)]
        if classifies:  # only its first position reaches the head
            choices.append((last, [model.parts.layers[last].query], 1))
        reasons = []
        for block, maps, positions in choices:
            try:
                spans = self._span(verifier, block, maps, positions, rng)
                if not isinstance(spans, PartialSpan):
                    return spans, block, positions
                reasons.append(f"the gradient of attention block {block + 1} spans only a part of its inputs")
            except Unreadable as why:
                reasons.append(str(why))
        if verifier.known.batch_size > 1 or model.parts.layers[1].query.weight in verifier.update:
            raise Unreadable(reasons[0])  # only one sentence has one word a position
        return None, 1, length


def _maps(model: LanguageModel, block: int) -> list[Projection]:
    layer = model.parts.layers[block]
    return [layer.query, layer.key, layer.value]


@dataclass(frozen=True, eq=False)
class _SentenceSearch:
    """The sentences that the words of the first block form, judged by the distance of their inputs in a later block.

    Args:
        spans: of the true inputs there; None: nothing judges, as a single sentence needs no judge.
        block: its number, from 0; positions: how many count, from the first on.
    """

    verifier: GuessVerifier
    spans: Spans | None
    block: int
    positions: int
    rng: Generator
    deadline: Deadline
    known: Distances = field(default_factory=dict)  # of all sentences so far

    @property
    def size(self) -> int:
        return self.verifier.known.batch_size

    @property
    def rounding(self) -> float:
        """The relative size of a vector's own rounding, as the spans see it."""
        eps: float = torch.finfo(next(iter(self.verifier.update.values())).dtype).eps
        return eps * math.sqrt(self.verifier.model.width) * (self.spans.stretch if self.spans else 1.0)

    @property
    def certain(self) -> float:
        """The mean distance up to which a sentence is beyond doubt."""
        return max(self.rounding, TOLERANCE) if self.positions == 1 else self.rounding

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

    def over(self) -> bool:
        return self.deadline.over() or (self.positions == 1 and len(self.known) >= MOST_MEASURED)

    def read(self, near: Sequence[Sequence[tuple[float, int]]], worst: float) -> tuple[Batch, float]:
        """The sentences, and the relative error that they leave.

        Args:
            near: each position's words with their distances, the nearest first; worst: the largest distance that counts.

        Raises:
            Unreadable: no word's vector is in the span of the first block's gradient.
        """
        rounding, pools = self.rounding, []
        # words within a distance midway between rounding and the worst case, then within the worst case
        for limit in (math.sqrt(rounding * worst), worst) if worst > rounding else (worst,):
            close = ([word for distance, word in some if distance <= limit] for some in near)
            pools.append(list(takewhile(bool, close)))  # up to the first position that has none
        if not any(pools):
            raise Unreadable("no word's vector is in the span of the first block")
        read = self._decoded if self.verifier.decodes else self._encoded
        return nearest((read(words) for words in pools if words), self.deadline.over)

    def _encoded(self, words: Sequence[list[int]]) -> tuple[Batch, float]:
        sets = [self.verifier.framed(some) for some in self._sets(self._assembled(words))]
        batch, error = self.verifier.best(next(self.verifier.interpretations(x)) for x in sets)
        return (batch, error) if error <= TOLERANCE else self.verifier.best_labels(batch.x)

    def _assembled(self, words: Sequence[list[int]]) -> list[Ids]:
        """An encoder's sentences: as many as the batch has, and a few others that came near, the likeliest first.

        In an encoder every word changes every input, and a sentence with one wrong word is nearer than one with two: words are
        exchanged for those that bring the sentence nearest, until no exchange helps. The words of a sentence that was found
        leave the pool, unless a position has fewer words than there are sentences. In the last block it ends after MOST_MEASURED.

        Args:
            words: candidates of each position, the nearest first.
        """
        start, end = self.verifier.model.start, self.verifier.model.end
        lengths = list(range(len(words), len(start), -1))
        if end:  # up to a token that ends sentences
            lengths = [t for t in range(len(start) + len(end) + 1, len(words) + 1) if end[-1] in words[t - 1]]
        passed: list[Ids] = []  # beyond doubt
        near: dict[Ids, float] = {}
        idle = 0
        while len(passed) < self.size and not self.over():
            before = len(passed)
            for length in lengths:
                found = self._search(words[:length], passed, idle)
                close = {ids: mean for ids, (mean, worst) in found.items() if worst <= LOOSEST}
                near.update(close)
                passed += [ids for ids, mean in close.items() if mean <= self.certain and ids not in passed]
                if len(passed) >= self.size:
                    break
            idle = 0 if len(passed) > before else idle + 1
            if idle >= TRIES:
                # only the nearest: others that share its words are nearly as near where a block hardly mixes words
                left = [ids for ids in near if ids not in passed]
                if not left:
                    break
                passed.append(min(left, key=near.__getitem__))
        others = sorted((ids for ids in near if ids not in passed), key=near.__getitem__)
        return [*passed, *others[:SPARE]] or [tuple(some[0] for some in words)]

    def _search(self, words: Sequence[list[int]], passed: Sequence[Ids], idle: int) -> Distances:
        """Sentences as long as these words.

        Args:
            idle: searches before this one that found nothing; words of sentences found before may then occur again.
        """
        start, end = self.verifier.model.start, self.verifier.model.end
        pool = [[w for w in some if w not in (*start, *end)] or some for some in words]
        pool[: len(start)] = [[w] for w in start]
        pool[len(words) - len(end) :] = [[w] for w in end]
        if math.prod(map(len, pool)) <= EXHAUSTIVE:
            return self._measured([ids for ids in product(*pool) if ids not in passed])
        fresh = []
        for position, some in enumerate(pool):
            used = {ids[position] for ids in passed if position < len(ids)}
            fresh.append([w for w in some if w not in used] or some)
        drawn = [
            tuple(some[int(torch.randint(len(some), (), generator=self.rng))] for some in fresh) for _ in range(STARTS)
        ]
        return self._descend(drawn, pool if idle else fresh)

    def _measured(self, sentences: Sequence[Ids]) -> Distances:
        if new := [ids for ids in dict.fromkeys(sentences) if ids not in self.known]:
            count = self.positions
            distances = self.distances(new)[:, :count]
            sums, worst = distances.sum(1).tolist(), distances.amax(1).tolist()
            for ids, total, largest in zip(new, sums, worst, strict=True):
                self.known[ids] = total / min(len(ids), count), largest
        return {ids: self.known[ids] for ids in sentences}

    def _descend(self, sentences: list[Ids], pool: Sequence[Sequence[int]]) -> Distances:
        """Exchange words of each sentence for better ones, until a whole pass brings no sentence nearer."""
        best, before = self._measured(sorted(set(sentences))), None
        moves = [partial(_exchanged, position=i, words=words) for i, words in enumerate(pool) if len(words) > 1]
        while before != best and not self.over():
            before = best
            for move in [*moves, partial(_swapped, pool=pool)]:
                made = {ids: move(ids) for ids in best}
                self._measured([other for some in made.values() for other in some])
                best = self._measured([min([ids, *some], key=self.known.__getitem__) for ids, some in made.items()])
                if any(mean <= self.certain for mean, _ in best.values()):
                    return best
        return best

    def _sets(self, sentences: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
        """Sets of as many sentences as the batch has; some are repeated where there are too few."""
        if len(sentences) >= self.size:
            yield from islice(combinations(sentences, self.size), SETS)
            return
        for more in islice(product(sentences, repeat=self.size - len(sentences)), SETS):
            yield [*sentences, *more]

    def _decoded(self, words: Sequence[list[int]]) -> tuple[Batch, float]:
        """Sentences grow word by word while their inputs stay in the span; one that cannot grow lacks only its last word."""
        threshold = math.inf if self.spans is None else self.spans.threshold
        live: list[Ids] = [()]
        complete: list[Ids] = []
        for position, some in enumerate(words):
            longer = [(*ids, word) for ids in live for word in some]
            distances = self.distances(longer)[:, position]
            kept = [i for i in distances.argsort().tolist() if float(distances[i]) <= threshold]
            kept = kept[: STARTS * self.size]
            grown = {longer[i][:-1] for i in kept}
            complete += [ids for ids in live if ids and ids not in grown]
            live = [longer[i] for i in kept]
            if not live:
                break
        sets = self._sets([*live, *complete[::-1]] or [(words[0][0],)])
        return nearest((complete_sentences(self.verifier, some) for some in sets), self.deadline.over)
