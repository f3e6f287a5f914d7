"""The curious strategy: any Flower strategy behind the door, with every accepted update put on the tape for attack."""

import time
from dataclasses import dataclass, field

from attacks.plan import AttackPlan
from server.door import Door, Intake
from server.ledger import Ledger, Seen
from server.tape import Keep, Tape


@dataclass
class Tap:
    """Writes a round's intake down: updates to the tape, then observations and jobs to the ledger in one transaction.

    Args:
        plan: what to attack; None records who answered and keeps nothing (curiosity off).
        keep: all accepted updates; scored: only those that the plan attacks; none: like scored, and the pool deletes
            them once they are.
    """

    ledger: Ledger
    tape: Tape
    plan: AttackPlan | None
    keep: Keep = "all"
    seconds: dict[int, float] = field(default_factory=dict)  # what intercepting cost, by round

    def __call__(self, intake: Intake) -> None:
        started = time.perf_counter()
        kept = self._kept(intake)
        sent = self.tape.write_round(intake.round, intake.params, intake.buffers) if kept else ""
        seen = list(intake.refused)
        for a in intake.accepted:
            written = a.client in kept
            digest = f"{sent}:{self.tape.write_update(intake.round, a.client, a.update)}" if written else None
            seen.append(Seen(a.client, "accepted", "", a.examples, digest))
        self.ledger.record_intake(intake.round, seen, self.plan)
        self.seconds[intake.round] = time.perf_counter() - started

    def _kept(self, intake: Intake) -> set[int]:
        """Whose updates go on the tape; in the first round one at least, for the replay check."""
        clients = [a.client for a in intake.accepted]
        if self.plan is None:
            return set()
        kept = set(clients) if self.keep == "all" else set(self.plan.targets(intake.round, clients))
        return kept or (set(clients[:1]) if intake.round == 1 else set())


CuriousStrategy = Door  # a door whose record is a tap; by this name it is mounted in anybody's Flower app
