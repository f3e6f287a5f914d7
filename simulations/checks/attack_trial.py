"""A trial of every planned attack: a few iterations on what the server would see of a stand-in, timed for an estimate.

No client's data is touched: a stand-in's examples are auxiliary ones. What learns a network first is not tried, and what learns
in closed form learns from a few examples here.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from fedgauge.attacks.base import Reconstruction
from fedgauge.attacks.engine.batch_limiter import SHARE, host_memory, peak_bytes
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.modality.images import DECODERS
from fedgauge.attacks.plan import ATTACK, PlannedAttack
from fedgauge.client.update import Batch
from fedgauge.server.store.expected_jobs import expected_updates
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.check_result import CheckFailed, CheckResult, attempt
from fedgauge.simulations.checks.remedies import remedy, sentence
from fedgauge.simulations.checks.stand_ins import StandIns

ITERATIONS = (
    3  # that are timed, or ten times as many where they take less than SHORT seconds: a busy machine has pauses
)
SHORT = 0.3
FEW = 64  # auxiliary examples from which an attack learns in a trial
SECONDS = 10.0  # of a trial, for attacks that watch the clock
NONE_APPLIES = (
    "no attack applies to the first round's updates, so nothing would be known of what they leak: let fedgauge choose "
    "([audit] effort), or name others (fedgauge list attack)"
)
MEGABYTE, GIGABYTE = 2**20, 2**30


@dataclass(frozen=True)
class Cost:
    """What a trial lets one expect of one observation of the real audit.

    Args:
        seconds: of all restarts and iterations; bytes: at the peak, of one restart.
    """

    seconds: float
    bytes: int


def try_attacks(scenario: Scenario) -> Iterator[CheckResult]:
    """Try every planned attack, and estimate time and memory of the whole audit."""
    if not scenario.audit.curious or not (planned := real(scenario)):
        return
    trial = StandInTrial.of(scenario)
    costs: dict[str, Cost] = {}
    results = []
    for attack in planned:
        if reason := untried(attack):
            results.append(CheckResult(f"attack {attack.name}", None, False, f"not tried: {reason}"))
        else:
            results.append(trial.result(attack, partial(trial.measured, attack, costs)))
        yield results[-1]
    if all(result.works is False and not result.needed for result in results):
        yield CheckResult("the whole plan", False, False, NONE_APPLIES)
    if costs:
        yield attempt("audit, estimated", partial(_estimate, scenario, costs))


def real(scenario: Scenario) -> list[PlannedAttack]:
    """The attacks of a plan that are neither baselines nor limits."""
    return [p for p in scenario.plan.attacks if not p.is_baseline and not p.is_limit]


def untried(attack: PlannedAttack) -> str:
    """Why an attack cannot be tried in seconds; empty if it can."""
    use = str(attack.table["use"])
    if attack.tells_members:
        return "it scores candidates, of which a stand-in has none"
    if use in {entry.name for entry in ATTACK.entries() if entry.group == DECODERS}:
        return "it reads the answer to a malicious server's weights, which none has sent yet"
    if attack.build().trains_first:
        return "it trains or loads a network first"
    return ""


class NotApplicable(Exception):
    """An attack says that it cannot work on these updates, and why."""


class _TrialAuditor(Auditor):
    """Attacks learn from a few examples."""

    def auxiliary_of(self, planned: PlannedAttack) -> Batch:
        return Batch(*(t[:FEW] for t in super().auxiliary_of(planned)))


@dataclass(frozen=True, eq=False)
class StandInTrial:
    """One stand-in's update, which the attacks of a plan are tried on."""

    scenario: Scenario
    auditor: Auditor
    stand_ins: StandIns

    @classmethod
    def of(cls, scenario: Scenario) -> "StandInTrial":
        auditor = _TrialAuditor(scenario.federation, scenario.plan.seed)
        return cls(scenario, auditor, StandIns(scenario.federation, 1))

    def result(self, planned: PlannedAttack, tried: Callable[[], str]) -> CheckResult:
        """The result of a trial under the attack's name; that it is not applicable is a note."""
        name = f"attack {planned.name}"
        try:
            return CheckResult(name, True, True, tried())
        except NotApplicable as words:
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
        stand_ins = self.stand_ins
        short = replace(planned, budget=replace(planned.budget, iterations=iterations, restarts=1, seconds=SECONDS))
        ((found, _),) = self.auditor.attack(
            short, stand_ins.wave, stand_ins.members, lambda client, round: stand_ins.batches[client]
        )
        return found

    def once(self, planned: PlannedAttack) -> str:
        """One iteration; raises what the attack raises, or NotApplicable."""
        found = self.run(planned, 1)
        if found.status == "not_applicable" and planned.budget.iterations > 1:
            found = self.run(planned, planned.budget.iterations)  # some share their iterations among several searches
        if found.status == "not_applicable":
            raise NotApplicable(found.reason)
        return "works"

    def measured(self, planned: PlannedAttack, costs: dict[str, Cost]) -> str:
        """A trial with its time and memory, which are left in costs."""
        device = next(iter(self.stand_ins.wave.params.values())).device
        words: list[str] = []
        peak = peak_bytes(lambda: words.append(self.once(planned)), device)
        count = ITERATIONS
        (first, _), (all_, found) = self._timed(planned, 1), self._timed(planned, 1 + count)
        if found.iterations > 0 and found.status != "diverged" and all_ - first < SHORT:
            count *= 10
            all_, found = self._timed(planned, 1 + count)
        if found.status == "diverged":
            raise CheckFailed(
                f"it diverges in its first {1 + count} iterations: {found.reason}; check the scale of data and weights"
            )
        budget = planned.budget
        each = max(all_ - first, 0.0) / count
        searched = found.iterations > 0
        seconds = budget.restarts * (first + (budget.iterations - 1) * each) if searched else all_
        costs[planned.name] = Cost(seconds, peak)
        free = host_memory() if device.type == "cpu" else None
        if free is not None and peak > free:
            raise CheckFailed(
                f"one search needs about {_size(peak)}, and {_size(free)} are free: take a smaller network or batch"
            )
        pace = f"{1000 * each:.3g} ms an iteration, " if searched else ""
        return f"{words[-1]}; {pace}{_duration(seconds)} an update, {_size(peak)}"

    def _timed(self, planned: PlannedAttack, iterations: int) -> tuple[float, Reconstruction]:
        started = time.perf_counter()
        found = self.run(planned, iterations)
        return time.perf_counter() - started, found


