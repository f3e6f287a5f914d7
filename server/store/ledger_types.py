"""What the ledger holds, as values: participations, leases, progress, score rows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fedgauge.attacks.plan import PlannedAttack

DEPLOYMENT = "deployment"  # the run's mode, if it is not a simulation
STARTED = (
    "flower_run_from_round_"  # prefix in the meta table: Flower's number for a deployment's training from that round on
)
EMPTY = "empty"  # key in the meta table: why a run that has all its rounds has failed, as no client gave any update
UNGRADED = "not_graded"  # status of a row that stands for a reconstruction which nobody has graded
_MOST_LETTERS = 300  # of a client's message

ScoreRow = tuple[int, int, str, int, str, str, float | None]  # round, client, attack, example, metric, status, value
ObservationStatus = Literal["accepted", "rejected", "missing"]


def sanitised(message: object) -> str:
    """A client's message as ledger, terminal and page may show it: one line of limited length, no control characters."""
    return "".join(c if c.isprintable() else " " for c in str(message)[: 2 * _MOST_LETTERS])[:_MOST_LETTERS].strip()


@dataclass(frozen=True)
class Participation:
    """What one client did in one round: its update was accepted or rejected, or it is missing."""

    client: int
    status: ObservationStatus
    reason: str = ""
    examples: int | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Lease:
    """A wave of jobs taken from the queue: one attack on some clients of one round.

    memories: of a stateful attack, by client: the round that wrote its memory, and the memory's digest; no entry before the
        first.
    """

    jobs: tuple[int, ...]
    attack: PlannedAttack
    seed: int
    round: int
    clients: tuple[int, ...]
    digests: tuple[str, ...]
    others: Mapping[int, int]
    attempt: int
    memories: Mapping[int, tuple[int, str]] = field(default_factory=dict)

    def of(self, clients: Collection[int]) -> "Lease":
        """The part of the wave that attacks some clients."""
        kept = [i for i, client in enumerate(self.clients) if client in clients]
        return replace(
            self,
            jobs=tuple(self.jobs[i] for i in kept),
            clients=tuple(self.clients[i] for i in kept),
            digests=tuple(self.digests[i] for i in kept),
        )


@dataclass(frozen=True)
class Ungraded:
    """A finished job whose reconstruction nobody has graded yet.

    Args:
        other: the client whose private data it is also graded against, as a baseline.
        open: whether attacks of the same round have not ended.
    """

    id: int
    attack: str
    round: int
    client: int
    other: int | None
    status: str
    seconds: float
    open: int


@dataclass(frozen=True)
class Progress:
    """Counts of jobs by state."""

    queued: int = 0
    leased: int = 0
    done: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        return self.queued + self.leased + self.done + self.failed
