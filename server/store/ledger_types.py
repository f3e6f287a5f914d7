"""What the ledger holds, as values: participations, leases, progress, score rows."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedgauge.attacks.modality.registry import BASELINES
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.components import SpecError, check_at_least
from fedgauge.client.protocol import Protocol
from fedgauge.server.store.ledger_connection import LedgerError

DEPLOYMENT = "deployment"  # the run's mode, if it is not a simulation
STARTED = (
    "flower_run_from_round_"  # prefix in the meta table: Flower's number for a deployment's training from that round on
)
REPEATED = (
    "rounds_asked_again"  # key in the meta table: how many rounds a deployment's clients may have answered once more
)
MAIN_METRIC = "main_metric"  # key in the meta table: the metric by which the attacks are compared
EMPTY = "empty"  # key in the meta table: why a run that has all its rounds has failed, as no client gave any update
# key in the meta table: the number of the last job that ended before the last attack service began, or its training ended
ATTACKED_FROM = "attacked_from"
RETRIED = "retried"  # key in the meta table: how often rows were deleted that a reader may have read
DEVICES = "devices"  # key in the meta table: how the attack service uses each device, as JSON
UNGRADED = "not_graded"  # status of a row that stands for a reconstruction which nobody has graded
_MOST_LETTERS = 300  # of a client's message

ScoreRow = tuple[int, int, str, int, str, str, float | None]  # round, client, attack, example, metric, status, value
ObservationStatus = Literal["accepted", "rejected", "missing"]


def sanitised(message: object) -> str:
    """A client's message as ledger, terminal and page may show it: one line of limited length, no control characters."""
    return "".join(c if c.isprintable() else " " for c in str(message)[: 2 * _MOST_LETTERS])[:_MOST_LETTERS].strip()


def repeated(meta: Mapping[str, str]) -> int:
    """How many rounds a deployment's clients may have answered twice, as it was started again; a simulation's draw the same."""
    told = meta.get(REPEATED, "") if meta.get("mode") == DEPLOYMENT else ""
    return int(told) if re.fullmatch(r"\d{1,7}", told) else 0


def json_table(text: str, path: Path, what: str) -> dict[str, Any]:
    """The object in a ledger's column of JSON; LedgerError if there is none."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()  # half a pair of code units is no text
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{path} is damaged: its {what} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise LedgerError(f"{path} is damaged: expected a table of {what}, got {text!r:.60}")
    return found


def planned_of(text: str, path: Path) -> PlannedAttack:
    """An attack as a ledger's file has it; LedgerError if it is none."""
    try:
        return PlannedAttack.from_json(text)
    except SpecError as error:
        raise LedgerError(f"{path} is damaged: {error}") from error


@dataclass(frozen=True)
class Participation:
    """What one client did in one round: its update was accepted or rejected, or it is missing.

    Args:
        alarm: whether its guard says that the weights are suspicious; None: it says nothing.
        suspicion: of these weights, as its guard says; an alarm from 1 on.
        silent: of a missing client: it sent neither an update nor an error in time.
    """

    client: int
    status: ObservationStatus
    reason: str = ""
    examples: int | None = None
    digest: str | None = None
    alarm: bool | None = None
    suspicion: float | None = None
    silent: bool | None = None


class RecordedProblem(NamedTuple):
    """A problem of a run's recording, by its code; without round and client it concerns all."""

    code: str
    round: int | None
    client: int | None
    words: str


@dataclass(frozen=True)
class DeviceUse:
    """How an attack service uses one device.

    Args:
        workers: on it.
        busy, waves: at work, and finished since the service began.
        share: of the service's time in which a worker attacked, from 0 to 1.
    """

    device: str
    workers: int
    busy: int
    waves: int
    share: float

    def __post_init__(self) -> None:
        check_at_least(self, 0, "workers", "busy", "waves", "share")


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
class FinishedJob:
    """A job that ended.

    Args:
        other: the client whose private data it is also graded against, as a baseline.
    """

    id: int
    attack: str
    round: int
    client: int
    other: int | None


@dataclass(frozen=True)
class Ungraded(FinishedJob):
    """A finished job whose reconstruction nobody has graded yet.

    Args:
        open: whether attacks of the same round have not ended.
    """

    status: str
    seconds: float
    open: int


def comparable(jobs: Iterable[Ungraded], protocol: Protocol) -> list[Ungraded]:
    """The jobs without another client where there is none to grade by: of a baseline, or of a sum of more clients or of fewer."""

    def fits(job: Ungraded) -> bool:
        return (
            job.other is not None and job.attack not in BASELINES and protocol.alike(job.client, job.other, job.round)
        )

    return [job if fits(job) else replace(job, other=None) for job in jobs]


@dataclass(frozen=True)
class FinishedTest(FinishedJob):
    """A finished test of membership.

    Args:
        digest: of the update that it is about; None: the update is no longer on the tape.
        blind: whether no truth was ever asked for it.
    """

    digest: str | None
    blind: int


@dataclass(frozen=True)
class Progress:
    """Counts of jobs by state."""

    queued: int = 0
    leased: int = 0
    done: int = 0
    failed: int = 0

    @property
    def waiting(self) -> int:
        """Those that have not ended."""
        return self.queued + self.leased

    @property
    def total(self) -> int:
        return self.waiting + self.done + self.failed
