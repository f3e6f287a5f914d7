"""What a curious server writes down: updates to the tape, then observations to the ledger in one transaction.

`UpdateRecorder` serves a scenario's own server, whose replies were checked; `AppRecorder` serves the tap in a user's app, records
what passed as it came, and leaves its interpretation to the audit.
"""

import json
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, Message, MetricRecord
from flwr.common.constant import SType
from flwr.common.logger import log
from torch import Tensor

from fedgauge.attacks.plan import AttackPlan
from fedgauge.client.arrays import npy_header
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import DEPLOYMENT, EMPTY, Participation
from fedgauge.server.store.run import BASE, Run
from fedgauge.server.store.tape import Keep, Tape
from fedgauge.server.strategy.checked import AcceptedReply, RoundReplies
from fedgauge.server.views.outcomes import none_accepted

MOST_METRICS, MOST_LETTERS = 100, 100  # kept of a round, and in a metric's name
PATIENCE = 10  # rounds after which a reply that was not pulled is no longer waited for: its weights are in memory
MOST_ROUNDS = 10**6  # a larger number in a message is not a round
TRAINING, EVALUATION, SERVER = "training", "evaluation", "server"  # who computed metrics
EXAMPLES = ("num-examples", "num_examples", "examples", "num-samples", "num_samples", "samples")  # as apps call them
_ACCURACY, _LOSS = re.compile(r"(^|[^a-z])acc(uracy)?([^a-z]|$)"), re.compile(r"(^|[^a-z])loss([^a-z]|$)")
Arrays = Mapping[str, Array]


# --------------------------------------------------------------------------------------------- a scenario's own server


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


# ------------------------------------------------------------------------------------------------------- a user's app


@dataclass(eq=False)
class _Sent:
    """A message on its way to a node.

    Args:
        round: as recorded; 0: it trains nothing.
        arrays: by record, as they were when the message left.
    """

    metadata: Any
    node: int
    kind: str
    round: int
    arrays: Mapping[str, Arrays]
    id: str = ""

    def answered_by(self, message_id: str) -> bool:
        return message_id != "" and message_id in (self.id, self.metadata.message_id)


