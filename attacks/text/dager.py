"""DAGER: sentences read exactly out of the span of the first two attention blocks' gradients (Petrov et al., NeurIPS 2024).

The gradient of a linear map is a weighted sum of its inputs: while there are fewer tokens than dimensions, its rows span the
inputs and nothing else. In the first block an input depends on one word and its position, so every word is tried in every
position. In the second it depends on the sentence (in a decoder: on the words before it), so sentences are assembled from the
words that passed until all their inputs there lie in the span.

Where weights are frozen beside LoRA's factors, the spans are those of fedgauge.attacks.text.spans. The last block of a
classifier then judges sentences if the second cannot: its query has one input a sentence.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Stream
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.text.certificate import TOLERANCE, GuessVerifier, SentenceReader, Unreadable
from fedgauge.attacks.text.last_words import complete_sentences
from fedgauge.attacks.text.layer_inputs import layer_inputs
from fedgauge.attacks.text.sentence_assembly import Ids, SentenceAssembly
from fedgauge.attacks.text.spans import CHUNK, BlockSpan, PartialSpan, ProjectedSpans, Span, block_span
from fedgauge.client.components import check_at_least
from fedgauge.client.models.language_parts import Projection
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.update import Batch

Maps = Literal["query", "attention"]
SENTENCES = 256  # sentences whose inputs are computed at once
SAME_INPUT = 1e-5  # relative difference up to which a word's inputs in two positions are one
SETS = 8  # sets of sentences that are tried where more sentences came near than the batch has


@dataclass(frozen=True)
class dager(SentenceReader):
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

    def read(self, verifier: GuessVerifier, budget: Budget, stream: Stream, deadline: Deadline) -> tuple[Batch, float]:
        if len(verifier.model.parts.layers) < 2:
            raise Unreadable("it reads two attention blocks, and the model has one")
        return _SpanReader(self, verifier, stream("dager"), deadline).read()


class _SpanReader:
    """Reads one observation: the spans of two blocks, then the words that may stand in each position, then the sentences."""

    def __init__(self, attack: dager, verifier: GuessVerifier, rng: Generator, deadline: Deadline) -> None:
        self.attack, self.verifier, self.model, self.rng, self.deadline = (
            attack,
            verifier,
            verifier.model,
            rng,
            deadline,
        )
        self.size, self.length = verifier.known.batch_size, verifier.known.shape[0]
        self.inputs = self._span(0, self._maps(0), self.size * self.length)
        self.judge: Span | ProjectedSpans | None = (
            None  # of the block that judges sentences; None: nothing can, or need
        )
        self.judging, self.judged = 1, self.length  # that block, and the positions whose inputs there count
        self._take_judge()
        first = self._first_inputs(torch.tensor([int(self.model.pad == 0)]), self.length)
        # whether a word's input in the first block depends on its position: not where attention alone turns queries and keys
        self.placed = bool((first - first[:, :1]).abs().max() > SAME_INPUT * first.abs().max())

    def _maps(self, block: int) -> list[Projection]:
        layer = self.model.parts.layers[block]
        return [layer.query] if self.attack.maps == "query" else [layer.query, layer.key, layer.value]

    def _span(self, block: int, maps: Sequence[Projection], most: int) -> BlockSpan:
        try:
            return block_span(self.verifier.update, self.verifier.params, maps, most, self.attack.margin, self.rng)
        except Unreadable as why:
            raise Unreadable(f"the gradient of attention block {block + 1} {why}") from why

    def _take_judge(self) -> None:
        """Take the span that judges sentences: the second block's, else that of a classifier's last query."""
        last = len(self.model.parts.layers) - 1
        choices = [] if self.model.task == "classification" and last == 1 else [(1, self._maps(1), self.length)]
        if self.model.task == "classification":  # only its first position reaches the head
            choices.append((last, [self.model.parts.layers[last].query], 1))
        reasons = []
        for block, maps, judged in choices:
            try:
                judge = self._span(block, maps, self.size * judged)
            except Unreadable as why:
                reasons.append(why)
                continue
            if not isinstance(judge, PartialSpan):
                self.judge, self.judging, self.judged = judge, block, judged
                return
            reasons.append(Unreadable(f"the gradient of attention block {block + 1} spans a part of its inputs only"))
        if self.size > 1 or self.model.parts.layers[1].query.weight in self.verifier.update:
            raise reasons[0]  # only one sentence has one word a position

    # ------------------------------------------------------------------------------------------------------- first block

    def _first_inputs(self, words: Tensor, places: int) -> Tensor:
        """The first block's inputs (C, places, width) for words (C,)."""
        part = self.model.parts.layers[0].query.weight
        return layer_inputs(self.model, self.verifier.params, part, words[:, None].expand(-1, places).contiguous())

    def _vectors(self, words: Tensor) -> Tensor:
        """The first block's inputs for words (C,) in all positions (C, L, width), or in any (C, 1, width)."""
        return self._first_inputs(words, self.length if self.placed else 1)

    def _near_words(self) -> list[list[tuple[float, int]]]:
        """For each position the words whose inputs lie in the span, with their distances."""
        near: list[list[tuple[float, int]]] = [[] for _ in range(self.length)]
        words = torch.tensor([i for i in range(self.model.vocabulary) if i != self.model.pad])
        if isinstance(self.inputs, PartialSpan):
            start = [self._first_inputs(torch.tensor([w]), i + 1)[0, -1] for i, w in enumerate(self.model.start)]
            for word, place in self.inputs.explained(words, self._vectors, start):
                near[place].append((0.0, word))
            return near
        for chunk in words.split(CHUNK):
            vectors = self._vectors(chunk)
            some = self.inputs.near(vectors).nonzero()
            distances = self.inputs.distance(vectors[some[:, 0], some[:, 1]]).tolist()
            for (row, place), distance in zip(some.tolist(), distances, strict=True):
                if distance <= self.inputs.threshold:
                    near[place].append((distance, int(chunk[row])))
        return near

    def _candidates(self, near: Sequence[list[tuple[float, int]]], limit: float) -> list[list[int]]:
        """The nearest words of each position within a limit, up to the first position that has none."""
        most = self.attack.each * self.size * (1 if self.placed else self.length)
        candidates = []
        for some in near if self.placed else [near[0]] * self.length:
            close = [word for distance, word in sorted(some)[:most] if distance <= limit]
            if not close:
                break
            candidates.append(close)
        return candidates

    # ------------------------------------------------------------------------------------------------------ second block

    def read(self) -> tuple[Batch, float]:
        """The sentences, and the relative error that they leave."""
        near, made = self._near_words(), list[tuple[Batch, float]]()
        for limit in self._limits():
            words = self._candidates(near, limit)
            if words:
                made.append(self._decoded(words) if self.verifier.decodes else self._encoded(words))
            if self.deadline.over() or (made and made[-1][1] <= TOLERANCE):
                break
        if not made:
            raise Unreadable("no word's vector lies in the span of the first block")
        return min(made, key=lambda guess: guess[1])

    def _limits(self) -> tuple[float, ...]:
        """Distances within which a word is a candidate: first midway between rounding and the worst case, then the worst case."""
        if isinstance(self.inputs, PartialSpan):
            return (math.inf,)
        worst = self.inputs.threshold
        return (math.sqrt(self.rounding * worst), worst) if worst > self.rounding else (worst,)

    @property
    def rounding(self) -> float:
        """The relative size of a vector's own rounding, as the spans see it."""
        eps: float = torch.finfo(next(iter(self.verifier.update.values())).dtype).eps
        stretch = self.judge.stretch if isinstance(self.judge, ProjectedSpans) else 1.0
        return eps * math.sqrt(self.model.width) * stretch

    def distances(self, sentences: Sequence[Ids]) -> Tensor:
        """How far sentences' inputs in the judging block lie outside its span (N, L), zero behind a sentence's end."""
        if self.judge is None:
            return torch.zeros(len(sentences), self.length)
        part = self.model.parts.layers[self.judging].query.weight
        distances = []
        for first in range(0, len(sentences), SENTENCES):
            some = sentences[first : first + SENTENCES]
            x = framed(some, max(map(len, some)), self.model.pad)
            measured = self.judge.distance(layer_inputs(self.model, self.verifier.params, part, x)).cpu()
            distances.append(F.pad(measured * (x != self.model.pad), (0, self.length - x.shape[1])))
        return torch.cat(distances)

    def _encoded(self, words: Sequence[list[int]]) -> tuple[Batch, float]:
        sentences = SentenceAssembly(
            self.model,
            words,
            self.size,
            self.distances,
            judged=self.judged,
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
            yield from islice(combinations(sentences, self.size), SETS)
            return
        for more in islice(product(sentences, repeat=self.size - len(sentences)), SETS):
            yield [*sentences, *more]

    def _decoded(self, words: Sequence[list[int]]) -> tuple[Batch, float]:
        """Sentences grow word by word while their inputs stay in the span; one that cannot grow lacks only its last word."""
        threshold = math.inf if self.judge is None else self.judge.threshold
        live: list[Ids] = [()]
        complete: list[Ids] = []
        for position, some in enumerate(words):
            longer = [(*ids, word) for ids in live for word in some]
            distances = self.distances(longer)[:, position]
            kept = [i for i in distances.argsort().tolist() if float(distances[i]) <= threshold]
            kept = kept[: self.attack.starts * self.size]
            grown = {longer[i][:-1] for i in kept}
            complete += [ids for ids in live if ids and ids not in grown]
            live = [longer[i] for i in kept]
            if not live:
                break
        made = []
        for sentences in self._sets([*live, *complete[::-1]] or [(words[0][0],)]):
            made.append(complete_sentences(self.verifier, sentences))
            if made[-1][1] <= TOLERANCE or self.deadline.over():
                break
        return min(made, key=lambda guess: guess[1])
