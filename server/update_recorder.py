"""Recorder of a scenario's own server: a round's updates, its checkpoint, then observations and jobs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedgauge.attacks.plan import AttackPlan
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.tape import Keep, Tape
from fedgauge.server.strategy.reply_checks import AcceptedReply, GuardReport, RoundReplies


@dataclass
class UpdateRecorder:
    """Records a round's checked replies.

    Args:
        plan: what to attack; None records who answered and keeps nothing (curiosity off).
        keep: all accepted updates; attacked: only those that the plan attacks; none: like attacked, and the attack service
            deletes them afterwards.
    """

    ledger: Ledger
    tape: Tape
    plan: AttackPlan | None
    keep: Keep = "all"

    def __call__(
        self, intake: RoundReplies, checkpoint: Callable[[Sequence[Participation]], None] = lambda seen: None
    ) -> None:
        """Record a round on the tape, then write its checkpoint, then its rows in the ledger, in one transaction.

        Args:
            checkpoint: called with the participations, to write the round's checkpoint.
        """
        seen = self._tape(intake)
        checkpoint(seen)
        self.ledger.record_intake(intake.round, seen, self.plan)

    def _tape(self, intake: RoundReplies) -> list[Participation]:
        """Write updates to the tape; return what to enter in the ledger."""
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
            guard = a.guard or GuardReport("", None)
            seen.append(Participation(a.client, "accepted", why or guard.words, a.examples, digest, guard.alarm))
        if not any(s.digest for s in seen):
            self.tape.forget(intake.round, ())
        if intake.undone:
            self.ledger.add_problem("undone", intake.undone, intake.round)
        return seen

    def _write(self, intake: RoundReplies, reply: AcceptedReply) -> str:
        returned = {} if intake.summed else reply.buffers  # of a sum they are several clients'
        return self.tape.write_update(intake.round, reply.client, reply.update, returned)

    def _kept(self, intake: RoundReplies) -> set[int]:
        """Return the clients recorded on the tape; in the first round at least one, for the replay check."""
        clients = [a.client for a in intake.accepted]
        if self.plan is None:
            return set()
        kept = set(clients) if self.keep == "all" else set(self.plan.targets(intake.round, clients))
        return kept or (set(clients[:1]) if intake.round == 1 else set())
