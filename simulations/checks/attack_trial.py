"""A trial of every planned attack: an iteration on what the server would see of a stand-in, timed for an estimate.

No client's data is touched: a stand-in's examples are auxiliary ones. What learns a network first is not tried, and what learns
in closed form learns from a few examples here.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from fedgauge.attacks.base import Reconstruction
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.modality.images import DECODERS
from fedgauge.attacks.plan import ATTACK, PlannedAttack
from fedgauge.attacks.source import PublicSource
from fedgauge.server.store.expected_jobs import expected_updates
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.check_result import CheckFailed, CheckResult, attempt, require
from fedgauge.simulations.checks.remedies import remedy, sentence

ITERATIONS = 10  # that are timed
FEW = 64  # auxiliary examples from which an attack learns in a trial
SECONDS = 10.0  # of a trial, for attacks that watch the clock
PATIENCE = 10.0  # seconds for all trials before a run
NONE_APPLIES = (
    "no attack applies to the first round's updates, so nothing would be known of what they leak: let fedgauge choose "
    "([audit] effort), or name others (fedgauge list attack)"
)


def try_attacks(scenario: Scenario, patience: float = PATIENCE) -> Iterator[CheckResult]:
    """Try every planned attack once; those left when the patience (seconds) is over are not checked."""
    return _results(scenario, lambda trial, planned: trial.once(planned), patience)


def estimate_attacks(scenario: Scenario) -> Iterator[CheckResult]:
    """Try every planned attack, and estimate the time of the whole audit."""
    seconds: dict[str, float] = {}
    results = list(_results(scenario, lambda trial, planned: trial.measured(planned, seconds)))
    yield from results
    if results and all(result.works is False and not result.needed for result in results):
        yield CheckResult("the whole plan", False, False, NONE_APPLIES)
    if seconds:
        yield attempt("audit, estimated", partial(_estimate, scenario, seconds))


def _results(
    scenario: Scenario, tried: Callable[["_Trial", PlannedAttack], str], patience: float = math.inf
) -> Iterator[CheckResult]:
    if not scenario.audit.curious or not (planned := _searches(scenario)):
        return
    trial, began = _Trial(scenario), time.perf_counter()
    for attack in planned:
        reason = _untried(attack) or ("no time is left" if time.perf_counter() - began > patience else "")
        if reason:
            yield CheckResult(f"attack {attack.name}", None, False, f"not tried: {reason}")
        else:
            yield trial.result(attack, tried)


def _searches(scenario: Scenario) -> list[PlannedAttack]:
    """The attacks of a plan that are neither baselines nor limits."""
    return [p for p in scenario.plan.attacks if not p.is_baseline and not p.is_limit]


def _untried(attack: PlannedAttack) -> str:
    """Why an attack cannot be tried in seconds; empty if it can."""
    if attack.metric:
        return "it is graded by the clients' own batches"
    if str(attack.table["use"]) in {entry.name for entry in ATTACK.entries() if entry.group == DECODERS}:
        return "it reads the answer to a malicious server's weights, which none has sent yet"
    return "it trains or loads a network first" if attack.build().trains_first else ""


class _NotApplicable(Exception):
    """An attack says that it cannot work on these updates, and why."""


class _Trial:
    """One stand-in's update, which the attacks of a plan are tried on."""

    def __init__(self, scenario: Scenario) -> None:
        self.source = PublicSource(scenario.federation)
        self.auditor = Auditor(self.source, scenario.plan.seed, few=FEW)

    def result(self, planned: PlannedAttack, tried: Callable[["_Trial", PlannedAttack], str]) -> CheckResult:
        """The result of a trial under the attack's name; that it is not applicable is a note."""
        name = f"attack {planned.name}"
        try:
            return CheckResult(name, True, True, tried(self, planned))
        except _NotApplicable as words:
            return CheckResult(name, False, False, f"not applicable: {words}")
        except CheckFailed as words:
            return CheckResult(name, False, True, str(words))
        except Exception as error:  # plug-ins, and what a user's model or link makes of an attack, may raise anything
            change = remedy(
                error, "the whole error is what the audit would report of every update; leave the attack out"
            )
            return CheckResult(name, False, True, f"it fails: {sentence(error)}; {change}")

    def run(self, planned: PlannedAttack, iterations: int) -> Reconstruction:
        """Attack the stand-in's update for this many iterations, from one start."""
        short = replace(planned, budget=replace(planned.budget, iterations=iterations, restarts=1, seconds=SECONDS))
        ((found, _),) = self.auditor.attack(short, self.source.all, self.source.members)
        return found

    def once(self, planned: PlannedAttack) -> str:
        """One iteration; raises what the attack raises, or _NotApplicable."""
        found = self.run(planned, 1)
        if found.status == "not_applicable" and planned.budget.iterations > 1:
            found = self.run(planned, planned.budget.iterations)  # some share their iterations among several searches
        if found.status == "not_applicable":
            raise _NotApplicable(found.reason)
        return "works"

    def measured(self, planned: PlannedAttack, seconds: dict[str, float]) -> str:
        """A trial with its time for one observation of the real audit, which is left in seconds."""
        self.once(planned)
        (first, _), (all_, found) = self._timed(planned, 1), self._timed(planned, 1 + ITERATIONS)
        words = (
            f"it diverges in its first {1 + ITERATIONS} iterations: {found.reason}; check the scale of data and weights"
        )
        require(found.status != "diverged", words)
        budget, each = planned.budget, max(all_ - first, 0.0) / ITERATIONS
        searched = found.iterations > 0
        seconds[planned.name] = budget.restarts * (first + (budget.iterations - 1) * each) if searched else all_
        pace = f"{1000 * each:.3g} ms an iteration, " if searched else ""
        return f"works; {pace}{_duration(seconds[planned.name])} an update"

    def _timed(self, planned: PlannedAttack, iterations: int) -> tuple[float, Reconstruction]:
        started = time.perf_counter()
        found = self.run(planned, iterations)
        return time.perf_counter() - started, found


def _estimate(scenario: Scenario, seconds: Mapping[str, float]) -> str:
    """Time of the whole audit, from the trials of single searches."""
    plan, workers, planned = scenario.plan, scenario.audit.workers, _searches(scenario)
    kinds = expected_updates(scenario, range(1, scenario.protocol.rounds + 1))
    observed = [(n, by_attack[planned[0].name]) for n, by_attack in kinds]
    updates, waves = sum(n * each for n, each in observed), sum(n * -(-each // plan.wave) for n, each in observed)
    timed = [(updates * seconds[p.name], p.budget.seconds) for p in planned if p.name in seconds]
    whole = sum(each if limit is None else min(each, waves * limit) for each, limit in timed)
    untimed = ", ".join(p.name for p in planned if p.name not in seconds)
    return (
        f"about {_duration(whole / workers)} of attacks on {updates} updates by {workers} worker{'s' * (workers > 1)}, beside the "
        "training (an estimate from single searches)" + (f"; not counted: {untimed}" if untimed else "")
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
