"""The gallery: private examples with their reconstructions, one page at a time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from torch import Tensor

from fedgauge.attacks.modality.base import Mark, Modality
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.client.data.images import Dataset, Shards
from fedgauge.client.labels import written
from fedgauge.server.store.ledger_types import UNGRADED
from fedgauge.server.store.pictures import SMALL, png, reconstruction
from fedgauge.server.views.formatting import in_unit, status_words
from fedgauge.server.views.intervals import evenly
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.scores import Scores

WORD_BYTES = 40  # per marked word
PAGE = 24  # cards in one answer
BYTES = 1_000_000  # for cards with pictures, so that a report stays below 6 MB
CARD_BYTES = 900  # of one card without its pictures, about
IMAGE_BYTES = 350  # of one picture without its pixels, about
NO_TRUTH, NOT_HERE, NOT_GRADED = "the truth stays with the client", "no truth here", "not graded"

Sort = Literal["leak", "hidden", "client"]
Kind = Literal["image", "text"]
Place = tuple[int, int, int]  # round, client, example


class NotShown(Exception):
    """A picture does not exist; the message says why."""


@dataclass(frozen=True)
class Query:
    """Filter and order of examples; None: no filter."""

    round: int | None = None
    client: int | None = None
    sort: Sort = "leak"
    offset: int = 0


def ordered(strengths: Mapping[Place, float], by: Sort) -> list[Place]:
    """Sort examples; those without a value come last by leakage."""
    if by == "client":
        return sorted(strengths, key=lambda place: (place[1], place[0], place[2]))
    sign = 1 if by == "hidden" else -1
    return sorted(strengths, key=lambda place: (math.isnan(strengths[place]), sign * strengths[place]))


@dataclass(frozen=True)
class Tile:
    """One attack's reconstruction of one example.

    Args:
        image: a data URI, or None with the reason in note.
        value: the main metric; None: none.
        label: the label that the attack claims; empty: none.
        trace: if its iterations were kept.
        words: of text, each token with its mark: right, misplaced or wrong.
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
    """One private example with its reconstructions.

    Args:
        image: its number among the training images; like truth and label None if the data is not on this machine.
        truth_words: of text, its tokens, in place of truth.
        absent: the reason for a missing truth.
        headings: of a table's row, the name of each cell.
    """

    round: int
    client: int
    example: int
    image: int | None
    truth: str | None
    label: int | str | None
    label_name: str
    tiles: tuple[Tile, ...]
    truth_words: tuple[str, ...] | None
    absent: str
    headings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Page:
    """Cards of a query, with the possible values of its filters."""

    kind: Kind
    noun: str
    rounds: Sequence[int]
    clients: Sequence[int]
    cards: Sequence[Card]
    round: int | None = None
    total: int = 0
    offset: int = 0
    page: int = 0


