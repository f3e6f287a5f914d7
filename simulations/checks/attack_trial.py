"""A trial of every planned attack: an iteration on what the server would see of a stand-in, timed for an estimate.

No client's data is touched: a stand-in's examples are auxiliary ones. What learns a network first is not tried, and what learns
in closed form learns from a few examples here.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from fedgauge.attacks.base import Reconstruction
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.modality.images import DECODERS
from fedgauge.attacks.plan import ATTACK, PlannedAttack
from fedgauge.attacks.problem import Problem
from fedgauge.attacks.source import PublicSource
from fedgauge.server.store.scenario import Scenario, expected_updates
from fedgauge.simulations.checks.check_result import CheckResult, Found, attempt, problem_of

ITERATIONS = 10  # that are timed
FEW = 64  # auxiliary examples from which an attack learns in a trial
SECONDS = 10.0  # of a trial, for attacks that watch the clock
PATIENCE = 10.0  # seconds for all trials before a run
NOT_APPLICABLE = "not applicable"
PLAN = "the whole plan"


def check_attacks(scenario: Scenario, patience: float = math.inf, timed: bool = True) -> Iterator[CheckResult]:
    """Try every planned attack once; those left when the patience (seconds) is over are not checked.

    Args:
        timed: several times, to estimate the time of the whole audit.
    """
    if not scenario.audit.curious or not (planned := _searches(scenario)):
        return
    trial, began, results = _Trial(scenario), time.perf_counter(), list[CheckResult]()
    for attack in planned:
        reason = _untried(attack) or ("no time is left" if time.perf_counter() - began > patience else "")
        name = f"attack {attack.name}"
        if reason:
            results.append(CheckResult(name, None, False, f"not tried: {reason}"))
        else:
            found = attempt(name, partial(trial.measured if timed else trial.once, attack))
            results.append(replace(found, needed=found.code != NOT_APPLICABLE))
        yield results[-1]
    reasons = "; ".join(f"{r.name.removeprefix('attack ')}: {r.message}" for r in results)
    if all(r.works is False and r.needed for r in results):
        yield CheckResult(PLAN, False, True, Problem("fails", "", f"none of its attacks works: {reasons}"), stops=True)
    elif all(r.code == NOT_APPLICABLE for r in results):
        remedy = "let fedgauge choose ([audit] effort), or name others (fedgauge list attack)"
        why = f"no attack applies to the first round's updates ({reasons})"
        yield CheckResult(PLAN, False, False, Problem(NOT_APPLICABLE, "", why, remedy))
    if trial.seconds:
        yield attempt("audit, estimated", partial(_estimate, scenario, trial.seconds))


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


class _Trial:
    """One stand-in's update, which the attacks of a plan are tried on.

    Attributes:
        seconds: by attack, its time for one observation of the real audit, as far as it was measured.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.source = PublicSource(scenario.federation)
        self.auditor = Auditor(self.source, scenario.plan.seed, few=FEW)
        self.seconds: dict[str, float] = {}

    def run(self, planned: PlannedAttack, iterations: int) -> Reconstruction:
        """Attack the stand-in's update for this many iterations, from one start."""
        short = replace(planned, budget=replace(planned.budget, iterations=iterations, restarts=1, seconds=SECONDS))
        ((found, _),) = self.auditor.attack(short, self.source.all, self.source.members)
        return found

    def once(self, planned: PlannedAttack) -> Found:
        """One iteration."""
        try:
            found = self.run(planned, 1)
            if found.status == "not_applicable" and planned.budget.iterations > 1:
                found = self.run(planned, planned.budget.iterations)  # some share their iterations among searches
        except Exception as error:  # plug-ins, and what a user's model or link makes of an attack, may raise anything
            return problem_of(error, "fails", "leave the attack out, as the audit would report this of every update")
        return Problem(NOT_APPLICABLE, "", found.reason) if found.status == "not_applicable" else "works"

    def measured(self, planned: PlannedAttack) -> Found:
        """A trial with its time for one observation of the real audit."""
        if isinstance(problem := self.once(planned), Problem):
            return problem
        (first, _), (all_, found) = self._timed(planned, 1), self._timed(planned, 1 + ITERATIONS)
        if found.status == "diverged":
            why = f"it diverges in its first {1 + ITERATIONS} iterations ({found.reason})"
            return Problem("diverges", "", why, "check the scale of data and weights")
        budget, each = planned.budget, max(all_ - first, 0.0) / ITERATIONS
        searched = found.iterations > 0
        whole = budget.restarts * (first + (budget.iterations - 1) * each) if searched else all_
        self.seconds[planned.name] = whole
        pace = f"{1000 * each:.3g} ms an iteration, " if searched else ""
        return f"works; {pace}{_duration(whole)} an update"

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