def _estimate(scenario: Scenario, costs: dict[str, Cost]) -> str:
    """Time and memory of the whole audit, from the trials of single searches."""
    plan, workers = scenario.plan, scenario.audit.workers
    kinds, first = expected_updates(scenario, range(1, scenario.protocol.rounds + 1)), real(scenario)[0].name
    observed = [(n, by_attack[first]) for n, by_attack in kinds]
    updates, waves = (
        sum(n * each for n, each in of) for of in (observed, [(n, -(-c // plan.wave)) for n, c in observed])
    )
    together = min(plan.wave, max(count for _, count in observed))
    seconds, most = 0.0, 0
    for planned in real(scenario):
        if planned.name in costs:
            cost = costs[planned.name]
            whole = updates * cost.seconds
            seconds += whole if planned.budget.seconds is None else min(whole, waves * planned.budget.seconds)
            most = max(most, together * planned.budget.restarts * cost.bytes)
    free = host_memory()
    granted = most if free is None else min(most, max(int(SHARE * free), max(c.bytes for c in costs.values())))
    untimed = [p.name for p in real(scenario) if p.name not in costs]
    beside = f"; {', '.join(untimed)} not counted" if untimed else ""
    has = "" if free is None else f" of {_size(free)} free"
    return (
        f"about {_duration(seconds / workers)} of attacks on {updates} updates by {workers} worker{'s' if workers > 1 else ''}, "
        f"{_size(workers * granted)}{has}, beside the training (an estimate: single searches, this machine as busy as now){beside}"
    )


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.0995 else f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(bytes: int) -> str:
    return f"{bytes / GIGABYTE:.1f} GB" if bytes >= GIGABYTE else f"{max(bytes / MEGABYTE, 1):.0f} MB"
