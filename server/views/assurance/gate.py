"""A gate: whether what was measured of a run, or estimated of a scenario, lies beyond a threshold that somebody set."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedgauge.attacks.modality.base import Modality
from fedgauge.attacks.modality.membership import MEMBERSHIP, QUESTIONS
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.client.components import SpecError
from fedgauge.server.views.formatting import in_unit, interval_label, number, plotted_value
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.membership import why_not_tested
from fedgauge.server.views.privacy import spent_in
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.strength import best_of
from fedgauge.server.views.verdict import Kind, doubts

Outcome = Literal["passed", "failed", "not measured", "incomplete"]
EPSILON = "epsilon"  # of one record, the largest of any client
WORST = "worst."  # prefix: of the example that leaks most
NO_PROOF = (
    "an estimate within the threshold proves nothing: measure it with fedgauge run, then fedgauge gate, or accept it with "
    "--accept-estimates"
)


@dataclass(frozen=True)
class Threshold:
    """A value of a metric beyond which the gate fails; above: or below, where a lower value is the worse leak."""

    metric: str
    bound: float
    above: bool = True

    def __str__(self) -> str:
        return f"{self.metric} {'above' if self.above else 'below'} {self.bound:g}"


@dataclass(frozen=True)
class Measurement:
    """What is known of one metric.

    Args:
        value: None if there is none.
        words: how it was measured, or why it was not.
        conclusive: whether a value within the threshold says that there is no more; why it does not stands in words.
        complete: whether every update that the plan selects was attacked.
        estimated: it rests on assumptions that an attacker may pass, so it is conclusive for those alone who accept estimates.
    """

    value: float | None
    words: str
    conclusive: bool = True
    complete: bool = True
    estimated: bool = False


@dataclass(frozen=True)
class GateResult:
    """One threshold with what was measured."""

    threshold: Threshold
    measurement: Measurement

    @property
    def outcome(self) -> Outcome:
        """Failed beyond the threshold; otherwise incomplete or not measured where the value is no proof."""
        bound = self.threshold.bound
        value = math.nan if self.measurement.value is None else self.measurement.value
        if value > bound if self.threshold.above else value < bound:
            return "failed"
        if not self.measurement.complete:
            return "incomplete"
        return "not measured" if math.isnan(value) or not self.measurement.conclusive else "passed"

    def __str__(self) -> str:
        value = self.measurement.value
        found = "" if value is None else f"{number(value, None)}, "
        return f"{self.threshold.metric}: {found}{self.measurement.words}"


def gate_metrics(modality: type[Modality]) -> list[str]:
    """Every metric that a gate may name for data of this kind."""
    own = [*modality.measured, *MEMBERSHIP, EPSILON]
    return [*own, *(WORST + name for name, measured in modality.measured.items() if not measured.rate)]


def check_thresholds(thresholds: Sequence[Threshold], modality: type[Modality]) -> None:
    """Refuse thresholds that no measurement could be compared with.

    Raises:
        SpecError: a metric is unknown for this kind of data, named twice, or leaks in the other direction.
    """
    known = gate_metrics(modality)
    for i, threshold in enumerate(thresholds):
        name = threshold.metric
        if name not in known:
            raise SpecError(f"unknown metric {name!r} for a gate (there are: {', '.join(known)})")
        if any(name == other.metric for other in thresholds[:i]):
            raise SpecError(f"the gate has two thresholds for {name}: leave one out")
        measured = MEASURED.get(name.removeprefix(WORST))
        higher = measured is None or measured.higher_is_better
        if higher != threshold.above:
            right, which = ("above", "higher") if higher else ("below", "lower")
            raise SpecError(
                f"a {which} {name} is the worse leak: write --fail-{right} {name}={threshold.bound:g}, not "
                f"--fail-{'above' if threshold.above else 'below'}"
            )


def judged(
    thresholds: Iterable[Threshold], measured: Mapping[str, Measurement], otherwise: str, estimates: bool = False
) -> list[GateResult]:
    """Each threshold with its measurement.

    Args:
        otherwise: why a metric that is not among `measured` was not measured.
        estimates: an estimate within its threshold passes, as somebody accepts it; the words say so.
    """
    found = [(t, measured.get(t.metric, Measurement(None, otherwise))) for t in thresholds]
    return [GateResult(t, _as_proof(m, estimates) if m.estimated else m) for t, m in found]


def _as_proof(found: Measurement, accepted: bool) -> Measurement:
    """What an estimate proves: nothing, unless somebody accepts it."""
    if accepted:
        return replace(found, words=f"{found.words}; accepted, though an estimate is no bound")
    return replace(found, words=f"{found.words}; {NO_PROOF}", conclusive=False)


def gate_of_run(reading: Reading, thresholds: Sequence[Threshold]) -> list[GateResult]:
    """Compare what a run's attacks reached with thresholds, each in the metric's own unit.

    A value is the mean of the attack that leaks most over all rounds, with `worst.` that of the example that leaks most.
    """
    check_thresholds(thresholds, reading.scores.modality)
    results = []
    for threshold in thresholds:
        found, metric = _measured(reading, threshold.metric), threshold.metric
        kind: Kind = "members" if metric == EPSILON or metric in MEMBERSHIP else "examples"
        never = "" if metric == EPSILON else reading.plan_coverage.words  # no attack measures epsilon
        if why := "; ".join(filter(None, (never, doubts(reading, kind)))):
            why = why if found.value is None else f"a value within the threshold proves nothing: {why}"
            found = Measurement(found.value, f"{found.words}; {why}", conclusive=False, complete=not never)
        results.append(GateResult(threshold, found))
    return results


def _measured(reading: Reading, metric: str) -> Measurement:
    if metric == EPSILON:
        spent = spent_in(reading)
        return Measurement(spent.record, spent.words)
    name = metric.removeprefix(WORST)
    leaks = [k for k in reading.pooled(name).values() if is_attack(k.attack)] if name in reading.metrics else []
    leak = best_of(leaks, "attack")
    missing = _lost(leaks)
    if leak is None or leak.mean is None:
        if metric in QUESTIONS:
            return Measurement(None, f"it was not tested: {why_not_tested(reading.ledger, metric)}{missing}")
        return Measurement(None, f"no attack of this run has a value of {name}{missing}")
    if metric.startswith(WORST):
        best = MEASURED[name].leakiest((k for k in leaks if k.best is not None), lambda k: k.best or 0.0)
        assert best is not None  # as there is a mean
        words = f"the worst of {best.n} examples, by {best.attack}{missing}"
        return Measurement(plotted_value(name, best.best), words)
    return Measurement(leak.mean, f"{_words(leak)}{missing}")


def _words(leak: Leak) -> str:
    low, high = interval_label(leak)
    measured = MEASURED[leak.metric]
    within = "" if low is None else f" (95 % interval {in_unit(low, measured)} to {in_unit(high, measured)})"
    if leak.metric in QUESTIONS:
        return f"the area under the ROC curve of {leak.attack} over {leak.n} members{within}"
    return f"the mean of {leak.n} by {leak.attack}{within}"


def _lost(leaks: Iterable[Leak]) -> str:
    """How many examples have no value, which no mean counts, and why; empty if each has one."""
    of_each = [
        f"{sum(k.failed.values())} of {k.n + sum(k.failed.values())} by {k.attack} ({', '.join(k.failed)})"
        for k in leaks
        if k.failed
    ]
    return f"; without a value: {', '.join(of_each)}" if of_each else ""
