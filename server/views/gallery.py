"""The gallery: private examples beside the attacks' reconstructions, one page at a time."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
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
from fedgauge.server.views import formatting
from fedgauge.server.views.intervals import Floats, Ints
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.scores import Scores

WORD_BYTES = 40  # per marked word
PAGE_BYTES = 1_500_000  # of images in one answer
PAGE = (6, 60)  # cards in one answer, at least and at most
NO_TRUTH, NOT_HERE, NOT_GRADED = "the truth stays with the client", "no truth here", "not graded"

Sort = Literal["leak", "hidden", "client"]


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

    def __len__(self) -> int:
        return len(self.strength)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.round.tolist(), self.client.tolist(), self.example.tolist(), strict=True)


@dataclass(frozen=True)
class Tile:
    """One attack's reconstruction of one example, an image or text.

    Args:
        image: a data URI, or None with the reason in note.
        value: the main metric; None if there is no value, or if it is infinite, which `exact` says.
        label: the label that the attack claims, as text; empty if it claims none.
        trace: whether its iterations were kept.
        words: of text, each token and whether it is right, misplaced or wrong.
    """

    attack: str
    image: str | None
    value: float | None
    exact: bool
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
    tiles: tuple[Tile, ...]
    truth_words: tuple[str, ...] | None = None
    absent: str = ""
    label_name: str = ""
    headings: tuple[str, ...] = ()


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
    def kind(self) -> Literal["image", "text"]:
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
    def cells(self) -> set[tuple[int, str]]:
        """Every (round, attack) that has scores."""
        pairs = np.unique(np.stack([self.scores.round, self.scores.attack]), axis=1).T.tolist()
        return {(round, self.scores.attacks[attack]) for round, attack in pairs}

    @cached_property
    def rounds(self) -> list[int]:
        """The attacked rounds."""
        return sorted({round for round, _ in self.cells})

    def outcomes(self, round: int, attack: str) -> Mapping[tuple[int, int], tuple[float, str]]:
        """Main metric (NaN: none) and status by (client, example); WHOLE_BATCH stands for a whole batch."""
        return self.reading.view(("outcomes", round, attack), lambda: self._outcomes(round, attack))

    def _outcomes(self, round: int, attack: str) -> dict[tuple[int, int], tuple[float, str]]:
        rows = self.scores.of_attack(attack)
        rows = rows.where(rows.round == round)
        columns = (rows.client, rows.example, rows.value, rows.status)
        return {(c, e): (v, rows.statuses[s]) for c, e, v, s in zip(*(k.tolist() for k in columns), strict=True)}

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

    def page(self, query: Query) -> dict[str, Any]:
        """The cards that a query asks for, and the values that its filters may have."""
        everything = self.reading.view(("attacked", query.attack), lambda: self.attacked(query.attack))
        chosen = self._sorted(self._filtered(everything, query), query.sort)
        size = self.page_size
        shown = chosen.where(slice(query.offset, query.offset + size))
        return {
            "kind": self.kind,
            "noun": self.reading.scores.measure.private,
            "rounds": self.rounds,
            "clients": np.unique(everything.client).tolist(),
            "attacks": self.attacks,
            "labels": list(range(self.shards.dataset.classes)) if self.shards and self._labelled else [],
            "class_names": self.class_names,
            "round": "all" if query.round is None else query.round,
            "total": len(chosen),
            "offset": query.offset,
            "page": size,
            "cards": [asdict(self.card(*key, attack=query.attack)) for key in shown],
        }

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

    @staticmethod
    def _sorted(examples: AttackedExamples, sort: Sort) -> AttackedExamples:
        if sort == "client":
            return examples.where(np.lexsort((examples.example, examples.round, examples.client)))
        sign = -1 if sort == "leak" else 1
        return examples.where(np.argsort(sign * examples.strength, kind="stable"))  # NaN goes last either way

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
        federation = self.reading.scenario.federation
        rows: list[int] = self.reading.keep(("rows", round, client), lambda: federation.rows_at(client, round).tolist())
        return rows

    def card(self, round: int, client: int, example: int, why: str = "", attack: str | None = None) -> Card:
        """One private example beside the reconstructions of all attacks, or of one."""
        attacks = self.attacks if attack is None else [attack]
        truth, row = self._truth(round, client, example)
        return Card(
            round=round,
            client=client,
            example=example,
            image=row,
            why=why,
            truth=None if truth is None or self.kind == "text" else png(truth[0], SMALL),
            label=None if truth is None else truth[1],
            label_name=self.label_name(truth[1]) if truth and truth[1] is not None else "",
            tiles=tuple(self._tile(a, round, client, example) for a in attacks if (round, a) in self.cells),
            truth_words=tuple(self.modality.words(truth[0]))
            if truth and self.modality and self.kind == "text"
            else None,
            headings=self.modality.headings() if self.modality else (),
            absent="" if truth is not None else NO_TRUTH if self.reading.ledger.deployed else NOT_HERE,
        )

    def _truth(self, round: int, client: int, example: int) -> tuple[tuple[Tensor, int | None] | None, int | None]:
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
        outcomes = self.outcomes(round, attack)
        fallback = (math.nan, "not attacked")
        value, status = outcomes.get((client, example)) or outcomes.get((client, WHOLE_BATCH)) or fallback
        shown, exact, main = formatting.rounded(value), formatting.is_exact(value), self.reading.scores.measure
        if math.isnan(value) and status != UNGRADED:
            return Tile(attack, None, shown, exact, formatting.status_words(status))
        note = self._ungraded(round, client, attack) if math.isnan(value) else formatting.in_unit(value, main)
        tensors = reconstruction(self.reading.run, round, client, attack)
        if isinstance(tensors, str):
            return Tile(attack, None, shown, exact, f"file {tensors}; {note}")
        # the file may hold sentences, which no score row shows here, or fewer images than the client claims to have
        x = tensors.get("x")
        if x is None or not (self.modality or self.reading.scores.modality).holds(x) or example >= len(x):
            return Tile(attack, None, shown, exact, note if status == UNGRADED else f"file damaged; {note}")
        label = self._label(tensors.get("y"), round, client, example, attack)
        traced = "trace_x" in tensors
        if self.kind == "image":
            return Tile(attack, png(x[example], SMALL), shown, exact, note, label, traced)
        truth, _ = self._truth(round, client, example)
        written = self.modality.marked(x[example], truth[0] if truth else None) if self.modality else None
        return Tile(attack, None, shown, exact, note, label, traced, written)

    def _ungraded(self, round: int, client: int, attack: str) -> str:
        objective = self.reading.objectives.get((round, client, attack))
        return NOT_GRADED if objective is None else f"{NOT_GRADED}, objective {objective:.3g}"

    def _label(self, y: Tensor | None, round: int, client: int, example: int, attack: str) -> str:
        if y is None or y.dim() != 1 or not (self._labelled or self.reading.ledger.deployed):
            return ""
        if example >= len(y):
            return ""
        guess = int(y[example])
        if attack in self.given:
            return f"{self.label_name(guess)}, given"
        truth, _ = self._truth(round, client, example)
        right = "" if truth is None else " ✓" if truth[1] == guess else " ✗"
        return f"{self.label_name(guess)}{right}"


def worst_cases(gallery: Gallery, count: int) -> list[dict[str, Any]]:
    """The private examples that came back best, each once and as the attack that brought it back best; none without a value."""
    everything = gallery.reading.view(("attacked", None), gallery.attacked)
    main = gallery.reading.scores.measure
    best = gallery._sorted(everything.where(~np.isnan(everything.strength)), "leak")
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    for round, client, example in best:
        rows = gallery.rows_at(round, client)
        key = (client, rows[example]) if example < len(rows) else (round, client, example)
        if key not in found:
            card = asdict(gallery.card(round, client, example))
            tiles = [tile for tile in card["tiles"] if tile["exact"] or tile["value"] is not None]
            tile = main.leakiest(tiles, lambda tile: math.inf if tile["exact"] else tile["value"])
            found[key] = {**card, "tiles": [tile]}
        if len(found) == count:
            break
    return list(found.values())


def through_rounds(gallery: Gallery, client: int, image: int) -> dict[str, Any] | None:
    """One private image in every round in which it was attacked; None if it never was."""
    everything = gallery.reading.view(("attacked", None), gallery.attacked)
    own = [key for key in everything.where(everything.client == client) if key[2] < len(gallery.rows_at(*key[:2]))]
    same = [key for key in own if gallery.rows_at(*key[:2])[key[2]] == image]
    if not same or gallery.shards is None or gallery.kind == "text":
        return None
    dataset = gallery.shards.dataset
    return {
        "image": image,
        "client": client,
        "truth": png(dataset.x[image]),
        "label": int(dataset.y[image]),
        "label_name": gallery.label_name(int(dataset.y[image])),
        "rounds": [asdict(gallery.card(*key)) for key in same],
    }


def trace(gallery: Gallery, round: int, client: int, example: int, attack: str) -> Mapping[str, Any] | str:
    """An attack's objective and image over its iterations, or why there are none."""
    tensors = reconstruction(gallery.reading.run, round, client, attack)
    if isinstance(tensors, str):
        return f"the reconstruction's file is {tensors}"
    if "trace_x" not in tensors:
        return "the attack's iterations were not kept: set trace = 12 in the [[attack]] table"
    if example >= tensors["trace_x"].shape[1]:
        return f"there is no example {example}"
    truth, _ = gallery._truth(round, client, example)
    return {
        "iterations": tensors["trace_iteration"].tolist(),
        "objective": [formatting.rounded(v) for v in tensors["trace_objective"].tolist()],
        "images": [png(x) for x in tensors["trace_x"][:, example]],
        "truth": None if truth is None else png(truth[0]),
    }
