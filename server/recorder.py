"""Recorder of a scenario's own server: updates to the tape, then observations and jobs to the ledger in one transaction."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedgauge.attacks.plan import AttackPlan
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.tape import Keep, Tape
from fedgauge.server.strategy.checked import AcceptedReply, GuardReport, RoundReplies


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
        kept, of_round, seen = self._kept(intake), "", list(intake.refused)
        for a in intake.accepted:
            digest, why = None, ""
            try:
                if a.client in kept and (own := intake.sent.get(a.client)) is not None:
                    of_sent = self.tape.write_round(intake.round, own, intake.buffers, a.client)
                    digest = f"{of_sent}:{self._write(intake, a)}"
                elif a.client in kept:
                    of_round = of_round or self.tape.write_round(intake.round, intake.params, intake.buffers)
                    digest = f"{of_round}:{self._write(intake, a)}"
            except OSError as error:  # a full disk loses observations but never a round
                why = f"not recorded: {error.strerror or error}"
            guard = a.guard or GuardReport("", None, None)
            words = why or guard.words
            seen.append(Participation(a.client, "accepted", words, a.examples, digest, guard.alarm, guard.suspicion))
        if not any(s.digest for s in seen):
            self.tape.forget(intake.round, ())
        if intake.undone:
            self.ledger.add_problem("undone", intake.undone, intake.round)
        self.seconds[intake.round] = time.perf_counter() - started
        return seen

    def _write(self, intake: RoundReplies, reply: AcceptedReply) -> str:
        returned = {} if intake.summed else reply.buffers  # of a sum they are several clients'
        return self.tape.write_update(intake.round, reply.client, reply.update, returned)

    def enter(self, round: int, seen: Sequence[Participation]) -> None:
        started = time.perf_counter()
        self.ledger.record_intake(round, seen, self.plan)
        self.seconds[round] = self.seconds.get(round, 0.0) + time.perf_counter() - started

    def _kept(self, intake: RoundReplies) -> set[int]:
        """Return the clients recorded on the tape; in the first round at least one, for the replay check."""
        clients = [a.client for a in intake.accepted]
        if self.plan is None:
            return set()
        kept = set(clients) if self.keep == "all" else set(self.plan.targets(intake.round, clients))
        return kept or (set(clients[:1]) if intake.round == 1 else set())
