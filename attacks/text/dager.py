"""DAGER: sentences read exactly out of the span of the first two attention blocks' gradients (Petrov et al., NeurIPS 2024).

The gradient of a linear map is a sum of its inputs times numbers: while there are fewer tokens than dimensions, its rows span
the inputs and nothing else. In the first block an input depends on one word and its position, so every word is tried in every
position. In the second it depends on the sentence (of a decoder: on the words before), so sentences are put together out of
the words that passed until all their inputs there lie in the span.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, islice, product
from typing import Literal

import torch
from torch import Generator, Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.text.certificate import TOLERANCE, GuessVerifier, why_not_applicable
from fedgauge.attacks.text.last_words import complete_sentences
from fedgauge.attacks.text.layer_inputs import layer_inputs, module_of_weight
from fedgauge.attacks.text.spans import LOOSEST, Span, span
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.language_parts import BlockParts, Projection
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.update import Batch

Maps = Literal["query", "attention"]
CHUNK = 256  # words that are tried at once
SENTENCES = 256  # sentences whose inputs are computed at once
EXHAUSTIVE = 512  # combinations of words up to which each is tried
SETS = 8  # of sentences that are tried, where more of them came near than there are
TRIES = 3  # searches in a row that may find no sentence beyond doubt
SPARE = 2  # sentences more than the batch has, from which the sets are made

Ids = tuple[int, ...]
Distances = dict[Ids, tuple[float, float]]  # of sentences: the mean and the worst of their inputs'


@dataclass(frozen=True)
class dager(Attack):
    """Exact sentences of small batches, with a proof where the chain leaves one possible.

    Args:
        maps: whose gradients span the inputs: query, as published, or all three of the attention, of which a query's first in a
            decoder, and all but the first token's in an encoder's last block, are zero.
        margin: dimensions that must be left outside the span.
        each: words that are kept for one position, at most, in parts of the batch size.
        starts: sentences from which the search begins, of an encoder; prefixes that are kept, of a decoder.
    """

    maps: Maps = "attention"
    margin: int = 20
    each: int = 4
    starts: int = 8

    def __post_init__(self) -> None:
        for name, value in (("margin", self.margin), ("each", self.each), ("starts", self.starts)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        started = time.perf_counter()
        if reason := why_not_applicable(known) or _missing(wave, known):
            return not_applicable(wave, reason)
        assert isinstance(known.model, LanguageModel)
        clock = Deadline(started, budget.seconds)
        readers = [
            _SpanReader(self, GuessVerifier(wave, known, k), known.model, stream("dager"), clock)
            for k, stream in enumerate(streams)
        ]
        _fill(readers, known.model)
        shared = (time.perf_counter() - started) / len(readers)
        return [reader.read(shared) for reader in readers]


def _missing(wave: Wave, known: Knowledge) -> str:
    """What of the update the attack needs and does not have."""
    assert isinstance(known.model, LanguageModel)
    layers = known.model.parts.layers
    if len(layers) < 2:
        return "it reads two blocks, and the model has one"
    absent = [layer.query.weight for layer in layers[:2] if layer.query.weight not in wave.update]
    return f"the gradient of {absent[0]} is not shared" if absent else ""


@dataclass(eq=False)
class _SpanReader:
    """One observation on its way: the spans of two blocks, and which words may stand where."""

    attack: dager
    trial: GuessVerifier
    model: LanguageModel
    rng: Generator
    clock: Deadline
    reason: str = ""
    spans: list[Span] = field(default_factory=list)
    words: list[list[int]] = field(default_factory=list)  # by position, the nearest first

    def __post_init__(self) -> None:
        self.reason = self.trial.reason or self._look()
        self._near: list[list[tuple[float, int]]] = [[] for _ in range(self.trial.known.shape[0])]

    @property
    def size(self) -> int:
        """Sentences in the batch."""
        return self.trial.known.batch_size

    @property
    def length(self) -> int:
        """Tokens of a sentence, at most."""
        return self.trial.known.shape[0]

    def _look(self) -> str:
        """Take the spans; what keeps them from telling anything, in words."""
        room = self.model.width - self.attack.margin
        most = self.size * self.length
        for number, layer in enumerate(self.model.parts.layers[:2], 1):
            last = number == 2 and _is_last(self.model)
            maps = _maps(layer, "query" if last else self.attack.maps)
            found = span(self.trial.update, maps, self.size if last else most, self.rng)
            if found is None:
                return f"the gradient of attention block {number} is zero, or drowned in noise"
            if found.rank >= room:
                return (
                    f"the gradient of attention block {number} has rank {found.rank} of {self.model.width}: as many tokens or "
                    f"more than the {room} that leave {self.attack.margin} dimensions to tell them by"
                )
            self.spans.append(found)
        return ""

    # ------------------------------------------------------------------------------------------------------- first block

    def meet(self, words: Tensor, vectors: Tensor) -> None:
        """Try words (C,) in every position, by what the first block is fed then, (C, L, width)."""
        near = self.spans[0].near(vectors).nonzero()
        distances = self.spans[0].distance(vectors[near[:, 0], near[:, 1]]).tolist()
        for (row, place), distance in zip(near.tolist(), distances, strict=True):
            if distance <= self.spans[0].threshold:
                self._near[place].append((distance, int(words[row])))

    def _settled(self, limit: float) -> list[list[int]]:
        """The nearest words of each position, none farther than the limit, up to the first position that has none."""
        most = self.attack.each * self.size
        found = []
        for near in self._near:
            close = [word for distance, word in sorted(near)[:most] if distance <= limit]
            if not close:
                break
            found.append(close)
        return found

    # ------------------------------------------------------------------------------------------------------ second block

    def read(self, shared: float) -> Reconstruction:
        """The sentences, and whether they are proven.

        Args:
            shared: seconds that were spent on this one before.
        """
        started = time.perf_counter()
        found: tuple[Batch, float] | None = None
        for limit in self._limits():
            self.words = self._settled(limit)
            made = self._assembled() if self.words else None
            found = made if found is None or (made is not None and made[1] < found[1]) else found
            if self.clock.over() or (found is not None and found[1] <= TOLERANCE):
                break
        seconds = shared + time.perf_counter() - started
        if found is None:
            reason = self.reason or "no word's vector lies in the first block's span"
            return Reconstruction(None, None, math.nan, self.trial.spent, seconds, "not_applicable", reason)
        answer = self.trial.answer(*found, seconds)
        if self.clock.over() and not found[1] <= TOLERANCE:
            return replace(answer, status="out_of_budget", reason=f"its seconds were over; {answer.reason}")
        return answer

    def _limits(self) -> tuple[float, ...]:
        """Distances up to which a word may be one: midway between what moves every vector and the worst case, then that."""
        if self.reason:
            return ()
        worst = self.spans[0].threshold
        return (math.sqrt(self.rounding * worst), worst) if worst > self.rounding else (worst,)

    @property
    def rounding(self) -> float:
        """What rounding of a vector itself amounts to, relative to it."""
        eps: float = torch.finfo(self.spans[0].sketch.dtype).eps
        return eps * math.sqrt(self.model.width)

    def _assembled(self) -> tuple[Batch, float]:
        return self._decoder() if self.model.task == "next_token" else self._encoder()

    def distances(self, sentences: Sequence[Ids]) -> Tensor:
        """How far sentences' inputs in the second block lie outside its span (N, T), zero where a sentence is over."""
        layer = self.model.parts.layers[1]
        part, found = module_of_weight(self.model, layer.query.weight), []
        for first in range(0, len(sentences), SENTENCES):
            some = sentences[first : first + SENTENCES]
            x = torch.full((len(some), max(map(len, some))), self.model.pad)
            mask = torch.zeros(x.shape, dtype=torch.bool)
            for i, ids in enumerate(some):
                x[i, : len(ids)] = torch.tensor(ids)
                mask[i, : len(ids)] = True
            x = x.to(self.trial.update[layer.query.weight].device)
            vectors = layer_inputs(self.model, self.trial.params, part, x, mask.to(x.device))
            measured = self.spans[1].distance(vectors) * mask
            found.append(torch.nn.functional.pad(measured, (0, self.length - measured.shape[1])))
        return torch.cat(found)

    def _encoder(self) -> tuple[Batch, float]:
        sentences = _SentenceAssembly(self).sentences()
        sets = [framed(some, self.length, self.model.pad) for some in self._sets(sentences)]
        batch, error = self.trial.best(next(self.trial.readings(x)) for x in sets)
        return (batch, error) if error <= TOLERANCE else self.trial.judge(batch.x)

    def _sets(self, sentences: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
        """As many of the sentences as the batch has; with one more than once where there are too few."""
        if len(sentences) >= self.size:
            yield from list(islice(combinations(sentences, self.size), SETS))
            return
        for more in islice(product(sentences, repeat=self.size - len(sentences)), SETS):
            yield [*sentences, *more]

    def _decoder(self) -> tuple[Batch, float]:
        """Sentences grow word by word while their inputs stay in the span; what cannot grow lacks its last word alone."""
        threshold = self.spans[1].threshold
        live: list[Ids] = [()]
        whole: list[Ids] = []
        for place, words in enumerate(self.words):
            longer = [(*ids, word) for ids in live for word in words]
            distances = self.distances(longer)[:, place]
            kept = [i for i in distances.argsort().tolist() if float(distances[i]) <= threshold]
            kept = kept[: self.attack.starts * self.size]
            grown = {longer[i][:-1] for i in kept}
            whole += [ids for ids in live if ids and ids not in grown]
            live = [longer[i] for i in kept]
            if not live:
                break
        whole = [*live, *whole[::-1]] or [(self.words[0][0],)]
        found: tuple[Batch, float] | None = None
        for sets in self._sets(whole):
            made = complete_sentences(self.trial, self.model, sets)
            if found is None or made[1] < found[1]:
                found = made
            if made[1] <= TOLERANCE or self.clock.over():
                break
        assert found is not None
        return found


def _maps(layer: BlockParts, maps: Maps) -> list[Projection]:
    return [layer.query] if maps == "query" else [layer.query, layer.key, layer.value]


def _is_last(model: LanguageModel) -> bool:
    """Whether the second block is a classifier's last: only its first position's query is read, and gets a gradient."""
    return model.task == "classification" and len(model.parts.layers) == 2


def _fill(readers: Sequence[_SpanReader], model: LanguageModel) -> None:
    """Try the whole vocabulary in every position: what the first block is fed is the same for all observations of a wave."""
    open_ = [r for r in readers if not r.reason]
    if not open_:
        return
    first = open_[0]
    part = module_of_weight(model, model.parts.layers[0].query.weight)
    vocabulary = torch.tensor([i for i in range(model.vocabulary) if i != model.pad])
    for words in vocabulary.split(CHUNK):
        x = words[:, None].expand(-1, first.length).contiguous()
        vectors = layer_inputs(model, first.trial.params, part, x.to(first.spans[0].sketch.device))
        for reader in open_:
            reader.meet(words, vectors)


# ------------------------------------------------------------------------------------------------------------- encoders


class _SentenceAssembly:
    """Sentences of an encoder, put together out of the words that may stand in each position.

    In an encoder every word moves every input, and a sentence with one wrong word is nearer than one with two: words are
    exchanged for those that bring the sentence nearest, until none does. What was found is taken out of the pool: its words
    are left to others only where there are fewer of them than sentences.
    """

    def __init__(self, reader: _SpanReader) -> None:
        self.reader, self.model = reader, reader.model
        # what rounding alone amounts to: no wrong word moves a sentence's vectors as little
        self.sure = reader.rounding
        self.judged = 1 if _is_last(self.model) else reader.length

    def sentences(self) -> list[Ids]:
        """As many as the batch has, and a few more that came near, the likeliest first."""
        passed: list[Ids] = []
        near: dict[Ids, float] = {}
        idle = 0
        while len(passed) < self.reader.size and not self.reader.clock.over():
            before = len(passed)
            for length in self._lengths():
                found = {ids: mean for ids, mean, worst in self._search(length, passed, idle) if worst <= LOOSEST}
                near.update(found)
                passed += [ids for ids, mean in found.items() if mean <= self.sure and ids not in passed]
                if len(passed) >= self.reader.size:
                    break
            idle = 0 if len(passed) > before else idle + 1
            if idle >= TRIES:
                # the nearest alone: others that share its words are nearly as near where a block hardly mixes them
                left = [ids for ids in near if ids not in passed]
                if not left:
                    break
                passed.append(min(left, key=near.__getitem__))
        others = sorted((ids for ids in near if ids not in passed), key=near.__getitem__)
        return [*passed, *others[:SPARE]] or [self._any()]

    def _lengths(self) -> list[int]:
        """Where sentences may end: behind a word that ends them, where the model has one."""
        words, frame = self.reader.words, len(self.model.start) + len(self.model.end)
        if not self.model.end:
            return list(range(len(words), frame, -1))
        return [t + 1 for t, some in enumerate(words) if self.model.end[-1] in some and t + 1 > frame]

    def _any(self) -> Ids:
        return tuple(some[0] for some in self.reader.words)

    def _pool(self, length: int) -> list[list[int]]:
        words, start, end = self.reader.words, self.model.start, self.model.end
        pool = [[w for w in some if w not in (*start, *end)] or some for some in words[:length]]
        pool[: len(start)] = [[w] for w in start]
        if end:
            pool[length - len(end) :] = [[w] for w in end]
        return pool

    def _search(self, length: int, passed: Sequence[Ids], idle: int) -> list[tuple[Ids, float, float]]:
        """Sentences of one length, with the mean and the worst distance of their inputs.

        Args:
            idle: searches before this one that found nothing: words that are accounted for may then be in others, too.
        """
        pool = self._pool(length)
        fresh = [self._left(some, place, passed) for place, some in enumerate(pool)]
        if math.prod(map(len, pool)) <= EXHAUSTIVE:
            every = [ids for ids in product(*pool) if ids not in passed]
            return self._measured(every) if every else []
        rng, count = self.reader.rng, self.reader.attack.starts
        drawn = [[some[int(torch.randint(len(some), (), generator=rng))] for some in fresh] for _ in range(count)]
        return self._descend([tuple(ids) for ids in drawn], pool if idle else fresh)

    def _left(self, some: list[int], place: int, passed: Sequence[Ids]) -> list[int]:
        """Words of a position that no sentence accounts for yet; all of them where others may share them."""
        used = {ids[place] for ids in passed if place < len(ids)}
        return [w for w in some if w not in used] or some

    def _measured(self, sentences: Sequence[Ids]) -> list[tuple[Ids, float, float]]:
        distances = self.reader.distances(sentences)[:, : self.judged]
        sums, worst = distances.sum(1).tolist(), distances.amax(1).tolist()
        return [(ids, s / min(len(ids), self.judged), w) for ids, s, w in zip(sentences, sums, worst, strict=True)]

    def _descend(self, sentences: list[Ids], pool: Sequence[Sequence[int]]) -> list[tuple[Ids, float, float]]:
        """Exchange words of each sentence for better ones, until a whole round brings none of them nearer."""
        best = {ids: (mean, worst) for ids, mean, worst in self._measured(sorted(set(sentences)))}
        moves = [partial(_exchanged, place=place, words=words) for place, words in enumerate(pool) if len(words) > 1]
        before = None
        while before != best and not self.reader.clock.over():
            before = best
            for move in [*moves, partial(_swapped, pool=pool)]:
                best = self._nearer(best, move)
                if any(mean <= self.sure for mean, _ in best.values()):
                    return [(ids, *values) for ids, values in best.items()]
        return [(ids, *values) for ids, values in best.items()]

    def _nearer(self, best: Distances, move: Callable[[Ids], Sequence[Ids]]) -> Distances:
        """Each sentence, or the nearest of those that a move makes of it."""
        made = [(ids, other) for ids in best for other in move(ids)]
        if not made:
            return best
        after = {ids: (ids, *values) for ids, values in best.items()}
        for (ids, _), found in zip(made, self._measured([other for _, other in made]), strict=True):
            if found[1] < after[ids][1]:
                after[ids] = found
        return {ids: (mean, worst) for ids, mean, worst in after.values()}


def _exchanged(ids: Ids, place: int, words: Sequence[int]) -> list[Ids]:
    """A sentence with each other word in one place."""
    return [(*ids[:place], word, *ids[place + 1 :]) for word in words if word != ids[place]]


def _swapped(ids: Ids, pool: Sequence[Sequence[int]]) -> list[Ids]:
    """A sentence with two words in each other's place, where they may be: one by one neither of them would move."""
    found = []
    for a, b in combinations(range(len(ids)), 2):
        if ids[a] != ids[b] and ids[a] in pool[b] and ids[b] in pool[a]:
            found.append((*ids[:a], ids[b], *ids[a + 1 : b], ids[a], *ids[b + 1 :]))
    return found
