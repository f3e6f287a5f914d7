"""DAGER: sentences read exactly out of the span of the first two attention blocks' gradients (Petrov et al., NeurIPS 2024).

The gradient of a linear map is a weighted sum of its inputs: while there are fewer tokens than dimensions, its rows span the
inputs and nothing else. In the first block an input depends on one word and its position, so every word is tried in every
position. In the second it depends on the sentence (in a decoder: on the words before it), so sentences are assembled from the
words that passed until all their inputs there lie in the span.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, product
from typing import Literal

import torch
from torch import Generator, Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.setting_checks import check_at_least
from fedgauge.attacks.text.certificate import TOLERANCE, GuessVerifier, why_not_applicable
from fedgauge.attacks.text.last_words import complete_sentences
from fedgauge.attacks.text.layer_inputs import layer_inputs, module_of_weight
from fedgauge.attacks.text.sentence_assembly import Ids, SentenceAssembly
from fedgauge.attacks.text.spans import Span, span
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.language_parts import BlockParts, Projection
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.update import Batch

Maps = Literal["query", "attention"]
CHUNK = 256  # words tried at once
SENTENCES = 256  # sentences whose inputs are computed at once
SETS = 8  # sets of sentences that are tried where more sentences came near than the batch has


@dataclass(frozen=True)
class dager(Attack):
    """Exact sentences of small batches, with a proof where the chain leaves one possible.

    Args:
        maps: the maps whose gradients span the inputs: query, as published, or all three of the attention. A decoder's query has
            no gradient from the first token; that of an encoder's last block has one from the first token only.
        margin: dimensions that must be left outside the span.
        each: words kept for one position at most, as a multiple of the batch size.
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
    absent = [layer.query.weight for layer in layers[:2] if layer.query.weight not in wave.update]
    return f"the gradient of {absent[0]} is not shared" if absent else ""


@dataclass(eq=False)
class _SpanReader:
    """Reads one observation: the spans of two blocks, then the words that may stand in each position, then the sentences."""

    attack: dager
    verifier: GuessVerifier
    model: LanguageModel
    rng: Generator
    deadline: Deadline
    reason: str = ""
    spans: list[Span] = field(default_factory=list)
    words: list[list[int]] = field(default_factory=list)  # by position, the nearest first

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
        room = self.model.width - self.attack.margin
        most = self.size * self.length
        for number, layer in enumerate(self.model.parts.layers[:2], 1):
            last = number == 2 and _is_last(self.model)
            maps = _maps(layer, "query" if last else self.attack.maps)
            block_span = span(self.verifier.update, maps, self.size if last else most, self.rng)
            if block_span is None:
                return f"the gradient of attention block {number} is zero, or lost in noise"
            if block_span.rank >= room:
                return (
                    f"the gradient of attention block {number} has rank {block_span.rank} of {self.model.width}: as many tokens or "
                    f"more than the {room} that leave {self.attack.margin} dimensions outside the span; set a smaller margin"
                )
            self.spans.append(block_span)
        return ""

    # ------------------------------------------------------------------------------------------------------- first block

    def try_words(self, words: Tensor, vectors: Tensor) -> None:
        """Try words (C,) in every position, by the inputs (C, L, width) that the first block then has."""
        near = self.spans[0].near(vectors).nonzero()
        distances = self.spans[0].distance(vectors[near[:, 0], near[:, 1]]).tolist()
        for (row, position), distance in zip(near.tolist(), distances, strict=True):
            if distance <= self.spans[0].threshold:
                self._near[position].append((distance, int(words[row])))

    def _candidates(self, limit: float) -> list[list[int]]:
        """The nearest words of each position within a limit, up to the first position that has none."""
        most = self.attack.each * self.size
        candidates = []
        for near in self._near:
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
            return Reconstruction(None, None, math.nan, self.verifier.spent, seconds, "not_applicable", reason)
        answer = self.verifier.answer(*best, seconds)
        if self.deadline.over() and not best[1] <= TOLERANCE:
            return replace(answer, status="out_of_budget", reason=f"its seconds were over; {answer.reason}")
        return answer

    def _limits(self) -> tuple[float, ...]:
        """Distances within which a word is a candidate: first midway between rounding and the worst case, then the worst case."""
        if self.reason:
            return ()
        worst = self.spans[0].threshold
        return (math.sqrt(self.rounding * worst), worst) if worst > self.rounding else (worst,)

    @property
    def rounding(self) -> float:
        """The relative size of a vector's own rounding."""
        eps: float = torch.finfo(self.spans[0].sketch.dtype).eps
        return eps * math.sqrt(self.model.width)

    def _assembled(self) -> tuple[Batch, float]:
        return self._decoder() if self.model.task == "next_token" else self._encoder()

    def distances(self, sentences: Sequence[Ids]) -> Tensor:
        """How far sentences' inputs in the second block lie outside its span (N, L), zero behind a sentence's end."""
        layer = self.model.parts.layers[1]
        part, distances = module_of_weight(self.model, layer.query.weight), []
        for first in range(0, len(sentences), SENTENCES):
            some = sentences[first : first + SENTENCES]
            x = torch.full((len(some), max(map(len, some))), self.model.pad)
            mask = torch.zeros(x.shape, dtype=torch.bool)
            for i, ids in enumerate(some):
                x[i, : len(ids)] = torch.tensor(ids)
                mask[i, : len(ids)] = True
            vectors = layer_inputs(self.model, self.verifier.params, part, x, mask)
            measured = self.spans[1].distance(vectors).cpu() * mask
            distances.append(torch.nn.functional.pad(measured, (0, self.length - measured.shape[1])))
        return torch.cat(distances)

    def _encoder(self) -> tuple[Batch, float]:
        sentences = SentenceAssembly(
            self.model,
            self.words,
            self.size,
            self.distances,
            judged=1 if _is_last(self.model) else self.length,
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
        threshold = self.spans[1].threshold
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


def _is_last(model: LanguageModel) -> bool:
    """Whether the second block is a classifier's last, in which only the first position's query has a gradient."""
    return model.task == "classification" and len(model.parts.layers) == 2


def _try_vocabulary(readers: Sequence[_SpanReader], model: LanguageModel) -> None:
    """Try the whole vocabulary in every position; all observations of a wave share the first block's inputs."""
    open_ = [r for r in readers if not r.reason]
    if not open_:
        return
    first = open_[0]
    part = module_of_weight(model, model.parts.layers[0].query.weight)
    vocabulary = torch.tensor([i for i in range(model.vocabulary) if i != model.pad])
    for words in vocabulary.split(CHUNK):
        x = words[:, None].expand(-1, first.length).contiguous()
        vectors = layer_inputs(model, first.verifier.params, part, x)
        for reader in open_:
            reader.try_words(words, vectors)