class AppRecorder:
    """Records what passes a tap. Every public method may be called from any thread, and none of them raises.

    Args:
        run: a new one.
        tables: the audit file as parsed; nothing in it is built. [tape] keep and the rounds and clients of [audit] are respected.
        base: the folder from which the audit file's relative paths start.
        allow: packages that the scenario names, for the command that is logged at the end.
    """

    def __init__(self, run: Run, tables: Mapping[str, Any], base: Path, allow: Sequence[str]) -> None:
        self._run, self._allow = run, allow
        self._ledger, self._tape = run.ledger(), run.tape()
        self._plan, self._keep_all = _targets(tables)
        self._guard = threading.RLock()
        self._held = ExitStack()
        self._held.enter_context(run.lock("training"))
        self._clients: dict[int, int] = {}  # by node, in the order in which nodes are first asked to train
        self._open: list[_Sent] = []  # messages without a reply
        self._answered: dict[int, int] = {}  # by node, its latest round with a reply
        self._last = self._given = self._shift = 0  # rounds: recorded, as the app counts them, and the difference
        self._base: tuple[int, Arrays, str] | None = (
            None  # round, arrays and digest of the weights last written for a round
        )
        self._seen: dict[int, dict[int, Participation]] = {}  # by round and client, to be entered
        self._sums: dict[str, dict[str, list[float]]] = {}  # by who computed it and metric: weighted sum, weights
        self._news = False  # since the round was last written
        self._began = time.perf_counter()
        self._cost = 0.0  # seconds of this round that recording took
        self._taped = 0
        self._warned: set[str] = set()
        rounds = tables.get("rounds")
        planned = rounds if type(rounds) is int and 0 < rounds <= MOST_ROUNDS else 0
        self._ledger.set_meta(mode=DEPLOYMENT, state="training", rounds=str(planned), **{BASE: str(base)})

    def exchange(self) -> "Exchange":
        """What passes in one call of the grid."""
        return Exchange(self)

    def warn(self, code: str, words: str, round: int | None = None, client: int | None = None) -> None:
        """Log a problem, once for each code, and keep it for the audit."""
        with self._guard:
            if code not in self._warned:
                self._warned.add(code)
                log(WARNING, "fedgauge: %s", words)
            try:
                self._ledger.add_problem(code, words, round, client)
            except Exception as error:  # the app goes on, whatever the reason
                log(WARNING, "fedgauge: the ledger cannot be written: %s", error)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Record whether the app's training ended by an exception, which is raised again."""
        try:
            yield
        except BaseException as error:
            self.close("failed" if isinstance(error, Exception) else "interrupted")
            raise
        self.close()

    def evaluated(self, metrics: Mapping[int, MetricRecord]) -> None:
        """Record what the app's server computed on its own, by the app's rounds."""
        self._quietly("evaluation", lambda: self._enter_server_metrics(metrics))

    def close(self, state: str = "trained") -> None:
        """Record that the app's training is over, once, and log the command that attacks what was recorded."""
        self._quietly("close", lambda: self._close(state))

    # everything below runs inside _quietly

    def _quietly(self, what: str, act: Callable[[], None]) -> None:
        started = time.perf_counter()
        with self._guard:
            try:
                act()
            except Exception as error:  # whatever it is, the app must not notice
                self.warn("recorder", f"{what}: not recorded: {type(error).__name__}: {error}")
            self._cost += time.perf_counter() - started

    def _note_sent(self, message: Message, exchange: list[_Sent]) -> None:
        metadata, content = message.metadata, message.content
        kind = metadata.message_type.partition(".")[0]
        arrays = {name: dict(record) for name, record in content.array_records.items() if record}
        round = 0
        if kind == "train" and arrays:
            round = self._number(message, metadata.dst_node_id)
            self._clients.setdefault(metadata.dst_node_id, len(self._clients))
        self._give_up([s for s in self._open if s.round < round - PATIENCE])
        sent = _Sent(metadata, metadata.dst_node_id, kind, round, arrays)
        self._open.append(sent)
        exchange.append(sent)

    def _number(self, message: Message, node: int) -> int:
        """The round of a message: the app's number, counted on where the app begins again or asks a node twice in a round."""
        given = _round_of(message)
        before = self._last
        if given is None:
            self._last += int(self._last == 0 or self._asked(node, self._last))
        else:
            if given < self._given:  # training begins again
                self._shift = self._last
            elif self._asked(node, given + self._shift):
                self._shift += 1
            self._given = given
            self._last = max(self._last, given + self._shift)
        if self._last != before:
            self._sums, self._began, self._cost = {}, time.perf_counter(), 0.0
        return self._last if given is None else given + self._shift

    def _asked(self, node: int, round: int) -> bool:
        """Check for a message of this round to the node that was answered or still may be."""
        return self._answered.get(node, 0) >= round or any(s.node == node and s.round == round for s in self._open)

    def _note_reply(self, reply: Message, exchange: Sequence[_Sent]) -> None:
        asked = reply.metadata.reply_to_message_id
        node = reply.metadata.src_node_id
        sent = next((s for s in self._open if s.answered_by(asked)), None) or next(
            (s for s in exchange if s in self._open and s.node == node), None
        )
        if sent is None:
            return
        self._open.remove(sent)
        if reply.has_error():
            if sent.round:
                self._enter_missing(
                    sent, ((reply.error.reason or "").strip() or "error").splitlines()[-1], silent=False
                )
            return
        if sent.kind in ("train", "evaluate"):
            self._add_metrics(TRAINING if sent.kind == "train" else EVALUATION, reply)
        if sent.round:
            self._record(sent, reply)
        elif any(reply.content.array_records.values()):
            kind = sent.metadata.message_type
            self.warn(
                f"arrays:{kind}",
                f"replies to {kind!r} carry arrays without weights having been sent (embeddings, activations): not recorded, and "
                "no attack here inverts them",
            )

    def _record(self, sent: _Sent, reply: Message) -> None:
        client = self._clients[sent.node]
        self._answered[sent.node] = max(self._answered.get(sent.node, 0), sent.round)
        seen = partial(Participation, client, "accepted", examples=_examples(reply))
        came = {name: dict(record) for name, record in reply.content.array_records.items() if record}
        if not came:
            self._enter(sent.round, seen("its reply carries no arrays"))
            return
        if not self._keep_all and self._taped and client not in self._plan.targets(sent.round, [client]):
            self._enter(sent.round, seen())
            return
        of_sent, of_reply = _pair(sent.arrays, came)
        others = {name: arrays for name, arrays in came.items() if name != of_reply}
        if others:
            named = ", ".join(f"{name} ({len(arrays)} arrays)" for name, arrays in others.items())
            self.warn("records", f"replies carry further records, which are recorded but not attacked: {named}"[:300])
        try:
            sent_digest = self._write_sent(sent.round, client, sent.arrays[of_sent])
            beside = {f"{name}/{k}": t for name, arrays in others.items() for k, t in _tensors(arrays).items()}
            digest = self._tape.write_update(sent.round, client, _tensors(came[of_reply]), others=beside)
        except _Unreadable as error:
            self.warn("reply", f"round {sent.round}, client {client}: not recorded: {error}", sent.round, client)
            self._enter(sent.round, seen(f"not recorded: {error}"))
        except OSError as error:
            self.warn("disk", f"updates are not recorded: {error.strerror or error}", sent.round, client)
            self._enter(sent.round, seen(f"not recorded: {error.strerror or error}"))
        else:
            self._taped += 1
            self._enter(sent.round, seen(digest=f"{sent_digest}:{digest}"))

    def _write_sent(self, round: int, client: int, arrays: Arrays) -> str:
        """The digest of the weights that a client was sent: the round's file, or its own if they differ."""
        if self._base is not None and self._base[0] == round:
            if _equal(self._base[1], arrays):
                return self._base[2]
            return self._tape.write_round(round, _tensors(arrays), {}, client)
        digest = self._tape.write_round(round, _tensors(arrays), {})
        self._base = round, arrays, digest
        return digest

    def _enter(self, round: int, seen: Participation) -> None:
        self._news = True
        self._seen.setdefault(round, {})[seen.client] = seen

    def _enter_missing(self, sent: _Sent, reason: str, silent: bool) -> None:
        if self._answered.get(sent.node, 0) < sent.round:  # otherwise a later message was answered
            self._enter(sent.round, Participation(self._clients[sent.node], "missing", reason, silent=silent))

    def _give_up(self, unanswered: Sequence[_Sent]) -> None:
        for sent in unanswered:
            self._open.remove(sent)
            if sent.round:
                self._enter_missing(sent, "no reply", silent=True)

    def _end_exchange(self, exchange: Sequence[_Sent]) -> None:
        """Who has not answered when the call returns is missing."""
        self._give_up([sent for sent in exchange if sent in self._open])
        self._flush()

    def _flush(self) -> None:
        """Write observations, and the round with its metrics so far, to the ledger."""
        seen, self._seen = self._seen, {}
        for round, of_round in sorted(seen.items()):
            self._ledger.record_intake(round, list(of_round.values()))
        if seen:
            nodes = {str(client): str(node) for node, client in self._clients.items()}
            self._ledger.set_meta(nodes=json.dumps(nodes))
        if self._last and self._news:
            self._news = False
            means = {who: {k: _mean(*pair) for k, pair in sums.items()} for who, sums in self._sums.items()}
            self._enter_round(self._last, means)

    def _enter_round(self, round: int, metrics: Mapping[str, Mapping[str, object]]) -> None:
        accuracy, loss = test_figures(metrics)
        seconds = time.perf_counter() - self._began
        self._ledger.record_round(round, accuracy, loss, seconds, self._cost, metrics)

    def _enter_server_metrics(self, metrics: Mapping[int, MetricRecord]) -> None:
        self._flush()
        self._sums = {}  # written: another flush would replace the last round's row
        rows = {row["round"]: row for row in self._ledger.rounds()}
        for given, record in metrics.items():
            row = rows.get(given + self._shift)
            if row is None:
                continue
            kept = json.loads(row["metrics"] or "{}") | {SERVER: dict(list(_worth_keeping(record))[:MOST_METRICS])}
            accuracy, loss = test_figures(kept)
            self._ledger.record_round(row["round"], accuracy, loss, row["seconds"], row["intercept_seconds"], kept)

    def _add_metrics(self, who: str, reply: Message) -> None:
        """Add a client's metrics to the round's means, weighted by examples as Flower's strategies do."""
        self._news = True
        weight = float(_examples(reply) or 1)
        of_round = self._sums.setdefault(who, defaultdict(lambda: [0.0, 0.0]))
        for record in reply.content.metric_records.values():
            for name, value in record.items():
                known = name in of_round or len(of_round) < MOST_METRICS
                if isinstance(value, int | float) and len(name) <= MOST_LETTERS and known and name not in EXAMPLES:
                    of_round[name][0] += weight * value
                    of_round[name][1] += weight

    def _close(self, state: str) -> None:
        self._give_up(list(self._open))
        self._flush()
        if state == "trained" and (why := none_accepted(self._ledger, ended=True)):
            state = "failed"
            self._ledger.set_meta(**{EMPTY: why})
        self._ledger.set_meta(state=state, rounds=str(self._last))
        folder = self._run.folder.absolute()
        command = " ".join((f"fedgauge audit {folder}", *(f"--allow {package}" for package in self._allow)))
        if self._taped:
            log(INFO, "fedgauge recorded %d updates in %s. Attack them with: %s", self._taped, folder, command)
        else:
            log(WARNING, "fedgauge recorded no update in %s; the reason: %s", folder, command)
        self._held.close()
        self._ledger.close()
        self._quietly = lambda what, act: None  # type: ignore[method-assign]  # nothing is recorded any more


