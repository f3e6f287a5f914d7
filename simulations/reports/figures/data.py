"""What figures show of one run: its scores, as the views give them."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_connection import reads_again
from fedgauge.server.store.run import Run
from fedgauge.server.views.formatting import RATES
from fedgauge.server.views.gallery import Card, Gallery
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.leakage import Leak, as_rate, leakage
from fedgauge.server.views.reading import Reading, most_examples, tables_of
from fedgauge.server.views.roles import Role, attack_order, is_attack, is_baseline, role_of
from fedgauge.server.views.scores import Scores, capped, known_metrics
from fedgauge.server.views.success import success_curve
from fedgauge.simulations.reports.certificates import GaussianMechanism, certified, gaussian_mechanism
from fedgauge.simulations.reports.figures.style import LineStyle, line_styles
from fedgauge.simulations.reports.sampling import sample_examples

EXAMPLES = 6  # in the gallery


@dataclass(frozen=True, eq=False)
class RunResults:
    """The data of one run that figures show."""

    run: Run
    scores: Scores
    order: Sequence[str]
    line_styles: Mapping[str, LineStyle]
    leaks: Mapping[str, Sequence[Leak]]  # by metric
    curve: Mapping[str, Sequence[Rate]]
    accuracy: Mapping[int, float]
    certified: Sequence[float] | None
    cards: Sequence[Card] = field(repr=False)
    knowledge: str

    @classmethod
    def read(cls, run: Run) -> "RunResults":
        with run.ledger() as ledger:
            scores = Scores.read(ledger)
            planned = [row["name"] for row in ledger.attacks()]
            order = attack_order(ledger, {*scores.attacks, *planned})
            curve = success_curve(scores, ledger, most_examples(tables_of(run))) if len(scores) else {}
            mechanism = _mechanism(run)
            return cls(
                run=run,
                scores=scores,
                order=order,
                line_styles=line_styles(order),
                leaks={m: leakage(scores, m) for m in known_metrics(scores)},
                curve=curve,
                accuracy={r["round"]: r["accuracy"] for r in ledger.rounds() if r["accuracy"] is not None},
                certified=certified(curve, mechanism) if mechanism and curve else None,
                cards=_sampled_cards(run),
                knowledge=_knowledge(ledger),
            )

    @property
    def attacks(self) -> list[str]:
        """The real attacks, in the plan's order."""
        return [a for a in self.order if is_attack(a)]


def _mechanism(run: Run) -> GaussianMechanism | None:
    """The Gaussian mechanism of the run's chain; None if its data is not on this machine."""
    try:
        federation = run.scenario().federation
    except SpecError:
        return None
    return gaussian_mechanism(federation.chain, federation.shards.batch_size, federation.model)


@reads_again
def _sampled_cards(run: Run) -> list[Card]:
    """The cards for the gallery: those whose true example is on this machine."""
    with closing(Reading(run)) as reading, reading.now():
        gallery = Gallery(reading)
        cards_by_round = sample_examples(gallery, EXAMPLES).cards(gallery)
    return [
        card
        for cards in cards_by_round.values()
        for card in cards
        if card.truth is not None or card.truth_words is not None
    ]


def _knowledge(ledger: Ledger) -> str:
    """What each attacker knew, which every figure must state."""
    real = [row for row in ledger.attacks() if not is_baseline(row["name"])]
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
        LeakPoint(k.attack, k.round or 0, k.mean, _worst_case(k), _interval_of(k), k.clusters)
        for k in leaks
        if k.mean is not None
    ]


def _worst_case(leak: Leak) -> float | None:
    if leak.best is None or leak.metric in RATES or not is_attack(leak.attack):
        return None
    return float(capped(leak.metric, np.array(leak.best)))


def _interval_of(leak: Leak) -> tuple[float, float] | None:
    if leak.metric in RATES:
        return as_rate(leak).interval
    return None if leak.low is None or leak.high is None else (leak.low, leak.high)
