"""What figures show of one run: its scores, as the views give them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedgauge.server.store.run import Run
from fedgauge.server.views.compare import tradeoff
from fedgauge.server.views.formatting import interval_label
from fedgauge.server.views.gallery import Card, Gallery
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.privacy import canaries
from fedgauge.server.views.reading import Reading, read_once
from fedgauge.server.views.roles import Role, attack_order, is_attack, is_baseline, role_of
from fedgauge.server.views.scores import Scores, known_metrics
from fedgauge.server.views.strength import Tradeoff
from fedgauge.server.views.success import success_curve
from fedgauge.simulations.reports.certificates import certified, mechanism_of
from fedgauge.simulations.reports.figures.style import LineStyle, line_styles
from fedgauge.simulations.reports.sampling import sample_examples

EXAMPLES = 6  # in the gallery


@dataclass(frozen=True, eq=False)
class RunResults:
    """The data of one run that figures show."""

    run: Run
    scores: Scores
    kind: Literal["image", "text"]  # how examples are shown
    order: Sequence[str]
    line_styles: Mapping[str, LineStyle]
    leaks: Mapping[str, Sequence[Leak]]  # by metric
    curve: Mapping[str, Sequence[Rate]]
    accuracy: Mapping[int, float]
    tradeoffs: Mapping[str, Tradeoff]  # by metric
    certified: Sequence[float] | None
    canaries: Mapping[str, Any]  # what they show, by round
    cards: Sequence[Card] = field(repr=False)
    knowledge: str

    @classmethod
    def read(cls, run: Run) -> "RunResults":
        with read_once(run) as reading:
            gallery, scores = Gallery(reading), reading.scores
            order = attack_order(reading.ledger, {*scores.attacks, *(row["name"] for row in reading.attacks)})
            curve = success_curve(scores, reading.ledger)
            mechanism = mechanism_of(reading)
            return cls(
                run=run,
                scores=scores,
                kind=gallery.kind,
                order=order,
                line_styles=line_styles(order),
                leaks={m: reading.leaks(m) for m in known_metrics(scores)},
                curve=curve,
                accuracy={n: row["accuracy"] for n, row in reading.rounds.items() if row["accuracy"] is not None},
                tradeoffs={m: tradeoff(reading, m) for m in known_metrics(scores)},
                certified=certified(curve, mechanism) if mechanism and curve else None,
                canaries=canaries(reading),
                cards=_sampled_cards(gallery),
                knowledge=_knowledge(reading),
            )

    @property
    def attacks(self) -> list[str]:
        """The real attacks, in the plan's order."""
        return [a for a in self.order if is_attack(a)]


def _sampled_cards(gallery: Gallery) -> list[Card]:
    """The cards for the gallery: those whose true example is on this machine."""
    cards = (card for some in sample_examples(gallery, EXAMPLES).cards(gallery).values() for card in some)
    return [card for card in cards if card.truth is not None or card.truth_words is not None]


def _knowledge(reading: Reading) -> str:
    """What each attacker knew, which every figure must state."""
    real = [row for row in reading.attacks if not is_baseline(row["name"])]
    return ". ".join(f"{row['name']}: {row['knowledge']}" for row in real)


@dataclass(frozen=True)
class LeakPoint:
    """What is drawn of a Leak: its mean, its 95 % interval, and an attack's worst case (capped; a rate has none)."""

    attack: str
    round: int  # 0: all rounds
    mean: float
    worst: float | None
    band: tuple[float, float] | None
    clusters: int

    @property
    def kind(self) -> Role:
        """The role of the attack: attack, baseline or limit."""
        return role_of(self.attack)


def leak_points(leaks: Sequence[Leak]) -> list[LeakPoint]:
    """The points of all leaks that have a value."""
    return [
        LeakPoint(k.attack, k.round or 0, k.mean, k.worst, _interval_of(k), k.clusters)
        for k in leaks
        if k.mean is not None
    ]


def _interval_of(leak: Leak) -> tuple[float, float] | None:
    low, high = interval_label(leak)
    return None if low is None or high is None else (low, high)
