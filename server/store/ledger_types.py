"""Values in the ledger: participations, leases, progress, score rows."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from fedgauge.attacks.plan import MOST_ATTACKS, PlannedAttack
from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger_file import LedgerError

DEPLOYMENT = "deployment"  # the run's mode, if it is not a simulation
# keys of the meta table
OWN = "own"  # a deployment of `fedgauge deploy`, and not a user's own app
STARTED = "flower_run_from_round_"  # prefix: Flower's number for a deployment's training from that round on
REPEATED = "rounds_asked_again"  # number of rounds that a deployment's clients may have answered twice
MAIN_METRIC = "main_metric"
LABEL_METRIC = "label_metric"  # of restored labels; names their kind
EMPTY = "empty"  # reason of a run without any update
UNGRADED = "not_graded"  # status of a reconstruction without a grade
_MOST_LETTERS = 300  # of a client's message

ScoreRow = tuple[int, int, str, int, str, str, float | None]  # round, client, attack, example, metric, status, value
ObservationStatus = Literal["accepted", "rejected", "missing"]


def sanitised(message: object) -> str:
    """Convert a client's message to one short line without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(message)[: 2 * _MOST_LETTERS])[:_MOST_LETTERS].strip()


def repeated(meta: Mapping[str, str]) -> int:
    """Return the number of rounds that a deployment's clients may have answered twice."""
    count = meta.get(REPEATED, "") if meta.get("mode") == DEPLOYMENT else ""
    return int(count) if re.fullmatch(r"\d{1,7}", count) else 0


@lru_cache(maxsize=MOST_ATTACKS)  # a wave after the first of its attack parses nothing
def planned_of(text: str, role: str, metric: str, path: Path) -> PlannedAttack:
    """Parse a planned attack of a ledger, with the role and the metric of its row.

    Raises:
        LedgerError: it is damaged.
    """
    try:
        return PlannedAttack.from_json(text, role=role, metric=metric)
    except SpecError as error:
        raise LedgerError(f"{path} is damaged: {error}") from error


@dataclass(frozen=True)
class Participation:
    """Participation of one client in one round.

    Args:
        alarm: if its guard suspects the weights; None: no report.
        silent: of a missing client: it sent neither an update nor an error.
    """

    client: int
    status: ObservationStatus
    reason: str = ""
    examples: int | None = None
    digest: str | None = None
    alarm: bool | None = None
    silent: bool | None = None


class RecordedProblem(NamedTuple):
    """Problem of a run's recording; without round and client it concerns all."""

    code: str
    round: int | None
    client: int | None
    words: str


@dataclass(frozen=True)
class Lease:
    """A leased wave: one attack on some clients of one round.

    Args:
        memories: of a stateful attack, by client: round and digest of the latest memory.
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
        """Return the part of the wave for some clients."""
        kept = [i for i, client in enumerate(self.clients) if client in clients]
        return replace(
            self,
            jobs=tuple(self.jobs[i] for i in kept),
            clients=tuple(self.clients[i] for i in kept),
            digests=tuple(self.digests[i] for i in kept),
        )


@dataclass(frozen=True)
class FinishedJob:
    """Finished reconstruction or test of membership.

    Args:
        other: the client against which the baseline is graded.
        digest: of its update; None: no longer on the tape.
        status, seconds: of a reconstruction's search.
        blind: if it was never graded by a truth.
        open: if attacks of the same round have not ended.
    """

    id: int
    attack: str
    round: int
    client: int
    other: int | None
    digest: str | None = None
    status: str = ""
    seconds: float = 0.0
    blind: int = True
    open: int = False


@dataclass(frozen=True)
class Progress:
    queued: int = 0
    leased: int = 0
    done: int = 0
    failed: int = 0

    @property
    def waiting(self) -> int:
        return self.queued + self.leased

    @property
    def total(self) -> int:
        return self.waiting + self.done + self.failed
