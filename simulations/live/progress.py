"""State of a run at work, read from its ledger in increments."""

import time
from collections.abc import Callable
from math import inf

from fedgauge.attacks.modality.registry import modality_of
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.plan_coverage import PlanCoverage, plan_coverage
from fedgauge.server.views.reading import Jobs, Snapshot
from fedgauge.server.views.roles import is_attack

EVERY = 1.0  # seconds between two readings of the ledger
Clock = Callable[[], float]  # seconds since any moment


class RunProgress(Snapshot):
    """State of a run at the last reading.

    Args:
        training: if the run trains meanwhile.
        clock: for the time between two readings.

    Attributes:
        measure: the main metric.
        coming: if rounds are still to come.
        plan_coverage: planned and attacked updates; during training as of the newest round.
    """

    def __init__(
        self, ledger: Ledger, scenario: Scenario, training: bool = True, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(ledger, scenario.tables)
        self.scenario = scenario
        self.measure = modality_of(scenario.federation.shards.dataset).main
        self.training = self.coming = training
        self.attacks = list(ledger.planned())
        self.plan_coverage = PlanCoverage()
        self._covered: int | None = None  # round up to which updates are counted
        self._version: object = None
        self._clock = clock
        self._read_at = -inf

    def refresh(self, force: bool = False) -> bool:
        """Read changes, at most once a second unless forced; return True if there were any."""
        if not force and self._clock() - self._read_at < EVERY:
            return False
        self._read_at = self._clock()
        version = self.ledger.version()  # before reading, as writes go on
        if version == self._version:
            return False
        self._version = version
        with self.ledger.snapshot():
            self.read()
        return True

    def read(self) -> None:
        super().read()
        if not self.coming or self._covered != self.newest:
            self.plan_coverage = plan_coverage(self.ledger, self.tables, self.coming)
            self._covered = self.newest

    @property
    def leaks(self) -> list[Leak]:
        """Results of each name in each round; the attacks of a round come first."""
        found = [leak for leak in self.leakage(self.measure.metric) if leak.round is not None]
        return sorted(found, key=lambda leak: (leak.round or 0, not is_attack(leak.attack), leak.attack))

    @property
    def replay(self) -> tuple[str, str]:
        """Verdict and reason of the replay check; empty before it."""
        return self.meta.get("replay", ""), " ".join(self.meta.get("replay_detail", "").split())

    @property
    def round(self) -> int:
        """Newest finished round."""
        return max(self.rounds, default=0)

    @property
    def jobs(self) -> Jobs:
        """Jobs, with those of future rounds."""
        return self.jobs_of(self.scenario if self.coming else None)