class Exchange:
    """One call of a grid: the messages that pass in it, and their replies."""

    def __init__(self, recorder: AppRecorder) -> None:
        self._recorder = recorder
        self._sent: list[_Sent] = []

    def sent(self, message: Message) -> None:
        """Note a message on its way to a node."""
        self._recorder._quietly("a message", lambda: self._recorder._note_sent(message, self._sent))

    def pushed(self, ids: Sequence[Any]) -> None:
        """Note the ids by which the replies will be pulled."""
        if len(ids) == len(self._sent):
            for sent, own in zip(self._sent, ids, strict=True):
                sent.id = str(own)

    def came(self, reply: Message) -> None:
        """Record a reply."""
        self._recorder._quietly("a reply", lambda: self._recorder._note_reply(reply, self._sent))

    def over(self) -> None:
        """Record who has not answered, and write all to the ledger."""
        self._recorder._quietly("a round", lambda: self._recorder._end_exchange(self._sent))

    def flush(self) -> None:
        """Write what was recorded to the ledger."""
        self._recorder._quietly("a round", self._recorder._flush)


class _Unreadable(ValueError):
    """An array that cannot be recorded; the message says why."""


def _targets(tables: Mapping[str, Any]) -> tuple[AttackPlan, bool]:
    """Which updates the audit file asks for, and whether all are kept; all of them where it is not understood."""
    audit, tape = tables.get("audit"), tables.get("tape")
    audit = audit if isinstance(audit, dict) else {}
    keep = tape.get("keep", "all") if isinstance(tape, dict) else "all"

    def numbers(key: str) -> tuple[int, ...] | None:
        value = audit.get(key)
        return tuple(value) if isinstance(value, list) and all(type(n) is int for n in value) else None

    every = audit.get("every", 1)
    plan = AttackPlan((), numbers("rounds"), every if type(every) is int and every > 0 else 1, numbers("clients"))
    return plan, keep not in ("attacked", "none")