@dataclass(frozen=True, eq=False)
class Gallery:
    """Gallery of a run."""

    reading: Reading
    _rows: dict[tuple[int, int], list[int]] = field(default_factory=dict, init=False)

    @cached_property
    def attacks(self) -> list[str]:
        """Attacks in the plan's order."""
        return [a for a in self.reading.order if is_attack(a)]

    @cached_property
    def given(self) -> set[str]:
        """Attacks that are given the labels."""
        planned = self.reading.ledger.planned()
        return {name for name, attack in planned.items() if attack.labels == "given"}

    @cached_property
    def shards(self) -> Shards | None:
        """The private data; None if it is not on this machine."""
        scenario = None if self.reading.ledger.deployed else self.reading.built
        return None if scenario is None else scenario.federation.shards

    def label_name(self, label: int | str) -> str:
        """Return the name of a class, or its number."""
        names = () if self._dataset is None else self._dataset.names
        if isinstance(label, str):
            return f"labels {label}"
        return names[label] if label < len(names) else f"label {label}"

    @property
    def kind(self) -> Kind:
        """Display of examples."""
        return (self.modality or self.reading.scores.modality).shown_as

    @cached_property
    def modality(self) -> Modality | None:
        """Kind of the data; None if it is not on this machine."""
        return None if self._dataset is None else modality_of(self._dataset)

    @property
    def _dataset(self) -> Dataset | None:
        return None if self.reading.built is None else self.reading.built.federation.shards.dataset

    @cached_property
    def scores(self) -> Scores:
        """Score rows of the attacks in the main metric."""
        scores = self.reading.scores.of_metric(self.reading.scores.measure.metric)
        return scores.where(scores.by_attacks)

    @cached_property
    def outcomes(self) -> Mapping[tuple[str, int, int, int], tuple[float, str]]:
        """Main metric (NaN: none) and status by (attack, round, client, example)."""
        s = self.scores
        columns = (s.attack, s.round, s.client, s.example, s.value, s.status)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return {(s.attacks[a], r, c, e): (value, s.statuses[status]) for a, r, c, e, value, status in rows}

    @cached_property
    def cells(self) -> set[tuple[int, str]]:
        """Every (round, attack) with scores."""
        return {(round, attack) for attack, round, _, _ in self.outcomes}

    @cached_property
    def rounds(self) -> list[int]:
        """Attacked rounds."""
        return sorted({round for round, _ in self.cells})

    def attacked(self) -> dict[Place, float]:
        """Return the best value of each attacked example, negated if lower values leak more; NaN: none."""
        found: dict[Place, float] = {}
        for (_, round, client, example), (value, _) in self.outcomes.items():
            strength = self.scores.measure.sign * value
            for one in range(self.scores.size_of(round, client)) if example == WHOLE_BATCH else (example,):
                known = found.get((round, client, one), math.nan)
                found[round, client, one] = strength if math.isnan(known) or strength > known else known
        return dict(sorted(found.items()))

    def page(self, query: Query) -> Page:
        """Return the cards of a query."""
        everything = self.attacked()
        wanted = {
            place: strength
            for place, strength in everything.items()
            if query.round in (None, place[0]) and query.client in (None, place[1])
        }
        shown = ordered(wanted, query.sort)[query.offset : query.offset + PAGE]
        return Page(
            kind=self.kind,
            noun=self.reading.scores.measure.private,
            rounds=self.rounds,
            clients=sorted({client for _, client, _ in everything}),
            cards=[self.card(*place) for place in shown],
            round=query.round,
            total=len(wanted),
            offset=query.offset,
            page=PAGE,
        )

    @property
    def _labelled(self) -> bool:
        """True if the truth is on this machine and each example has one label."""
        return self.shards is not None and self.shards.dataset.labelled

    @property
    def example_bytes(self) -> int:
        """Largest size of one image in base64; approximate size of a text."""
        channels, *size = (3, SMALL, SMALL) if self._dataset is None else self._dataset.shape
        if self.kind == "text":
            return WORD_BYTES * channels
        return channels * math.prod(min(side, SMALL) for side in size) * 4 // 3

    def rows_at(self, round: int, client: int) -> list[int]:
        """Return the training examples of a client in a round; empty if the data is not on this machine."""
        if self.shards is None or client >= len(self.shards.indices):
            return []
        if (round, client) not in self._rows:
            self._rows[round, client] = self.reading.scenario.federation.rows_at(client, round).tolist()
        return self._rows[round, client]

    def card(self, round: int, client: int, example: int) -> Card:
        """Return one private example with its reconstructions."""
        truth, row = self._truth(round, client, example)
        (x, label), text = truth or (None, None), self.kind == "text"
        return Card(
            round=round,
            client=client,
            example=example,
            image=row,
            truth=None if x is None or text else png(x, SMALL),
            label=label,
            label_name="" if label is None else self.label_name(label),
            tiles=tuple(self._tile(a, round, client, example) for a in self.attacks if (round, a) in self.cells),
            truth_words=tuple(self.modality.words(x)) if x is not None and self.modality and text else None,
            absent="" if truth is not None else NO_TRUTH if self.reading.ledger.deployed else NOT_HERE,
            headings=self.modality.headings() if self.modality else (),
        )

    def _truth(
        self, round: int, client: int, example: int
    ) -> tuple[tuple[Tensor, int | str | None] | None, int | None]:
        """Return the example with its label, and its number among the training examples."""
        if self.shards is None:
            batch = self.reading.tester_truth(round, client)
            if batch is None or example >= len(batch.y):
                return None, None
            return (batch.x[example], written(batch.y[example]) if batch.labelled else None), None
        rows = self.rows_at(round, client)
        if example >= len(rows):
            return None, None
        dataset, row = self.shards.dataset, rows[example]
        return (dataset.x[row], written(dataset.y[row]) if self._labelled else None), row

    def _tile(self, attack: str, round: int, client: int, example: int) -> Tile:
        places = ((attack, round, client, e) for e in (example, WHOLE_BATCH))
        found = [self.outcomes[place] for place in places if place in self.outcomes]
        value, status = found[0] if found else (math.nan, "not attacked")
        if math.isnan(value) and status != UNGRADED:
            return Tile(attack, None, None, status_words(status))
        shown = None if math.isnan(value) else value
        note = NOT_GRADED if shown is None else in_unit(value, self.reading.scores.measure)
        tensors = reconstruction(self.reading.run, round, client, attack)
        if isinstance(tensors, str):
            return Tile(attack, None, shown, f"file {tensors}; {note}")
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

    def _label(self, y: Tensor | None, truth: tuple[Tensor, int | str | None] | None, example: int, attack: str) -> str:
        labels = y is not None and (y.dim() == 1 or y.is_floating_point())
        if y is None or not labels or example >= len(y) or not (self._labelled or self.reading.ledger.deployed):
            return ""
        guess = written(y[example])
        right = "" if truth is None or isinstance(guess, str) else " ✓" if truth[1] == guess else " ✗"
        return f"{self.label_name(guess)}{', given' if attack in self.given else right}"


