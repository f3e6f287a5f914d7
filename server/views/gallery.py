"""The gallery: private examples with their reconstructions, one page at a time."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedgauge.attacks.modality.base import Mark, Modality
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.client.data.batches import Shards
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.label_kinds import written
from fedgauge.server.store.ledger_types import UNGRADED
from fedgauge.server.store.run import Run
from fedgauge.server.store.run_files import LedgerError
from fedgauge.server.store.tape import TapeError
from fedgauge.server.views.formatting import in_unit, status_words
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.snapshot import RunSnapshot

SMALL = 96  # pixels per side of an image
CURVE = 24  # pixels of height of a channel's curve
PARTS = 9  # curves, channels or slices in one picture
PAGE = 24  # cards in one answer
BYTES = 1_000_000  # for cards with pictures, so that a report stays below 6 MB
NO_TRUTH, NOT_HERE, NOT_GRADED = "the truth stays with the client", "no truth here", "not graded"

Kind = Literal["image", "text"]
Place = tuple[int, int, int]  # round, client, example


def ordered(strengths: Mapping[Place, float]) -> list[Place]:
    """Sort examples, the worst leak first; those without a value come last."""
    return sorted(strengths, key=lambda place: (math.isnan(strengths[place]), -strengths[place]))


@dataclass(frozen=True)
class Tile:
    """One attack's reconstruction of one example.

    Args:
        image: a data URI, or None with the reason in note.
        value: the main metric; None: none.
        label: the label that the attack claims; empty: none.
        words: of text, each token with its mark: right, misplaced or wrong.
    """

    attack: str
    image: str | None
    value: float | None
    note: str
    label: str = ""
    words: tuple[tuple[str, Mark], ...] | None = None


@dataclass(frozen=True)
class Card:
    """One private example with its reconstructions.

    Args:
        truth, label: None if the data is not on this machine.
        truth_words: of text, its tokens, in place of truth.
        absent: the reason for a missing truth.
        headings: of a table's row, the name of each cell.
    """

    round: int
    client: int
    example: int
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
    reading: RunSnapshot

    @cached_property
    def attacks(self) -> list[str]:
        return [a for a in self.reading.order if self.scores.role(a) == "attack"]

    @cached_property
    def shards(self) -> Shards | None:
        """The private data; None if it is not on this machine."""
        scenario = None if self.reading.ledger.deployed else self.reading.built
        return None if scenario is None else scenario.federation.shards

    def label_name(self, label: int | str) -> str:
        names = () if self._dataset is None else self._dataset.names
        if isinstance(label, str):
            return f"label{'s' * (' ' in label)} {label}"
        return names[label] if label < len(names) else f"label {label}"

    @property
    def kind(self) -> Kind:
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
        return {(round, attack) for attack, round, _, _ in self.outcomes}

    @cached_property
    def rounds(self) -> list[int]:
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

    def leaked(self) -> dict[Place, float]:
        """Return the attacked examples that beat every baseline; of a batch that only its client knows, its best one."""
        every = self.reading.scores.of_metric(self.reading.scores.measure.metric)
        guesses = every.where(~every.by_attacks & ~every.by_limits & ~np.isnan(every.value))
        known, floors = 2 if every.unordered else 3, dict[tuple[int, ...], float]()
        places = zip(guesses.round.tolist(), guesses.client.tolist(), guesses.example.tolist(), strict=True)
        for place, value in zip(places, (every.measure.sign * guesses.value).tolist(), strict=True):
            floors[place[:known]] = max(value, floors.get(place[:known], -math.inf))
        return {place: s for place, s in self.attacked().items() if s > floors.get(place[:known], -math.inf)}

    def page(self, round: int | None = None, client: int | None = None, offset: int = 0) -> Page:
        """Return the cards of a round and a client, the worst leak first; None: of all."""
        everything = self.attacked()
        wanted = {
            place: strength
            for place, strength in everything.items()
            if round in (None, place[0]) and client in (None, place[1])
        }
        return Page(
            kind=self.kind,
            noun=self.reading.scores.measure.private,
            rounds=self.rounds,
            clients=sorted({client for _, client, _ in everything}),
            cards=[self.card(*place) for place in ordered(wanted)[offset : offset + PAGE]],
            round=round,
            total=len(wanted),
            offset=offset,
            page=PAGE,
        )

    @property
    def _labelled(self) -> bool:
        """True if the truth is on this machine and each example has one label."""
        return self.shards is not None and self.shards.dataset.labelled

    def rows_at(self, round: int, client: int) -> list[int]:
        """Return the training examples of a client in a round; empty if the data is not on this machine."""
        if self.shards is None or client >= len(self.shards.indices):
            return []
        rows: list[int] = self.reading.scenario.federation.rows_at(client, round).tolist()
        return rows

    def card(self, round: int, client: int, example: int) -> Card:
        truth = self._truth(round, client, example)
        (x, label), text = truth or (None, None), self.kind == "text"
        return Card(
            round=round,
            client=client,
            example=example,
            truth=None if x is None or text else png(x),
            label=label,
            label_name="" if label is None else self.label_name(label),
            tiles=tuple(self._tile(a, round, client, example) for a in self.attacks if (round, a) in self.cells),
            truth_words=tuple(self.modality.words(x)) if x is not None and self.modality and text else None,
            absent="" if truth is not None else NO_TRUTH if self.reading.ledger.deployed else NOT_HERE,
            headings=self.modality.headings() if self.modality else (),
        )

    def _truth(self, round: int, client: int, example: int) -> tuple[Tensor, int | str | None] | None:
        """Return the example with its label; None if it is not on this machine."""
        if self.shards is None:
            batch = self.reading.tester_truth(round, client)
            if batch is None or example >= len(batch.y):
                return None
            return batch.x[example], written(batch.y[example]) if batch.labelled else None
        rows = self.rows_at(round, client)
        if example >= len(rows):
            return None
        dataset, row = self.shards.dataset, rows[example]
        return dataset.x[row], written(dataset.y[row]) if self._labelled else None

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
        truth = self._truth(round, client, example)
        label = self._label(tensors.get("y"), truth, example, attack)
        tile = Tile(attack, None, shown, note, label)
        if self.kind == "image":
            return replace(tile, image=png(x[example]))
        words = self.modality.marked(x[example], truth[0] if truth else None) if self.modality else None
        return replace(tile, words=words)

    def _label(self, y: Tensor | None, truth: tuple[Tensor, int | str | None] | None, example: int, attack: str) -> str:
        labels = y is not None and (y.dim() != 2 or y.is_floating_point())
        if y is None or not labels or example >= len(y) or not (self._labelled or self.reading.ledger.deployed):
            return ""
        guess = written(y[example])
        right = "" if truth is None or isinstance(guess, str) else " ✓" if truth[1] == guess else " ✗"
        return f"{self.label_name(guess)}{', given' if attack in self.scores.given_labels else right}"


def sampled(strengths: Mapping[Place, float], limit: int) -> list[Place]:
    """Choose at most `limit` examples, evenly spaced from the most to the least leaked."""
    ranked = ordered(strengths)
    return sorted(ranked[i] for i in np.linspace(0, len(ranked) - 1, min(len(ranked), limit)).round().astype(int))


def sample_of(gallery: Gallery) -> list[Place]:
    """Choose as many examples of a gallery as fit into BYTES, if their cards are as large as that of the median leak."""
    strengths = gallery.attacked()
    size = len(repr(gallery.card(*ordered(strengths)[len(strengths) // 2]))) if strengths else BYTES
    return sampled(strengths, max(3, BYTES // size))


def worst_cases(gallery: Gallery, count: int) -> list[Card]:
    """Return the examples with the best reconstructions, each once; only those that beat every baseline."""
    main, found = gallery.reading.scores.measure, dict[tuple[int, ...], Card]()
    for round, client, example in ordered(gallery.leaked()):
        rows = gallery.rows_at(round, client)
        key = (client, rows[example]) if example < len(rows) else (round, client, example)
        if key not in found:
            card = gallery.card(round, client, example)
            best = main.leakiest((t for t in card.tiles if t.value is not None), lambda tile: tile.value or 0.0)
            found[key] = replace(card, tiles=(best,) if best else ())
        if len(found) == count:
            break
    return list(found.values())


def picture(x: Tensor) -> Tensor:
    """An example in [0, 1] as an image (1 or 3, H, W): itself, curves of windows and vectors, or slices of a volume."""
    if x.dim() == 3 and len(x) in (1, 3):
        return x
    if x.dim() < 3:
        level = (1 - x.view(-1, x.shape[-1])[:PARTS]) * (CURVE - 1)
        before, rows = level[:, [0, *range(x.shape[-1] - 1)]], torch.arange(CURVE)[:, None]
        low, high = (f(level, before)[:, None] for f in (torch.minimum, torch.maximum))
        drawn = (rows >= low.floor()) & (rows <= high.ceil())
        return 1 - drawn.float().flatten(0, 1).repeat_interleave(max(1, SMALL // x.shape[-1]), 1)[None]
    parts = x if x.dim() == 3 else x[0].flatten(0, x.dim() - 4)  # channels, else slices of the first one
    some = parts[np.linspace(0, len(parts) - 1, min(len(parts), PARTS)).round().astype(int)]
    side = math.ceil(len(some) ** 0.5)
    blank = some.new_ones(side * -(-len(some) // side) - len(some), *some.shape[1:])
    return torch.cat([torch.cat(list(row), 1) for row in torch.cat([some, blank]).split(side)])[None]


def png(x: Tensor) -> str:
    """Encode an example in [0, 1] or uint8 as the data URI of a PNG; one of more than SMALL pixels a side is averaged."""
    from PIL import Image

    pixels = picture(x.float() / 255 if x.dtype == torch.uint8 else x.clamp(0, 1))
    if (factor := math.ceil(max(pixels.shape[1:]) / SMALL)) > 1:
        pixels = F.avg_pool2d(pixels, factor, ceil_mode=True)
    values = (pixels * 255).round().byte().permute(1, 2, 0).numpy()  # (H, W, C)
    file = io.BytesIO()
    Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def reconstruction(run: Run, round: int, client: int, attack: str) -> dict[str, Tensor] | str:
    """Read a reconstruction in the order of its scores' examples; "missing" or "damaged" without one."""
    try:
        tensors = run.read_reconstruction(round, client, attack)
    except (TapeError, LedgerError) as error:
        return "missing" if isinstance(error.__cause__, FileNotFoundError) else "damaged"
    if "example" in tensors:  # grading by a later truth added the examples' numbers
        example = tensors["example"]
        size, some = int(example.max()) + 1, example >= 0
        for name, t in [(name, tensors[name]) for name in ("x", "y", "confidence") if name in tensors]:
            tensors[name] = t.new_zeros((size, *t.shape[1:]))
            tensors[name][example[some]] = t[some]
    return tensors