def _round_of(message: Message) -> int | None:
    """The round that a message names: `server-round` in its configuration, else its group id."""
    for record in message.content.config_records.values():
        number = record.get("server-round")
        if isinstance(number, int) and 1 <= number <= MOST_ROUNDS:
            return number
    group = message.metadata.group_id
    return int(group) if re.fullmatch(r"[1-9]\d{0,5}", group or "") else None


def _pair(sent: Mapping[str, Arrays], came: Mapping[str, Arrays]) -> tuple[str, str]:
    """The names of the records of weights: alike in names and shapes, else called the same, else the largest."""

    def size(arrays: Arrays) -> int:
        return sum(len(array.data) for array in arrays.values())

    def shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
        return {name: tuple(array.shape) for name, array in arrays.items()}

    pairs = [(s, c) for s in sent for c in came]
    return max(
        pairs,
        key=lambda p: (shapes(sent[p[0]]) == shapes(came[p[1]]), p[0] == p[1], size(came[p[1]]) + size(sent[p[0]])),
    )


def _equal(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(one[k].data == other[k].data for k in one)


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Arrays as they came.

    Raises:
        _Unreadable: one is no array of numbers that the tape can hold.
    """
    tensors = {}
    for name, array in arrays.items():
        try:
            if array.stype != SType.NUMPY:
                raise ValueError(f"it is serialised as {array.stype!r}, not as a NumPy array")
            npy_header(array.data)  # checks the claimed size before memory is taken for it
            tensors[name] = torch.from_numpy(array.numpy())
        except Exception as error:  # a client's bytes can raise anything
            raise _Unreadable(f"array {name[:60]!r} cannot be read: {error}"[:200]) from error
    return tensors


def _examples(reply: Message) -> int | None:
    """How many examples a client says that it trained on; None if it gives no whole positive number."""
    for record in reply.content.metric_records.values():
        for key in EXAMPLES:
            count = record.get(key)
            if isinstance(count, int | float) and 1 <= count < 2**53 and count == int(count):
                return int(count)
    return None


def _mean(weighted: float, weights: float) -> float | None:
    return weighted / weights if math.isfinite(weighted) else None


def _worth_keeping(metrics: MetricRecord) -> Iterator[tuple[str, object]]:
    """The metrics that a run shows, None for what is not finite; names and lists of any length would come from one client."""
    for name, value in metrics.items():
        numbers = value if isinstance(value, list) else [value]
        if len(name) <= MOST_LETTERS and len(numbers) <= MOST_METRICS:
            finite = [n if math.isfinite(n) else None for n in numbers]
            yield name, finite if isinstance(value, list) else finite[0]


def test_figures(metrics: Mapping[str, Mapping[str, object]]) -> tuple[float | None, float | None]:
    """Accuracy in [0, 1] and loss among what an app returned, the server's first; None: nothing has such a name."""
    accuracy = _named(_ACCURACY, metrics)
    if accuracy is not None and accuracy > 1:  # in percent
        accuracy /= 100
    return accuracy if accuracy is not None and 0 <= accuracy <= 1 else None, _named(_LOSS, metrics)


def _named(pattern: re.Pattern[str], metrics: Mapping[str, Mapping[str, object]]) -> float | None:
    for who in (SERVER, EVALUATION):
        for name, value in metrics.get(who, {}).items():
            if pattern.search(name.lower()) and isinstance(value, int | float):
                return float(value)
    return None
