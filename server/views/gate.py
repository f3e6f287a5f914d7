"""The gate: compare measurements of a run with thresholds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

from fedgauge.attacks.modality.base import Modality
from fedgauge.attacks.modality.membership import MEMBERSHIP, QUESTIONS
from fedgauge.attacks.modality.registry import MEASURED, further_leaks
from fedgauge.client.components import SpecError
from fedgauge.server.views.formatting import number
from fedgauge.server.views.membership import why_not_tested
from fedgauge.server.views.notices import audit_command
from fedgauge.server.views.privacy import bound_of, spent_in
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.strength import best_of
from fedgauge.server.views.verdict import Kind, doubts

Outcome = Literal["passed", "failed", "not measured", "incomplete"]
EPSILON = "epsilon"  # of one record, the largest of any client
CANARIES = "canary_epsilon"  # the lower bound that canary examples show
WORST = "worst."  # prefix: of the example with the most leakage


@dataclass(frozen=True)
class Threshold:
    """Bound on a metric; above: False if low values leak."""

    metric: str
    bound: float
    above: bool = True

    def __str__(self) -> str:
        return f"{self.metric} {'above' if self.above else 'below'} {self.bound:g}"


@dataclass(frozen=True)
class GateResult:
    """A threshold with the measurement of its metric.

    Args:
        value: None: not measured.
        words: how it was measured, or why it was not.
        conclusive: False if a value within the threshold proves nothing, for the reason in words.
        complete: if every selected update was attacked.
    """

    threshold: Threshold
    value: float | None
    words: str
    conclusive: bool = True
    complete: bool = True

    @property
    def outcome(self) -> Outcome:
        """Result: failed beyond the threshold; within it passed only if the value is conclusive."""
        bound, value = self.threshold.bound, math.nan if self.value is None else self.value
        if value > bound if self.threshold.above else value < bound:
            return "failed"
        if not self.complete:
            return "incomplete"
        return "not measured" if math.isnan(value) or not self.conclusive else "passed"

    def __str__(self) -> str:
        shown = "" if self.value is None else f"{number(self.value, None)}, "
        return f"{self.threshold.metric}: {shown}{self.words}"


def gate_metrics(*modalities: type[Modality]) -> list[str]:
    leaks, measured = further_leaks(), dict.fromkeys(name for each in modalities for name in each.measured)
    own = [*measured, *MEMBERSHIP, *leaks, EPSILON, CANARIES]
    return [*own, *(WORST + name for name in (*measured, *leaks) if not MEASURED[name].rate)]


def check_thresholds(thresholds: Sequence[Threshold], *modalities: type[Modality]) -> None:
    """Check the metrics and directions of thresholds.

    Args:
        modalities: kinds that the data may be of.

    Raises:
        SpecError: a metric is unknown for these kinds of data, leaks in the other direction, or is never beyond the bound.
    """
    known = gate_metrics(*modalities)
    for threshold in thresholds:
        if threshold.metric not in known:
            near = get_close_matches(threshold.metric, known)
            words = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known)}"
            raise SpecError(f"unknown metric {threshold.metric!r} for a gate; {words}")
        measured = MEASURED.get(threshold.metric.removeprefix(WORST))
        above = measured is None or measured.higher_is_better
        if above != threshold.above:
            right, wrong, which = ("above", "below", "higher") if above else ("below", "above", "lower")
            remedy = f"write --fail-{right} {threshold.metric}={threshold.bound:g}, not --fail-{wrong}"
            raise SpecError(f"a {which} {threshold.metric} is the worse leak: {remedy}")
        ends = measured and (measured.cap is None or threshold.metric in MEASURED)  # the worst value is not capped
        end = 0.0 if not above else measured.complete if measured and ends else math.inf
        if not (threshold.bound < end if above else threshold.bound > end):
            raise SpecError(f"a gate {threshold} could never fail, as values end at {end:g}: choose another")


def gate_of_run(reading: RunSnapshot, thresholds: Sequence[Threshold]) -> list[GateResult]:
    """Compare a run with thresholds.

    A value is the mean of the strongest attack over all rounds; with `worst.` that of the example with the most leakage.
    """
    check_thresholds(thresholds, reading.scores.modality)
    results = []
    for threshold in thresholds:
        metric = threshold.metric
        found = GateResult(threshold, *_measured(reading, metric))
        of_examples = metric.removeprefix(WORST) in reading.scores.modality.measured
        kind: Kind = "epsilon" if metric == EPSILON else "examples" if of_examples else "members"
        if (why := doubts(reading, kind)) and found.outcome != "failed":
            why = why if found.value is None else f"a value within the threshold proves nothing: {why}"
            complete = kind == "epsilon" or not reading.plan_coverage.words
            found = replace(found, words=f"{found.words}; {why}", conclusive=False, complete=complete)
        results.append(replace(found, words=found.words.replace("fedgauge audit RUN", audit_command(reading))))
    return results


def _measured(reading: RunSnapshot, metric: str) -> tuple[float | None, str]:
    """Return the value of a metric, and how it was measured; without a value the reason."""
    if metric == EPSILON:
        spent = spent_in(reading)
        return spent.record, spent.words
    if metric == CANARIES:
        if (shown := bound_of(reading)) is None:
            return None, "no canary examples were measured ([canaries] examples)"
        return shown.bound.epsilon, f"shown by {shown.canaries} canaries (a lower bound of 95 % confidence)"
    name = metric.removeprefix(WORST)
    leaks = [k for k in reading.pooled(name).values() if k.role == "attack"] if name in reading.metrics else []
    lost = [f"{k.without_value} of {k.n + sum(k.failed.values())} by {k.attack}" for k in leaks if k.failed]
    leak, missing = best_of(leaks, "attack"), f"; without a value: {', '.join(lost)}" if lost else ""
    if leak is None and metric in QUESTIONS:
        return None, f"it was not tested: {why_not_tested(reading.ledger, metric)}{missing}"
    if leak is None:
        return None, f"no attack of this run has a value of {name}{missing}"
    worst = MEASURED[name].leakiest((k for k in leaks if k.best is not None), lambda k: k.best or 0.0)
    if metric.startswith(WORST) and worst is not None:
        return worst.best, f"the worst of {worst.n} examples, by {worst.attack}{missing}"
    within = ""
    if leak.interval is not None:
        low, high = (number(end, MEASURED[name].digits) for end in leak.interval)
        within = f" (95 % interval {low} to {high}; the threshold is the mean's)"
    what = f"the area under the ROC curve over {leak.n} members" if metric in QUESTIONS else f"the mean of {leak.n}"
    return leak.mean, f"{what} by {leak.attack}{within}{missing}"
