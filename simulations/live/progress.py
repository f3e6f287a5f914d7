"""The state of a run, read from its ledger incrementally, and only when the ledger has changed."""

import time
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from fedgauge.attacks.grading.scores import attack_of
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.outcomes import device_shares
from fedgauge.server.views.plan_coverage import PlanCoverage, plan_coverage
from fedgauge.server.views.reading import Jobs, LedgerReading, jobs_of
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.strength import best_of

EVERY = 1.0  # seconds between two readings of the ledger
Clock = Callable[[], float]  # seconds since any moment


class AttackProgress(NamedTuple):
    """The results of one attack in one round so far, and whether no job of it is left."""

    leak: Leak
    complete: bool


class RunProgress(LedgerReading):
    """The state of a run, as of the last reading.

    Args:
        training: whether the run trains meanwhile.
        clock: for elapsed time.

    Attributes:
        measure: the metric by which attacks are compared.
        coming: whether rounds are still to come.
        cells: by attack and round; baselines and limits among them.
        fresh: the keys of `cells` that the last reading changed.
        devices: how the attack service uses each.
        plan_coverage: planned against attacked updates; while the run trains, as of the newest round.
    """

    def __init__(
        self, ledger: Ledger, scenario: Scenario, training: bool = True, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(ledger, scenario.tables)
        self.scenario = scenario
        self.measure = modality_of(scenario.federation.shards.dataset).main
        self.training = self.coming = training
        planned = ledger.planned()
        self.attacks, self.reconstructing = list(planned), [name for name in planned if planned[name].reconstructs]
        self.fresh: list[tuple[str, int]] = []
        self.plan_coverage = PlanCoverage()
        self._covered: int | None = None  # round up to which updates are counted
        self._version: object = None
        self._clock = clock
        self._started = clock()
        self._read_at = -inf

    def forget(self) -> None:
        super().forget()
        self.cells: dict[tuple[str, int], AttackProgress] = {}

    def refresh(self, force: bool = False) -> bool:
        """Read what is new, at most once a second unless forced; returns whether anything was."""
        now = self._clock()
        if not force and now - self._read_at < EVERY:
            return False
        self._read_at = now
        version = self.ledger.version()  # before reading: whatever is written meanwhile gets another version
        if version == self._version:
            return False
        self._version = version
        with self.ledger.snapshot():
            self.read()
        return True

    def read(self) -> set[int]:
        waiting, known, touched = self._waiting(), self.cells, super().read()
        if not self.coming or self._covered != self.newest:
            self.plan_coverage = plan_coverage(self.ledger, self.tables, self.coming)
            self._covered = self.newest
        self.fresh = []
        for round in sorted(touched):
            for leak in sorted(self.snapshot.of_round(self.measure.metric, round), key=_attacks_first):
                cell = AttackProgress(leak, not waiting[attack_of(leak.attack), round])
                if cell != known.get((leak.attack, round)):
                    self.fresh.append((leak.attack, round))
                self.cells[leak.attack, round] = cell
        return touched

    @property
    def replay(self) -> tuple[str, str]:
        """The verdict of the replay check and its reason; empty before it."""
        return self.meta.get("replay", ""), " ".join(self.meta.get("replay_detail", "").split())

    def _waiting(self) -> Counter[tuple[str, int]]:
        """Jobs still to come by attack and round."""
        waiting: Counter[tuple[str, int]] = Counter()
        for row in self.ledger.unfinished():
            waiting[row["attack"], row["round"]] += row["jobs"]
        return waiting

    @property
    def round(self) -> int:
        """The newest finished round."""
        return max(self.rounds, default=0)

    def means(self, attack: str) -> dict[int, float]:
        """Mean of an attack by round."""
        return {r: c.leak.mean for (a, r), c in self.cells.items() if a == attack and c.leak.mean is not None}

    def worst_case(self, attack: str) -> float | None:
        """The value that leaks most of those that an attack has reached."""
        reached = (c.leak.best for (a, _), c in self.cells.items() if a == attack and c.leak.best is not None)
        return self.measure.leakiest(reached, float)

    def floor(self) -> dict[int, float]:
        """Mean of the best baseline by round."""
        found = {r: best_of(self.snapshot.of_round(self.measure.metric, r), "baseline") for _, r in self.cells}
        return {r: leak.mean for r, leak in found.items() if leak is not None and leak.mean is not None}

    @property
    def use(self) -> str:
        """The share of the time that each device has attacked; empty if there is the CPU alone."""
        return device_shares(self.devices)

    @property
    def jobs(self) -> Jobs:
        """The jobs, with those of rounds not yet trained."""
        return jobs_of(self, self.scenario if self.coming else None)

    def elapsed(self) -> float:
        """Seconds since this object was made."""
        return self._clock() - self._started


def _attacks_first(leak: Leak) -> tuple[bool, str]:
    return not is_attack(leak.attack), leak.attack
