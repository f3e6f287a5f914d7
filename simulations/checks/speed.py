"""Measure how many updates an hour an attack worker searches here, and what holds it back."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from fedgauge.attacks.engine.devices import compute_on
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import PublicSource
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.attack_trial import FEW, untried
from fedgauge.simulations.checks.check_result import CheckResult, attempt

ENOUGH = 1.0  # seconds that tell an iteration's time from noise
CALLS = 0.7  # of the time for one update, up to which each update of a wave costs so little that calls take the time


def speeds(scenario: Scenario) -> Iterator[CheckResult]:
    """Time every planned attack that searches, on the first of the scenario's devices, for one update and for a wave."""
    device, fed = scenario.audit.devices_here()[0], scenario.federation
    torch.set_num_threads(1)  # as a worker
    compute_on(device, scenario.audit.precision, deterministic=False)
    auditor = Auditor(PublicSource(fed), scenario.plan.seed, device, few=FEW)
    for planned in scenario.plan.attacks:
        if planned.role == "attack" and planned.budget.iterations > 1 and not untried(planned):
            yield attempt(f"speed of {planned.name}", partial(_speed, scenario, auditor, planned, device), needed=False)


def _speed(scenario: Scenario, auditor: Auditor, planned: PlannedAttack, device: torch.device) -> str:
    wave, work = scenario.plan.wave, planned.budget.iterations * planned.budget.restarts
    one, together = (_iteration(scenario, auditor, planned, count) for count in (1, wave))
    if together * work < ENOUGH:
        return f"under a second for {wave} updates"
    rate = 3600 * wave / (together * work)
    words = f"{rate:,.0f} updates an hour by a worker on {device}, {wave} at once ({work:,} iterations each)"
    if together < CALLS * one * wave:
        return f"{words}; one alone takes {one / together:.0%} of the time of {wave}: a larger [audit] wave is faster"
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
