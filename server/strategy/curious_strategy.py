"""The curious strategy: any Flower strategy behind the validator, with every accepted update kept on the tape for attack."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedgauge.attacks.base import Observation
from fedgauge.attacks.plan import AttackPlan
from fedgauge.client.federation import Federation
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import MORE_NOTED, ROUND_NOTE, USUAL_NORM, Participation
from fedgauge.server.store.tape import Keep, Tape
from fedgauge.server.store.uploads import UploadMismatch, as_the_model_has_it
from fedgauge.server.strategy.app_rounds import AppRounds, Evaluate
from fedgauge.server.strategy.reply_checks import AcceptedReply
from fedgauge.server.strategy.validator import RoundReplies, UpdateValidator

STEPS = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary")
MOST_NOTED = 10  # rounds with notes that are kept in words, and notes of one round: the meta table is read as a whole


@dataclass
class UpdateRecorder:
    """Records a round's replies: updates to the tape, then observations and jobs to the ledger in one transaction.

    Args:
        plan: what to attack; None records who answered and keeps nothing (curiosity off).
        keep: all accepted updates; attacked: only those that the plan attacks; none: like attacked, and the attack service
            deletes them afterwards.
        federation: of a user's own app, as the scenario describes it: the run records at once if the uploads do not fit it.
        packages: of a user's own app, that its scenario needs.
    """

    ledger: Ledger
    tape: Tape
    plan: AttackPlan | None
    keep: Keep = "all"
    federation: Federation | None = None
    packages: Sequence[str] = ()
    seconds: dict[int, float] = field(default_factory=dict)  # what recording cost, by round
    counted: int | None = None  # the latest round with notes that is only counted

    def __call__(self, intake: RoundReplies) -> None:
        self.enter(intake.round, self.put(intake))

    def put(self, intake: RoundReplies) -> list[Participation]:
        """Write updates to the tape; returns what to enter in the ledger."""
        started = time.perf_counter()
        taped = list(self._taped(intake))
        if not any(digest for digest, _ in taped):
            self.tape.forget(intake.round, ())
        self._compare(intake)
        self._note(intake)
        self.seconds[intake.round] = time.perf_counter() - started
        accepted = zip(intake.accepted, taped, strict=True)
        seen = [_participation(a, digest, reason) for a, (digest, reason) in accepted]
        return [*intake.refused, *seen]

    def _note(self, intake: RoundReplies) -> None:
        """Write what was found about the round as a whole, if anything was."""
        if not intake.notes:
            return
        self.note(intake.round, intake.notes)
        if any(p.status == "rejected" for p in intake.refused):
            self.ledger.set_meta(**{USUAL_NORM: repr(intake.usual_norm)})

    def note(self, round: int, notes: Sequence[str], beside: bool = False) -> None:
        """Write sentences on a round, of many rounds only how many there are.

        Args:
            beside: keep what was written of this round before.
        """
        facts, key = self.ledger.meta(), f"{ROUND_NOTE}{round}"
        if key in facts or sum(known.startswith(ROUND_NOTE) for known in facts) < MOST_NOTED:
            more = len(notes) - MOST_NOTED
            earlier = [facts[key]] if beside and key in facts else []
            new = {key: "; ".join([*earlier, *notes[:MOST_NOTED]]) + (f"; and {more} more" if more > 0 else "")}
        elif beside and round == self.counted:
            return
        else:
            self.counted = round
            before = facts.get(MORE_NOTED, "")
            new = {MORE_NOTED: str((int(before) if re.fullmatch(r"\d{1,7}", before) else 0) + 1)}
        self.ledger.set_meta(**new)

    def _compare(self, intake: RoundReplies) -> None:
        """Once, say whether a user's uploads fit the model that the scenario names."""
        federation = self.federation
        if federation is None or not intake.accepted:
            return
        self.federation, first = None, intake.accepted[0]
        seen = Observation(intake.round, first.client, intake.params, first.update, intake.buffers)
        try:
            as_the_model_has_it(seen, federation)
        except UploadMismatch as error:
            self.ledger.set_meta(uploads=str(error))
            log(WARNING, "fedgauge: no update of this run can be attacked: %s", error)

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
            write = partial(self.tape.write_update, intake.round, a.client, a.update, returned)
            of_update, reason = _attempt(write)
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


class CuriousStrategy(UpdateValidator):
    """A validator that records with an UpdateRecorder; users mount it in their Flower app by this name.

    In a user's app, where it is started itself, it also records the app's rounds, and whether the training ended.
    """

    _rounds: AppRounds | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
        **more: Any,
    ) -> Result:
        """Train as the wrapped strategy does, in its own loop if it has one.

        Args:
            more: what such a loop takes besides.
        """
        rounds = self._rounds = self._app_rounds(evaluate_fn is not None)
        evaluate = rounds.noting(evaluate_fn) if rounds is not None and evaluate_fn is not None else evaluate_fn
        loop = super().start if type(self.inner).start is Strategy.start else self._with_these_steps().start
        with rounds.training(num_rounds) if rounds is not None else nullcontext():
            return loop(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate, **more)

    def _with_these_steps(self) -> Strategy:
        """The wrapped strategy itself, whose loop takes these steps instead of its own."""
        theirs = type(self.inner)
        steps = {name: staticmethod(getattr(self, name)) for name in STEPS}
        driver: Strategy = object.__new__(type(theirs.__name__, (theirs,), steps))
        driver.__dict__ = self.inner.__dict__  # one state, whoever changes it
        return driver

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The validator's."""
        if self._rounds is None:  # another strategy around this one was started
            self._rounds = self._app_rounds(evaluates=False)
        return super().configure_train(server_round, arrays, config, grid)

    def _app_rounds(self, evaluates: bool) -> AppRounds | None:
        """Who records the rounds; None in a scenario's own app, which records more of them."""
        if not isinstance(self.record, UpdateRecorder):
            return None
        return AppRounds(self.record.ledger, self.record.seconds, evaluates, self.record.packages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The validator's."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if self._rounds is not None:
            self._rounds.trained(server_round, metrics, self.clients)
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The validator's."""
        metrics = super().aggregate_evaluate(server_round, replies)
        if self.evaluation_notes and isinstance(self.record, UpdateRecorder):
            self.record.note(server_round, self.evaluation_notes, beside=True)
        if self._rounds is not None:
            self._rounds.evaluated(server_round, metrics)
        return metrics


def _participation(reply: AcceptedReply, digest: str | None, reason: str) -> Participation:
    guard = reply.guard
    if guard is None:
        return Participation(reply.client, "accepted", reason, reply.examples, digest)
    words = reason or guard.words
    return Participation(reply.client, "accepted", words, reply.examples, digest, guard.alarm, guard.suspicion)