def sampled(strengths: Mapping[Place, float], limit: int) -> list[Place]:
    """Choose at most `limit` examples, evenly spaced from the most to the least leaked."""
    ranked = ordered(strengths, "leak")
    return sorted(ranked[i] for i in evenly(np.arange(len(ranked)), limit))


def sample_of(gallery: Gallery) -> list[Place]:
    """Choose as many examples of a gallery as fit into BYTES."""
    card_bytes = CARD_BYTES + (1 + len(gallery.attacks)) * (gallery.example_bytes + IMAGE_BYTES)
    return sampled(gallery.attacked(), max(3, BYTES // card_bytes))


def worst_cases(gallery: Gallery, count: int) -> list[Card]:
    """Return the examples with the best reconstructions, each once."""
    graded = {place: s for place, s in gallery.attacked().items() if not math.isnan(s)}
    main, found = gallery.reading.scores.measure, dict[tuple[int, ...], Card]()
    for round, client, example in ordered(graded, "leak"):
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
    """One private image in all rounds that attacked it."""

    image: int
    client: int
    truth: str
    label: int | str
    label_name: str
    rounds: Sequence[Card]


def through_rounds(gallery: Gallery, client: int, image: int) -> ImageRounds:
    """Return one private image over the rounds.

    Raises:
        NotShown: it was never attacked.
    """
    own = [key for key in gallery.attacked() if key[1] == client and key[2] < len(gallery.rows_at(*key[:2]))]
    same = [key for key in own if gallery.rows_at(*key[:2])[key[2]] == image]
    if not same or gallery.shards is None or gallery.kind == "text":
        raise NotShown(f"client {client} was never attacked on image {image}")
    dataset = gallery.shards.dataset
    label, cards = written(dataset.y[image]), [gallery.card(*key) for key in same]
    return ImageRounds(image, client, png(dataset.x[image]), label, gallery.label_name(label), cards)


@dataclass(frozen=True, eq=False)
class Trace:
    """Objective and image of an attack over its iterations."""

    iterations: Sequence[int]
    objective: Sequence[float]
    images: Sequence[str]
    truth: str | None


def trace(gallery: Gallery, round: int, client: int, example: int, attack: str) -> Trace:
    """Return the iterations of an attack on one image.

    Raises:
        NotShown: they were not kept.
    """
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
