"""What a scenario's own server writes down: updates to the tape, then observations and jobs to the ledger in one transaction."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from fedgauge.attacks.plan import AttackPlan
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.tape import Keep, Tape
from fedgauge.server.strategy.checked import AcceptedReply, RoundReplies


@dataclass
class UpdateRecorder:
    """Records a round's checked replies: updates to the tape, then observations and jobs to the ledger in one transaction.

    Args:
        plan: what to attack; None records who answered and keeps nothing (curiosity off).
        keep: all accepted updates; attacked: only those that the plan attacks; none: like attacked, and the attack service
            deletes them afterwards.
    """

    ledger: Ledger
    tape: Tape
    plan: AttackPlan | None
    keep: Keep = "all"
    seconds: dict[int, float] = field(default_factory=dict)  # what recording cost, by round

    def __call__(self, intake: RoundReplies) -> None:
        self.enter(intake.round, self.put(intake))

    def put(self, intake: RoundReplies) -> list[Participation]:
        """Write updates to the tape; return what to enter in the ledger."""
        started = time.perf_counter()
        taped = list(self._taped(intake))
        if not any(digest for digest, _ in taped):
            self.tape.forget(intake.round, ())
        if intake.undone:
            self.ledger.add_problem("undone", intake.undone, intake.round)
        self.seconds[intake.round] = time.perf_counter() - started
        accepted = zip(intake.accepted, taped, strict=True)
        return [*intake.refused, *(_participation(a, digest, reason) for a, (digest, reason) in accepted)]

    def enter(self, round: int, seen: Sequence[Participation]) -> None:
        """Write a round's observations and jobs to the ledger."""
        started = time.perf_counter()
        self.ledger.record_intake(round, seen, self.plan)
        self.seconds[round] = self.seconds.get(round, 0.0) + time.perf_counter() - started

    def _taped(self, intake: RoundReplies) -> Iterator[tuple[str | None, str]]:
        """For each accepted update its digest, or None and why it is not on the tape; the reason is empty if it need not be."""
        kept = self._kept(intake)
        sent = partial(self.tape.write_round, intake.round, intake.params, intake.buffers)
        of_round, lost = _attempt(sent) if kept else (None, "")
        for a in intake.accepted:
            if lost or a.client not in kept:
                yield None, lost if a.client in kept else ""
                continue
            of_sent, reason = of_round, ""
            if (own := intake.sent.get(a.client)) is not None:
                of_sent, reason = _attempt(partial(self.tape.write_round, intake.round, own, intake.buffers, a.client))
            if of_sent is None:
                yield None, reason
                continue
            returned = {} if intake.summed else a.buffers  # of a sum they are several clients'
            of_update, reason = _attempt(partial(self.tape.write_update, intake.round, a.client, a.update, returned))
            yield f"{of_sent}:{of_update}" if of_update else None, reason

    def _kept(self, intake: RoundReplies) -> set[int]:
        """The clients whose updates go on the tape; in the first round at least one, for the replay check."""
        clients = [a.client for a in intake.accepted]
        if self.plan is None:
            return set()
        kept = set(clients) if self.keep == "all" else set(self.plan.targets(intake.round, clients))
        return kept or (set(clients[:1]) if intake.round == 1 else set())


def _attempt(write: Callable[[], str]) -> tuple[str | None, str]:
    """A file's digest, or why there is none: a full disk loses observations but never a round."""
    try:
        return write(), ""
    except OSError as error:
        return None, f"not recorded: {error.strerror or error}"


def _participation(reply: AcceptedReply, digest: str | None, reason: str) -> Participation:
    guard = reply.guard
    if guard is None:
        return Participation(reply.client, "accepted", reason, reply.examples, digest)
    words = reason or guard.words
    return Participation(reply.client, "accepted", words, reply.examples, digest, guard.alarm, guard.suspicion)
