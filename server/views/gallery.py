"""The gallery: private examples beside the attacks' reconstructions, one page at a time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch import Tensor

from fedgauge.attacks.modality.base import Mark, Modality
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.client.data.images import Dataset, Shards
from fedgauge.server.store.ledger_types import UNGRADED
from fedgauge.server.store.pictures import SMALL, png, reconstruction
from fedgauge.server.views.formatting import in_unit, status_words
from fedgauge.server.views.intervals import Floats, Ints
from fedgauge.server.views.reading import Reading, kept
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.scores import Scores

WORD_BYTES = 40  # per marked word
PAGE_BYTES = 1_500_000  # of images in one answer
PAGE = (6, 60)  # cards in one answer, at least and at most
NO_TRUTH, NOT_HERE, NOT_GRADED = "the truth stays with the client", "no truth here", "not graded"

Sort = Literal["leak", "hidden", "client"]
Kind = Literal["image", "text"]
Place = tuple[int, int, int]  # round, client, example


class NotShown(Exception):
    """There is no such picture; the message says why."""


@dataclass(frozen=True)
class Query:
    """Which examples to show; None: no filter."""

    round: int | None = None
    client: int | None = None
    attack: str | None = None
    label: int | None = None
    sort: Sort = "leak"
    offset: int = 0


@dataclass(frozen=True, eq=False)
class AttackedExamples:
    """The attacked examples, as columns (N,): where they are, and how much leaked at most.

    Args:
        strength: larger for more leakage: the attacks' best value, negative where a lower one leaks more; NaN: none.
    """

    round: Ints
    client: Ints
    example: Ints
    strength: Floats

    def where(self, chosen: Any) -> "AttackedExamples":
        """The chosen examples."""
        return AttackedExamples(self.round[chosen], self.client[chosen], self.example[chosen], self.strength[chosen])

    def sorted(self, by: Sort) -> "AttackedExamples":
        """The examples in this order; those without a value go last by either leakage."""
        if by == "client":
            return self.where(np.lexsort((self.example, self.round, self.client)))
        return self.where(np.argsort(self.strength if by == "hidden" else -self.strength, kind="stable"))

    def __len__(self) -> int:
        return len(self.strength)

    def __iter__(self) -> Iterator[Place]:
        return zip(self.round.tolist(), self.client.tolist(), self.example.tolist(), strict=True)


@dataclass(frozen=True)
class Tile:
    """One attack's reconstruction of one example, an image or text.

    Args:
        image: a data URI, or None with the reason in note.
        value: the main metric; None if there is no value.
        label: the label that the attack claims, as text; empty if it claims none.
        trace: whether its iterations were kept.
        words: of text, each token and whether it is right, misplaced or wrong.
    """

    attack: str
    image: str | None
    value: float | None
    note: str
    label: str = ""
    trace: bool = False
    words: tuple[tuple[str, Mark], ...] | None = None


@dataclass(frozen=True)
class Card:
    """One private example beside the attacks' reconstructions.

    Args:
        image: its number among the training images; image, truth and label are None if the data is not on this machine.
        label_name: the label in words; empty if there is none.
        why: why it is shown, if not all are.
        truth_words: of text, its tokens, instead of truth.
        absent: why there is no truth; empty if there is one.
        headings: of text, what each of its tokens is, if they stand in columns; empty if they do not.
    """

    round: int
    client: int
    example: int
    image: int | None
    why: str
    truth: str | None
    label: int | None
    label_name: str
    tiles: tuple[Tile, ...]
    truth_words: tuple[str, ...] | None
    absent: str
    headings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Page:
    """The cards that a query asks for, and the values that its filters may have."""

    kind: Kind
    noun: str
    rounds: Sequence[int]
    clients: Sequence[int]
    attacks: Sequence[str]
    labels: Sequence[int]
    class_names: Sequence[str]
    cards: Sequence[Card]
    round: int | None = None
    total: int = 0
    offset: int = 0
    page: int = 0


@dataclass(frozen=True, eq=False)
class Gallery:
    """The gallery of a run, from what has been read so far."""

    reading: Reading

    @cached_property
    def attacks(self) -> list[str]:
        """The attacks (without baselines and limits), in the plan's order."""
        return [a for a in self.reading.order if is_attack(a)]

    @cached_property
    def given(self) -> set[str]:
        """The attacks that the threat model gives the labels."""
        planned = self.reading.ledger.planned()
        return {name for name, attack in planned.items() if attack.labels == "given"}

    @cached_property
    def shards(self) -> Shards | None:
        """The private data; None if it is not on this machine, as in every deployment."""
        scenario = None if self.reading.ledger.deployed else self.reading.built
        return None if scenario is None else scenario.federation.shards

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; empty if they have none, or the data set is not on this machine."""
        return () if self._dataset is None else self._dataset.names

    def label_name(self, label: int) -> str:
        """A label as text: its class's name, or its number."""
        return self.class_names[label] if label < len(self.class_names) else f"label {label}"

    @property
    def kind(self) -> Kind:
        """How what was attacked is shown."""
        return (self.modality or self.reading.scores.modality).shown_as

    @cached_property
    def modality(self) -> Modality | None:
        """The kind of the private data, or in a deployment of the public data; None if neither is on this machine."""
        return None if self._dataset is None else modality_of(self._dataset)

    @property
    def _dataset(self) -> Dataset | None:
        return None if self.reading.built is None else self.reading.built.federation.shards.dataset

    @cached_property
    def scores(self) -> Scores:
        """The attacks' score rows of the main metric."""
        scores = self.reading.scores.of_metric(self.reading.scores.measure.metric)
        return scores.where(scores.by_attacks)

    @cached_property
    def outcomes(self) -> Mapping[tuple[str, int, int, int], tuple[float, str]]:
        """Main metric (NaN: none) and status by (attack, round, client, example); WHOLE_BATCH stands for a whole batch."""
        s = self.scores
        columns = (s.attack, s.round, s.client, s.example, s.value, s.status)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return {(s.attacks[a], r, c, e): (value, s.statuses[status]) for a, r, c, e, value, status in rows}

    @cached_property
    def cells(self) -> set[tuple[int, str]]:
        """Every (round, attack) that has scores."""
        return {(round, attack) for attack, round, _, _ in self.outcomes}

    @cached_property
    def rounds(self) -> list[int]:
        """The attacked rounds."""
        return sorted({round for round, _ in self.cells})

    def attacked(self, attack: str | None = None) -> AttackedExamples:
        """Every attacked example, by one attack or by any, in order."""
        rows = self.scores if attack is None else self.scores.of_attack(attack)
        whole, sizes = rows.example == WHOLE_BATCH, np.ones(len(rows), np.int64)
        # one row stands for each example of its batch
        sizes[whole] = list(map(rows.size_of, rows.round[whole].tolist(), rows.client[whole].tolist()))
        first = (np.cumsum(sizes) - sizes - np.where(whole, 0, rows.example)).repeat(sizes)
        places = np.arange(sizes.sum()) - first
        keys = np.stack([rows.round.repeat(sizes), rows.client.repeat(sizes), places])
        keys, own = np.unique(keys, axis=1, return_inverse=True)
        strength = np.full(keys.shape[1], np.nan)
        np.fmax.at(strength, own, rows.measure.sign * rows.value.repeat(sizes))
        return AttackedExamples(keys[0], keys[1], keys[2], strength)

    def page(self, query: Query) -> Page:
        """The cards that a query asks for."""
        everything = self.attacked(query.attack)
        chosen = self._filtered(everything, query).sorted(query.sort)
        shown = chosen.where(slice(query.offset, query.offset + self.page_size))
        return Page(
            kind=self.kind,
            noun=self.reading.scores.measure.private,
            rounds=self.rounds,
            clients=np.unique(everything.client).tolist(),
            attacks=self.attacks,
            labels=list(range(self.shards.dataset.classes)) if self.shards and self._labelled else [],
            class_names=self.class_names,
            cards=[self.card(*key, attack=query.attack) for key in shown],
            round=query.round,
            total=len(chosen),
            offset=query.offset,
            page=self.page_size,
        )

    def _filtered(self, examples: AttackedExamples, query: Query) -> AttackedExamples:
        for wanted, column in ((query.round, "round"), (query.client, "client")):
            if wanted is not None:
                examples = examples.where(getattr(examples, column) == wanted)
        if query.label is not None and self.shards is not None and self._labelled:
            y = self.shards.dataset.y
            labels = [int(y[self.rows_at(r, c)[e]]) for r, c, e in examples]
            examples = examples.where(np.array(labels, np.int64) == query.label)
        return examples

    @property
    def _labelled(self) -> bool:
        """Whether the truth is on this machine and each example has one label."""
        return self.shards is not None and self.shards.dataset.labelled

    @property
    def example_bytes(self) -> int:
        """The size of one image in base64, if it cannot be compressed; the approximate size of a sentence."""
        # in a deployment the shape is that of the public data, which the scenario names
        channels, *size = (3, SMALL, SMALL) if self._dataset is None else self._dataset.shape
        if self.kind == "text":
            return WORD_BYTES * channels
        return channels * math.prod(min(side, SMALL) for side in size) * 4 // 3

    @property
    def page_size(self) -> int:
        """Cards in one answer: fewer if images are large."""
        return int(np.clip(PAGE_BYTES // (self.example_bytes * (1 + len(self.attacks))), *PAGE))

    def rows_at(self, round: int, client: int) -> list[int]:
        """The training images that a client trained on in a round; empty if the data, or such a client, is not here."""
        if self.shards is None or client >= len(self.shards.indices):
            return []
        return _rows_at(self.reading, round, client)

    def card(self, round: int, client: int, example: int, why: str = "", attack: str | None = None) -> Card:
        """One private example beside the reconstructions of all attacks, or of one."""
        attacks = self.attacks if attack is None else [attack]
        truth, row = self._truth(round, client, example)
        (x, label), text = truth or (None, None), self.kind == "text"
        return Card(
            round=round,
            client=client,
            example=example,
            image=row,
            why=why,
            truth=None if x is None or text else png(x, SMALL),
            label=label,
            label_name="" if label is None else self.label_name(label),
            tiles=tuple(self._tile(a, round, client, example) for a in attacks if (round, a) in self.cells),
            truth_words=tuple(self.modality.words(x)) if x is not None and self.modality and text else None,
            absent="" if truth is not None else NO_TRUTH if self.reading.ledger.deployed else NOT_HERE,
            headings=self.modality.headings() if self.modality else (),
        )

    def _truth(self, round: int, client: int, example: int) -> tuple[tuple[Tensor, int | None] | None, int | None]:
        """The example with its label, and its number among the training examples."""
        if self.shards is None:
            batch = self.reading.tester_truth(round, client)
            if batch is None or example >= len(batch.y):
                return None, None
            return (batch.x[example], int(batch.y[example]) if batch.labelled else None), None
        rows = self.rows_at(round, client)
        if example >= len(rows):
            return None, None
        dataset, row = self.shards.dataset, rows[example]
        return (dataset.x[row], int(dataset.y[row]) if self._labelled else None), row

    def _tile(self, attack: str, round: int, client: int, example: int) -> Tile:
        places = ((attack, round, client, e) for e in (example, WHOLE_BATCH))
        found = [self.outcomes[place] for place in places if place in self.outcomes]
        value, status = found[0] if found else (math.nan, "not attacked")
        if math.isnan(value) and status != UNGRADED:
            return Tile(attack, None, None, status_words(status))
        note, shown = in_unit(value, self.reading.scores.measure), None if math.isnan(value) else value
        if shown is None:
            objective = self.reading.objectives.get((round, client, attack))
            note = NOT_GRADED if objective is None else f"{NOT_GRADED}, objective {objective:.3g}"
        tensors = reconstruction(self.reading.run, round, client, attack)
        if isinstance(tensors, str):
            return Tile(attack, None, shown, f"file {tensors}; {note}")
        # the file may hold sentences, which no score row shows here, or fewer images than the client claims to have
        x = tensors.get("x")
        if x is None or not (self.modality or self.reading.scores.modality).holds(x) or example >= len(x):
            return Tile(attack, None, shown, note if status == UNGRADED else f"file damaged; {note}")
        truth, _ = self._truth(round, client, example)
        label = self._label(tensors.get("y"), truth, example, attack)
        tile = Tile(attack, None, shown, note, label, "trace_x" in tensors)
        if self.kind == "image":
            return replace(tile, image=png(x[example], SMALL))
        words = self.modality.marked(x[example], truth[0] if truth else None) if self.modality else None
        return replace(tile, words=words)

    def _label(self, y: Tensor | None, truth: tuple[Tensor, int | None] | None, example: int, attack: str) -> str:
        if y is None or y.dim() != 1 or example >= len(y) or not (self._labelled or self.reading.ledger.deployed):
            return ""
        guess = int(y[example])
        right = "" if truth is None else " ✓" if truth[1] == guess else " ✗"
        return f"{self.label_name(guess)}{', given' if attack in self.given else right}"


@kept
def _rows_at(reading: Reading, round: int, client: int) -> list[int]:
    rows: list[int] = reading.scenario.federation.rows_at(client, round).tolist()
    return rows


def worst_cases(gallery: Gallery, count: int) -> list[Card]:
    """The private examples that came back best, each once and as the attack that brought it back best; none without a value."""
    everything, main = gallery.attacked(), gallery.reading.scores.measure
    found: dict[tuple[int, ...], Card] = {}
    for round, client, example in everything.where(~np.isnan(everything.strength)).sorted("leak"):
        rows = gallery.rows_at(round, client)
        key = (client, rows[example]) if example < len(rows) else (round, client, example)
        if key not in found:
            card = gallery.card(round, client, example)
            best = main.leakiest((t for t in card.tiles if t.value is not None), lambda tile: tile.value or 0.0)
            found[key] = replace(card, tiles=(best,) if best else ())
        if len(found) == count:
            break
    return list(found.values())


@dataclass(frozen=True, eq=False)
class ImageRounds:
    """One private image in every round in which it was attacked."""

    image: int
    client: int
    truth: str
    label: int
    label_name: str
    rounds: Sequence[Card]


def through_rounds(gallery: Gallery, client: int, image: int) -> ImageRounds:
    """One private image over the rounds; NotShown if it was never attacked."""
    everything = gallery.attacked()
    own = [key for key in everything.where(everything.client == client) if key[2] < len(gallery.rows_at(*key[:2]))]
    same = [key for key in own if gallery.rows_at(*key[:2])[key[2]] == image]
    if not same or gallery.shards is None or gallery.kind == "text":
        raise NotShown(f"client {client} was never attacked on image {image}")
    dataset = gallery.shards.dataset
    label, cards = int(dataset.y[image]), [gallery.card(*key) for key in same]
    return ImageRounds(image, client, png(dataset.x[image]), label, gallery.label_name(label), cards)


@dataclass(frozen=True, eq=False)
class Trace:
    """An attack's objective and image over its iterations."""

    iterations: Sequence[int]
    objective: Sequence[float]
    images: Sequence[str]
    truth: str | None


def trace(gallery: Gallery, round: int, client: int, example: int, attack: str) -> Trace:
    """How an attack came to one image; NotShown if that was not kept."""
    tensors = reconstruction(gallery.reading.run, round, client, attack)
    if isinstance(tensors, str):
        raise NotShown(f"the reconstruction's file is {tensors}")
    if "trace_x" not in tensors:
        raise NotShown("the attack's iterations were not kept: set trace = 12 in the [[attack]] table")
    if example >= tensors["trace_x"].shape[1]:
        raise NotShown(f"there is no example {example}")
    truth, _ = gallery._truth(round, client, example)
    return Trace(
        iterations=tensors["trace_iteration"].tolist(),
        objective=tensors["trace_objective"].tolist(),
        images=[png(x) for x in tensors["trace_x"][:, example]],
        truth=None if truth is None else png(truth[0]),
    )
