"""Try every planned attack for one iteration, on an update computed from auxiliary examples; time those that search.

Attacks that first train a network are not tried; those that learn in closed form learn from a few examples here.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from fedgauge.attacks.base import Reconstruction
from fedgauge.attacks.engine.devices import compute_on
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.modality.images import DECODERS
from fedgauge.attacks.plan import ATTACK, PlannedAttack
from fedgauge.attacks.problem import Problem
from fedgauge.attacks.source import PublicSource
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.check_result import CheckResult, Found, attempt, problem_of

FEW = 64  # auxiliary examples from which an attack learns in a trial
SECONDS = 10.0  # of a trial, for attacks that watch the clock
PATIENCE = 10.0  # seconds for all trials before a run
NOT_APPLICABLE = "not applicable"
PLAN = "the whole plan"
ENOUGH = 1.0  # seconds that tell an iteration's time from noise
CALLS = 0.7  # of the time for one update, up to which each update of a wave costs so little that calls take the time


def check_attacks(scenario: Scenario, patience: float = math.inf) -> Iterator[CheckResult]:
    """Try every planned attack once; those left after `patience` seconds are not checked."""
    planned = [p for p in scenario.plan.attacks if p.role == "attack"]
    if not scenario.audit.curious or not planned:
        return
    source, began, results = PublicSource(scenario.federation), time.perf_counter(), list[CheckResult]()
    auditor = Auditor(source, scenario.plan.seed, few=FEW)
    for attack in planned:
        reason = _untried(attack) or ("no time is left" if time.perf_counter() - began > patience else "")
        name = f"attack {attack.name}"
        if reason:
            results.append(CheckResult(name, None, False, reason))
        else:
            found = attempt(name, partial(_once, auditor, source, attack))
            results.append(replace(found, needed=found.code != NOT_APPLICABLE))
        yield results[-1]
    reasons = "; ".join(f"{r.name.removeprefix('attack ')}: {r.message}" for r in results)
    if all(r.works is False and r.needed for r in results):
        yield CheckResult(PLAN, False, True, Problem("fails", "", f"none of its attacks works: {reasons}"), stops=True)
    elif all(r.code == NOT_APPLICABLE for r in results):
        remedy = "let fedgauge choose ([audit] effort), or name others (fedgauge list attack)"
        why = f"no attack applies to the first round's updates ({reasons})"
        yield CheckResult(PLAN, False, False, Problem(NOT_APPLICABLE, "", why, remedy))


def _untried(attack: PlannedAttack) -> str:
    """Return the reason why an attack cannot be tried in seconds; empty if it can."""
    if attack.metric:
        return "it is graded by the clients' own batches"
    if str(attack.table["use"]) in {entry.name for entry in ATTACK.entries() if entry.group == DECODERS}:
        return "it reads the answer to a malicious server's weights, which none has sent yet"
    return "it trains or loads a network first" if attack.build().trains_first else ""


def _once(auditor: Auditor, source: PublicSource, planned: PlannedAttack) -> Found:
    """Attack the update for one iteration from one start."""
    given = [t for part in (source.all.params, source.all.update) for t in part.values()]
    before = [t.clone() for t in given]

    def run(iterations: int) -> Reconstruction:
        short = replace(planned, budget=replace(planned.budget, iterations=iterations, restarts=1, seconds=SECONDS))
        ((found, _),) = auditor.attack(short, source.all, source.members)
        return found

    try:
        result = run(1)
        if result.status == "not_applicable" and planned.budget.iterations > 1:
            result = run(planned.budget.iterations)  # some share their iterations among searches
    except Exception as error:  # plug-ins, and what a user's model or link makes of an attack, may raise anything
        return problem_of(error, "fails", "leave the attack out, as the audit would report this of every update")
    if not all(torch.allclose(now, was, 0, 0, equal_nan=True) for now, was in zip(given, before, strict=True)):
        remedy = "return new tensors (not t.mul_()), as other attacks read the same ones"
        return Problem("changes input", "it", "changes the update or the weights that it gets", remedy)
    return Problem(NOT_APPLICABLE, "", result.reason) if result.status == "not_applicable" else "works"


def speeds(scenario: Scenario) -> Iterator[CheckResult]:
    """Time every planned attack that searches, on the first of the scenario's devices, for one update and for a wave."""
    device, fed = scenario.audit.devices_here()[0], scenario.federation
    torch.set_num_threads(1)  # as a worker
    compute_on(device, scenario.audit.precision, deterministic=False)
    auditor = Auditor(PublicSource(fed), scenario.plan.seed, device, few=FEW)
    for planned in scenario.plan.attacks:
        if planned.role == "attack" and planned.budget.iterations > 1 and not _untried(planned):
            yield attempt(f"speed of {planned.name}", partial(_speed, scenario, auditor, planned, device), needed=False)


def _speed(scenario: Scenario, auditor: Auditor, planned: PlannedAttack, device: torch.device) -> str:
    wave, work = scenario.plan.wave, planned.budget.iterations * planned.budget.restarts
    one, together = (_iteration(scenario, auditor, planned, count) for count in (1, wave))
    if together * work < ENOUGH:
        return f"under a second for {wave} updates"
    rate = 3600 * wave / (together * work)
    words = f"{rate:,.0f} updates an hour by a worker on {device}, {wave} at once ({work:,} iterations each)"
    if together < CALLS * one * wave:
        return f"{words}; a single one takes {one / together:.0%} of the time of {wave}: raise [audit] wave"
    return f"{words}; arithmetic takes the time: a larger [audit] wave changes little"


def _iteration(scenario: Scenario, auditor: Auditor, planned: PlannedAttack, count: int) -> float:
    """Seconds of one iteration on some updates together: the difference of two runs, without what is done once."""
    source = PublicSource(scenario.federation, count=count)

    def seconds(iterations: int) -> float:
        short = replace(planned, budget=replace(planned.budget, iterations=iterations, restarts=1, seconds=None))
        began = time.perf_counter()
        auditor.attack(short, source.all, source.members)
        return time.perf_counter() - began

    seconds(1)  # libraries choose their algorithms
    few = 2
    while (spent := seconds(3 * few) - seconds(few)) < ENOUGH and few < planned.budget.iterations:
        few *= 2
    return max(spent, 0.0) / (2 * few)
