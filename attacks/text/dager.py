"""DAGER: sentences read exactly out of the span of the first two attention blocks' gradients (Petrov et al., NeurIPS 2024).

The gradient of a linear map is a weighted sum of its inputs: while there are fewer tokens than dimensions, its rows span the
inputs and nothing else. In the first block an input depends on one word and its position, so every word is tried in every
position. In the second it depends on the sentence (in a decoder: on the words before it), so sentences are assembled from the
words that passed until all their inputs there lie in the span.

Where weights are frozen beside LoRA's factors, the spans are those of fedgauge.attacks.text.adapter_spans. The last block of a
classifier then judges sentences if the second cannot: its query has one input a sentence.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, islice, product
from typing import Literal

import torch
from torch import Generator, Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.text.adapter_spans import (
    NEAR,
    BlockSpan,
    NearestVectors,
    PartialSpan,
    ProjectedSpans,
    block_span,
    is_shared,
    whitening_of,
)
from fedgauge.attacks.text.certificate import TOLERANCE, GuessVerifier, why_not_applicable
from fedgauge.attacks.text.last_words import complete_sentences
from fedgauge.attacks.text.layer_inputs import layer_inputs, module_of_weight
from fedgauge.attacks.text.sentence_assembly import Ids, SentenceAssembly
from fedgauge.attacks.text.spans import Span
from fedgauge.client.components import check_at_least
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.language_parts import BlockParts, Projection
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.update import Batch

Maps = Literal["query", "attention"]
CHUNK = 256  # words tried at once
SENTENCES = 256  # sentences whose inputs are computed at once
SAMPLE = 1024  # words by which the dictionary is whitened
_PARTIAL = "spans a part of its inputs only: there are more tokens than rows of LoRA's factors"
SAME_INPUT = 1e-5  # relative difference up to which a word's inputs in two positions are one
SETS = 8  # sets of sentences that are tried where more sentences came near than the batch has


@dataclass(frozen=True)
class dager(Attack):
    """Exact sentences of small batches, with a proof where the chain leaves one possible.

    Args:
        maps: the maps whose gradients span the inputs: query, as published, or all three of the attention. A decoder's query has
            no gradient from the first token; that of an encoder's last block has one from the first token only.
        margin: dimensions that must be left outside the span; a span that LoRA's factor A shows must leave one.
        each: words kept for one position at most, as a multiple of the batch size; of the batch's words, where the first block
            tells no positions.
        starts: sentences from which an encoder's search begins; prefixes that a decoder's search keeps.
    """

    maps: Maps = "attention"
    margin: int = 20
    each: int = 4
    starts: int = 8

    def __post_init__(self) -> None:
        check_at_least(self, 1, "margin", "each", "starts")

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        started = time.perf_counter()
        if reason := why_not_applicable(known) or _missing(wave, known):
            return not_applicable(wave, reason)
        assert isinstance(known.model, LanguageModel)
        deadline = Deadline(started, budget.seconds)
        readers = [
            _SpanReader(self, GuessVerifier(wave, known, k), known.model, stream("dager"), deadline)
            for k, stream in enumerate(streams)
        ]
        _try_vocabulary(readers, known.model)
        shared = (time.perf_counter() - started) / len(readers)
        return [reader.read(shared) for reader in readers]


def _missing(wave: Wave, known: Knowledge) -> str:
    """Why the model or the update lacks what the attack needs; empty where nothing is missing."""
    assert isinstance(known.model, LanguageModel)
    layers = known.model.parts.layers
    if len(layers) < 2:
        return "it reads two attention blocks, and the model has one"
    for layer in layers[:2]:
        maps = [
            layer.query,
            *(m for m in (layer.key, layer.value) if m.factors),
        ]  # as published, or any that is adapted
        if not any(is_shared(m, wave.update) for m in maps):
            return f"the gradient of {layer.query.weight} is not shared"
    return ""


@dataclass(eq=False)
class _SpanReader:
    """Reads one observation: the spans of two blocks, then the words that may stand in each position, then the sentences."""

    attack: dager
    verifier: GuessVerifier
    model: LanguageModel
    rng: Generator
    deadline: Deadline
    reason: str = ""
    inputs: BlockSpan | None = None  # of the first block
    judge: Span | ProjectedSpans | None = None  # of the block that judges sentences; None: nothing can, or need
    judging: int = 1  # that block
    judged: int = 0  # positions whose inputs there count, from the first on
    words: list[list[int]] = field(default_factory=list)  # by position, the nearest first
    placed: bool = True  # whether a word's input in the first block depends on its position

    def __post_init__(self) -> None:
        self.reason = self.verifier.reason or self._take_spans()
        self._near: list[list[tuple[float, int]]] = [[] for _ in range(self.verifier.known.shape[0])]

    @property
    def size(self) -> int:
        """Sentences in the batch."""
        return self.verifier.known.batch_size

    @property
    def length(self) -> int:
        """Tokens of a sentence, at most."""
        return self.verifier.known.shape[0]

    def _take_spans(self) -> str:
        """Take the spans of both blocks; returns why they reveal nothing, empty where they do."""
        layers, most = self.model.parts.layers, self.size * self.length
        inputs = self._span(_maps(layers[0], self.attack.maps), most)
        if isinstance(inputs, str):
            return f"the gradient of attention block 1 {inputs}"
        self.inputs, last = inputs, len(layers) - 1
        classifies = self.model.task == "classification"
        judges = [] if classifies and last == 1 else [(1, _maps(layers[1], self.attack.maps), most)]
        if classifies:  # only its first position reaches the head
            judges.append((last, [layers[last].query], self.size))
        reasons = []
        for number, maps, count in judges:
            judge = self._span(maps, count)
            if isinstance(judge, PartialSpan):
                judge = _PARTIAL
            if isinstance(judge, Span | ProjectedSpans):
                self.judge, self.judging = judge, number
                self.judged = self.length if count == most else 1
                return ""
            reasons.append(f"the gradient of attention block {number + 1} {judge}")
        whole = layers[1].query.weight in self.verifier.update
        return reasons[0] if whole or self.size > 1 else ""  # one sentence has one word a position

    def _span(self, maps: Sequence[Projection], most: int) -> BlockSpan | str:
        verifier = self.verifier
        shared = [m for m in maps if is_shared(m, verifier.update)]
        if not shared:
            return "is not shared"
        return block_span(verifier.update, verifier.params, shared, most, self.attack.margin, self.rng)

    # ------------------------------------------------------------------------------------------------------- first block

    def try_words(self, words: Tensor, vectors: Tensor) -> None:
        """Try words (C,) in every position, by the inputs (C, L, width) that the first block then has."""
        assert isinstance(self.inputs, Span | ProjectedSpans)
        near = self.inputs.near(vectors).nonzero()
        distances = self.inputs.distance(vectors[near[:, 0], near[:, 1]]).tolist()
        for (row, position), distance in zip(near.tolist(), distances, strict=True):
            if distance <= self.inputs.threshold:
                self._near[position].append((distance, int(words[row])))

    def complete(self, basis: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Choose the words without which factors' gradients have no explanation, among all near a completed span.

        Args:
            basis: (n, d) orthonormal rows.
            chunks: words (C,) with their inputs (C, L, width).
        """
        assert isinstance(self.inputs, PartialSpan)
        named: list[tuple[float, int, int]] = []
        vectors = []
        for words, inputs in chunks:
            flat = inputs.double()
            outside = (flat - flat @ basis.mT @ basis).norm(dim=2) / flat.norm(dim=2)
            near = (outside <= NEAR).nonzero()
            named += [(float(outside[row, place]), int(words[row]), place) for row, place in near.tolist()]
            vectors.append(inputs[near[:, 0], near[:, 1]])
        nearest = sorted(range(len(named)), key=named.__getitem__)[: self.inputs.most]
        needed = self.inputs.needed(torch.cat(vectors)[nearest])
        for i in needed or ():
            _, word, place = named[nearest[i]]
            self._near[place].append((0.0, word))
        if not needed:
            self.reason = f"no set of words explains the gradient of attention block 1, which {_PARTIAL}"

    def _candidates(self, limit: float) -> list[list[int]]:
        """The nearest words of each position within a limit, up to the first position that has none."""
        most = self.attack.each * self.size * (1 if self.placed else self.length)
        candidates = []
        for near in self._near if self.placed else self._near[:1] * self.length:
            close = [word for distance, word in sorted(near)[:most] if distance <= limit]
            if not close:
                break
            candidates.append(close)
        return candidates

    # ------------------------------------------------------------------------------------------------------ second block

    def read(self, shared: float) -> Reconstruction:
        """The sentences, and whether they are proven; shared: seconds already spent on this observation."""
        started = time.perf_counter()
        best: tuple[Batch, float] | None = None
        for limit in self._limits():
            self.words = self._candidates(limit)
            made = self._assembled() if self.words else None
            best = made if best is None or (made is not None and made[1] < best[1]) else best
            if self.deadline.over() or (best is not None and best[1] <= TOLERANCE):
                break
        seconds = shared + time.perf_counter() - started
        if best is None:
            reason = self.reason or "no word's vector lies in the span of the first block"
            return self.verifier.nothing(reason, seconds)
        return self.verifier.answer(*best, seconds, self.deadline.over() and not best[1] <= TOLERANCE)

    def _limits(self) -> tuple[float, ...]:
        """Distances within which a word is a candidate: first midway between rounding and the worst case, then the worst case."""
        if self.reason:
            return ()
        if isinstance(self.inputs, PartialSpan):
            return (math.inf,)
        assert self.inputs is not None
        worst = self.inputs.threshold
        return (math.sqrt(self.rounding * worst), worst) if worst > self.rounding else (worst,)

    @property
    def rounding(self) -> float:
        """The relative size of a vector's own rounding, as the spans see it."""
        eps: float = torch.finfo(next(iter(self.verifier.update.values())).dtype).eps
        stretch = self.judge.stretch if isinstance(self.judge, ProjectedSpans) else 1.0
        return eps * math.sqrt(self.model.width) * stretch

    def _assembled(self) -> tuple[Batch, float]:
        return self._decoder() if self.model.task == "next_token" else self._encoder()

    def distances(self, sentences: Sequence[Ids]) -> Tensor:
        """How far sentences' inputs in the judging block lie outside its span (N, L), zero behind a sentence's end."""
        if self.judge is None:
            return torch.zeros(len(sentences), self.length)
        layer = self.model.parts.layers[self.judging]
        part, distances = module_of_weight(self.model, layer.query.weight), []
        for first in range(0, len(sentences), SENTENCES):
            some = sentences[first : first + SENTENCES]
            x = torch.full((len(some), max(map(len, some))), self.model.pad)
            mask = torch.zeros(x.shape, dtype=torch.bool)
            for i, ids in enumerate(some):
                x[i, : len(ids)] = torch.tensor(ids)
                mask[i, : len(ids)] = True
            vectors = layer_inputs(self.model, self.verifier.params, part, x, mask)
            measured = self.judge.distance(vectors).cpu() * mask
            distances.append(torch.nn.functional.pad(measured, (0, self.length - measured.shape[1])))
        return torch.cat(distances)

    def _encoder(self) -> tuple[Batch, float]:
        sentences = SentenceAssembly(
            self.model,
            self.words,
            self.size,
            self.distances,
            judged=self.judged or self.length,
            rounding=self.rounding,
            starts=self.attack.starts,
            rng=self.rng,
            deadline=self.deadline,
        ).sentences()
        sets = [framed(some, self.length, self.model.pad) for some in self._sets(sentences)]
        batch, error = self.verifier.best(next(self.verifier.interpretations(x)) for x in sets)
        return (batch, error) if error <= TOLERANCE else self.verifier.best_labels(batch.x)

    def _sets(self, sentences: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
        """Sets of as many sentences as the batch has; some are repeated where there are too few."""
        if len(sentences) >= self.size:
            yield from list(islice(combinations(sentences, self.size), SETS))
            return
        for more in islice(product(sentences, repeat=self.size - len(sentences)), SETS):
            yield [*sentences, *more]

    def _decoder(self) -> tuple[Batch, float]:
        """Sentences grow word by word while their inputs stay in the span; one that cannot grow lacks only its last word."""
        threshold = math.inf if self.judge is None else self.judge.threshold
        live: list[Ids] = [()]
        complete: list[Ids] = []
        for position, words in enumerate(self.words):
            longer = [(*ids, word) for ids in live for word in words]
            distances = self.distances(longer)[:, position]
            kept = [i for i in distances.argsort().tolist() if float(distances[i]) <= threshold]
            kept = kept[: self.attack.starts * self.size]
            grown = {longer[i][:-1] for i in kept}
            complete += [ids for ids in live if ids and ids not in grown]
            live = [longer[i] for i in kept]
            if not live:
                break
        complete = [*live, *complete[::-1]] or [(self.words[0][0],)]
        best: tuple[Batch, float] | None = None
        for sentences in self._sets(complete):
            made = complete_sentences(self.verifier, self.model, sentences)
            if best is None or made[1] < best[1]:
                best = made
            if made[1] <= TOLERANCE or self.deadline.over():
                break
        assert best is not None
        return best


def _maps(layer: BlockParts, maps: Maps) -> list[Projection]:
    return [layer.query] if maps == "query" else [layer.query, layer.key, layer.value]


def _try_vocabulary(readers: Sequence[_SpanReader], model: LanguageModel) -> None:
    """Try the whole vocabulary in every position; all observations of a wave share the first block's inputs."""
    open_ = [r for r in readers if not r.reason]
    if not open_:
        return
    vectors = _Dictionary(open_[0], model)
    for reader in open_:
        reader.placed = vectors.placed
    _complete_spans([r for r in open_ if isinstance(r.inputs, PartialSpan)], vectors)
    whole = [r for r in open_ if not isinstance(r.inputs, PartialSpan)]
    for words, inputs in vectors if whole else ():
        for reader in whole:
            reader.try_words(words, inputs)


@dataclass(frozen=True, eq=False)
class _Dictionary:
    """The first block's inputs (C, L, width) for the vocabulary in all positions, or (C, 1, width) in any, chunk by chunk."""

    reader: _SpanReader
    model: LanguageModel

    @cached_property
    def placed(self) -> bool:
        """Whether they depend on the position: not where attention alone turns queries and keys, as in Llama."""
        inputs = self._in_places(self.words[:1], self.reader.length)
        return bool((inputs - inputs[:, :1]).abs().max() > SAME_INPUT * inputs.abs().max())

    def of(self, words: Tensor) -> Tensor:
        """Those of words (C,)."""
        return self._in_places(words, self.reader.length if self.placed else 1)

    def _in_places(self, words: Tensor, places: int) -> Tensor:
        part = module_of_weight(self.model, self.model.parts.layers[0].query.weight)
        x = words[:, None].expand(-1, places).contiguous()
        return layer_inputs(self.model, self.reader.verifier.params, part, x)

    @property
    def words(self) -> Tensor:
        """The vocabulary without padding."""
        return torch.tensor([i for i in range(self.model.vocabulary) if i != self.model.pad])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for words in self.words.split(CHUNK):
            yield words, self.of(words)


def _complete_spans(readers: Sequence[_SpanReader], dictionary: _Dictionary) -> None:
    """Find the words behind the gradients of factors; all readers share the dictionary's two passes."""
    if not readers:
        return
    words, start = dictionary.words, dictionary.model.start
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0))
    whitening = whitening_of(dictionary.of(words[order[:SAMPLE]]))
    first = [dictionary.of(torch.tensor([word]))[0, place * dictionary.placed] for place, word in enumerate(start)]
    nearest = [NearestVectors(r.inputs) for r in readers if isinstance(r.inputs, PartialSpan)]
    for _, inputs in dictionary:
        for some in nearest:
            some.add(inputs)
    for reader, some in zip(readers, nearest, strict=True):
        basis = some.partial.completed(torch.stack([*first, *some.vectors]), whitening, len(first))
        if basis is None:
            reader.reason = (
                f"the gradient of attention block 1 {_PARTIAL}, and no words were found that complete the span"
            )
        else:
            reader.complete(basis, dictionary)
