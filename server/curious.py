"""The curious strategy: any Flower strategy behind the door, with every accepted update put on the tape for attack."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

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


class CuriousStrategy(Strategy):
    """Wraps any stock strategy: trains exactly as it would, and taps what passes the door.

    Args:
        inner: the strategy to wrap, e.g. `FedAvg(fraction_train=0.5)`.
        tap: where intercepted updates go.
        buffers, seed, clients, replies: as in Door.
    """

    def __init__(
        self,
        inner: Strategy,
        tap: Tap,
        buffers: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        clients: Mapping[int, int] | None = None,
        replies: Literal["updates", "weights"] = "updates",
    ) -> None:
        self.tap = tap
        self.door = Door(inner, tap, buffers, seed, clients, replies)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Through the door."""
        return self.door.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Through the door, which calls the tap."""
        return self.door.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Through the door."""
        return self.door.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Through the door."""
        return self.door.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """The wrapped strategy's."""
        self.door.summary()
