"""The tap's recorder, in a user's own app: messages sent and received, unchanged; the audit interprets them.

A message is looked at in the app's own thread, which costs microseconds; files and ledger are written in a thread of the recorder.
"""

import atexit
import json
import math
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from torch import Tensor

from fedgauge.attacks.plan import AttackPlan
from fedgauge.client.arrays import npy_array
from fedgauge.client.components import SpecError, coerce, settings_of
from fedgauge.server.store.ledger_types import DEPLOYMENT, EMPTY, Participation
from fedgauge.server.store.run import BASE, Run
from fedgauge.server.store.scenario import TapeOptions, run_command
from fedgauge.server.store.tape import DTYPES
from fedgauge.server.views.outcomes import none_accepted

MOST_WAITING = 1 << 30  # bytes of replies that wait to be written; while there are more, replies lose their arrays
MOST_ROUNDS = 10**6  # a larger number in a message is not a round
EXAMPLES = ("num-examples", "num_examples", "examples", "num-samples", "num_samples", "samples")  # as apps call them


class _Array(NamedTuple):
    """An array at the time it passed; its bytes cannot change."""

    shape: tuple[int, ...]
    data: bytes


Arrays = Mapping[str, _Array]


@dataclass(eq=False)
class _Sent:
    """A message on its way to a node.

    Args:
        given: the round that the app names; None: it names none.
        arrays: by record.
        round: as recorded; 0: the message trains nothing.
        id: by which its reply names it, if the grid returned one.
    """

    metadata: Any
    node: int
    type: str
    given: int | None
    arrays: Mapping[str, Arrays]
    round: int = 0
    id: str = ""

    @classmethod
    def of(cls, message: Message) -> "_Sent":
        metadata, kind = message.metadata, message.metadata.message_type
        arrays = _arrays(message.content) if kind.partition(".")[0] == "train" else {}
        return cls(metadata, metadata.dst_node_id, kind, _round_of(message), arrays)

    def answered_by(self, message_id: str) -> bool:
        return message_id != "" and message_id in (self.id, self.metadata.message_id)


@dataclass(frozen=True, eq=False)
class _Reply:
    """A reply; `error` says why there is no content, and is None if there is."""

    asked: str
    node: int
    error: str | None
    arrays: Mapping[str, Arrays] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    crowded: bool = False  # its arrays were left out

    @classmethod
    def of(cls, message: Message) -> "_Reply":
        asked, node = message.metadata.reply_to_message_id, message.metadata.src_node_id
        if message.has_error():
            return cls(asked, node, ((message.error.reason or "").strip() or "error").splitlines()[-1])
        records = [record for record in message.content.values() if isinstance(record, MetricRecord)]
        return cls(asked, node, None, _arrays(message.content), {k: v for r in records for k, v in _numbers(r).items()})

    @property
    def size(self) -> int:
        return sum(map(_size, self.arrays.values()))

    @property
    def examples(self) -> int | None:
        """Return the client's number of training examples; None if it gives no positive integer."""
        counts = (self.metrics.get(key, 0) for key in EXAMPLES)
        return next((int(n) for n in counts if 1 <= n < 2**53 and n == int(n)), None)


# something to do in the writer's thread: its name, the act, and the bytes that it holds in memory until then
_Task = tuple[str, Callable[[], object], int]


class AppRecorder:
    """Records what passes a tap. Its methods may be called from any thread, and none of them raises.

    Args:
        run: a new one.
        tables: the audit file as parsed; nothing in it is built.
        base: the folder from which the audit file's relative paths start.
        allow: further packages, for the command that is logged at the end.
    """

    def __init__(self, run: Run, tables: Mapping[str, Any], base: Path, allow: Sequence[str]) -> None:
        self._run, self._command = run, run_command("audit", run.folder.absolute(), tables, allow)
        self._ledger, self._tape = run.ledger(), run.tape()
        self._lock = ExitStack()
        self._lock.enter_context(run.lock("training"))
        self._process = os.getpid()
        # a garbage collection in any line of the app may end a tap: a simple queue takes its last task without a lock
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="fedgauge-recorder", daemon=True)
        self._waiting, self._counting = 0, threading.Lock()  # bytes that wait to be written
        self._closed = False
        # from here on used by the writer alone
        self._clients: dict[int, int] = {}  # by node, in the order in which nodes are first asked to train
        self._open: dict[int, list[_Sent]] = defaultdict(list)  # messages without a reply, by node
        self._counts = _RoundNumbers()
        self._recorded: dict[int, int] = {}  # by the app's number of a round, the latest round for it
        self._written: dict[int, tuple[Arrays, str]] = {}  # by round, the weights in its file and the file's digest
        self._seen: dict[int, dict[int, Participation]] = {}  # by round and client, to be entered
        self._tests: list[tuple[float, float | None, float | None]] = []  # of the round: examples, accuracy, loss
        self._round = 0  # the newest, to which metrics belong
        self._news = False  # since the round was last entered
        self._began = time.perf_counter()  # of this round
        self._taped = 0
        self._others: set[str] = set()  # types of messages that trained nothing
        self._silence = "no reply"  # why an open message has no row
        self._warned: set[str] = set()
        self._plan = _kept(tables)
        rounds = tables.get("rounds")
        planned = rounds if type(rounds) is int and 0 < rounds <= MOST_ROUNDS else 0
        self._ledger.set_meta(mode=DEPLOYMENT, state="training", rounds=str(planned), **{BASE: str(base)})
        self._writer.start()
        atexit.register(self.close)

    def warn(self, code: str, words: str, round: int | None = None, client: int | None = None) -> None:
        """Log a problem, once for each code, and keep it for the audit."""
        if code not in self._warned:
            self._warned.add(code)
            say(WARNING, "fedgauge: %s", words)
        try:
            self._ledger.add_problem(code, words, round, client)
        except Exception as error:  # the app goes on, whatever the reason
            if "ledger" not in self._warned:
                self._warned.add("ledger")
                say(WARNING, "fedgauge: the ledger cannot be written: %s", error)

    def evaluated(self, metrics: Mapping[int, MetricRecord]) -> None:
        """Record what the app's server computed on its own, by the app's rounds."""
        figures = {round: test_figures(_numbers(record)) for round, record in metrics.items()}
        self.later("evaluation", partial(self._enter_figures, figures))

    def close(self, state: str = "trained") -> None:
        """Record that the app's training is over, once, and log the command that attacks what was recorded."""
        self.end(state)
        if threading.current_thread() is not self._writer:
            self._writer.join()

    def end(self, state: str = "trained") -> None:
        """Close without waiting, as a garbage collection must: the writer may need a lock of the interrupted thread."""
        self.later("the end", partial(self._close, state))

    def later(self, what: str, act: Callable[[], object], size: int = 0) -> None:
        """Do something in the writer's thread, in the order of the calls; nothing after the end."""
        if self._closed or os.getpid() != self._process:  # a forked child records nothing
            return
        if size:
            with self._counting:
                self._waiting += size
        self._tasks.put((what, act, size))

    def reply(self, reply: _Reply, exchange: Sequence[_Sent]) -> None:
        """Record a reply; without its arrays while more than MOST_WAITING bytes are unwritten, as the app must not wait."""
        if self._waiting > MOST_WAITING:
            reply = replace(reply, arrays={}, crowded=bool(reply.arrays))
        self.later("a reply", partial(self.note_reply, reply, exchange), reply.size)

    # ------------------------------------------------------------------------------------- in the writer's thread

    def _write(self) -> None:
        while not self._closed:
            self._do(*self._tasks.get())

    def _do(self, what: str, act: Callable[[], object], size: int) -> None:
        try:
            act()
        except Exception as error:  # whatever it is, the app must not notice
            self.warn("recorder", f"{what} is not recorded: {type(error).__name__}: {error}")
        finally:
            with self._counting:
                self._waiting -= size

    def note_sent(self, sent: _Sent) -> None:
        """Note a message; one that carries weights to be trained gets its round."""
        if sent.arrays:
            sent.round = self._counts.of(sent.node, sent.given)
            self._clients.setdefault(sent.node, len(self._clients))
            if sent.round > self._round:
                self._round, self._tests, self._began = sent.round, [], time.perf_counter()
            if sent.given is not None:
                self._recorded[sent.given] = sent.round
                if sent.round != sent.given:
                    self.warn("rounds", f"the app's round {sent.given} is recorded as round {sent.round}")
        else:
            self._others.add(sent.type)
        self._open[sent.node].append(sent)

    def note_reply(self, reply: _Reply, exchange: Sequence[_Sent]) -> None:
        sent = self._asked(reply, exchange)
        if sent is None:
            return
        self._open[sent.node].remove(sent)
        if reply.error is not None:
            self._enter_missing(sent, reply.error, silent=False)
            return
        if sent.round:
            self._record(sent, reply)
        elif reply.arrays:
            why = "without weights having been sent: no attack here inverts them"
            if sent.type.partition(".")[0] != "train":
                why = "and are not recorded: only messages of type train are"
            self.warn(f"arrays:{sent.type}", f"replies to {sent.type!r} carry arrays {why}")
        if sent.type.partition(".")[0] == "evaluate":
            self._news = True
            self._tests.append((float(reply.examples or 1), *test_figures(reply.metrics)))

    def _asked(self, reply: _Reply, exchange: Sequence[_Sent]) -> _Sent | None:
        """The message that a reply answers: by its id, else by its node among those of the same call."""
        own = self._open.get(reply.node, [])
        if found := next((s for s in own if s.answered_by(reply.asked)), None):
            return found
        if found := next((s for s in own if s in exchange), None):
            return found
        others = (s for of_node in self._open.values() for s in of_node)  # the SuperLink answers for dead nodes
        return next((s for s in others if s.answered_by(reply.asked)), None)

    def _record(self, sent: _Sent, reply: _Reply) -> None:
        client, why, digest = self._clients[sent.node], "", None
        if not reply.arrays:
            lacks = f"{MOST_WAITING >> 20} MiB of earlier replies were not yet written: use a faster disk for the run"
            why = f"not recorded: {lacks if reply.crowded else 'its reply carries no arrays'}"
            self.warn("crowded" if reply.crowded else "reply", f"an update is {why}", sent.round, client)
            self._enter(sent.round, Participation(client, "accepted", why, reply.examples))
            return
        if self._plan is not None and self._taped and client not in self._plan.targets(sent.round, [client]):
            self._enter(sent.round, Participation(client, "accepted", examples=reply.examples))
            return
        try:
            of_sent, of_reply = _pair(sent.arrays, reply.arrays)
            if others := [f"{name:.60}" for name in reply.arrays if name != of_reply]:
                self.warn(
                    "records", f"replies carry further records, which are not recorded: {', '.join(others)}"[:250]
                )
            of_round = self._write_sent(sent.round, client, sent.arrays[of_sent])
            update = self._tape.write_update(sent.round, client, _tensors(reply.arrays[of_reply]))
            digest = f"{of_round}:{update}"
            self._taped += 1
        except Exception as error:  # a client's bytes and a full disk can raise anything; the row must stay
            why = f"not recorded: {error.strerror if isinstance(error, OSError) and error.strerror else error}"[:250]
            self.warn("disk" if isinstance(error, OSError) else "reply", f"an update is {why}", sent.round, client)
        self._enter(sent.round, Participation(client, "accepted", why, reply.examples, digest))

    def _write_sent(self, round: int, client: int, arrays: Arrays) -> str:
        """The digest of the weights that a client was sent: the round's file, or its own if they differ."""
        if round not in self._written:
            self._written[round] = arrays, self._tape.write_round(round, _tensors(arrays), {})
        base, digest = self._written[round]
        for old in [r for r in self._written if r < self._round - 1]:
            self._written[old] = {}, self._written[old][1]  # later replies get a file of their own
        return digest if base == arrays else self._tape.write_round(round, _tensors(arrays), {}, client)

    def _enter(self, round: int, seen: Participation) -> None:
        self._news = True
        self._seen.setdefault(round, {})[seen.client] = seen

    def _enter_missing(self, sent: _Sent, reason: str, silent: bool) -> None:
        if sent.round:
            self._counts.unanswered(sent.node, sent.round)
            self._enter(sent.round, Participation(self._clients[sent.node], "missing", reason, silent=silent))

    def note_unread(self, words: str) -> None:
        """Note that replies may have come which were not read."""
        self._silence = "its reply was not read"
        self.warn("collection", words)

    def end_exchange(self, exchange: Sequence[_Sent]) -> None:
        """Record which nodes have not answered when the call returns."""
        for sent in exchange:
            if sent in self._open[sent.node]:
                self._open[sent.node].remove(sent)
                self._enter_missing(sent, self._silence, silent=True)
        self._flush()

    def _flush(self) -> None:
        for round in sorted(self._seen):
            self._ledger.record_intake(round, list(self._seen[round].values()))
            del self._seen[round]  # only now: what failed is tried again
        if self._round and self._news:
            self._news = False
            nodes = {str(client): str(node) for node, client in self._clients.items()}
            self._ledger.set_meta(nodes=json.dumps(nodes))
            accuracy, loss = (_mean([(test[0], test[place]) for test in self._tests]) for place in (1, 2))
            self._ledger.record_round(self._round, accuracy, loss, time.perf_counter() - self._began)

    def _enter_figures(self, figures: Mapping[int, tuple[float | None, float | None]]) -> None:
        """Enter the server's own accuracy and loss, by the app's rounds, in place of its clients'."""
        self._flush()
        rows = {row["round"]: row for row in self._ledger.rounds()}
        for given, (accuracy, loss) in figures.items():
            if (row := rows.get(self._recorded.get(given, given))) is not None:
                tested = row["accuracy"] if accuracy is None else accuracy, row["loss"] if loss is None else loss
                self._ledger.record_round(row["round"], *tested, row["seconds"])

    def _close(self, state: str) -> None:
        try:
            self.end_exchange([sent for of_node in self._open.values() for sent in of_node])
            if state == "trained" and (why := none_accepted(self._ledger, ended=True)):
                state = "failed"
                if not self._clients:
                    kinds = ", ".join(sorted(self._others)) or "none was read"
                    why = f"no round got an update: no message of type train carried arrays (messages: {kinds})"
                self._ledger.set_meta(**{EMPTY: why})
            self._ledger.set_meta(state=state, rounds=str(self._round))
            folder = self._run.folder.absolute()
            if self._taped:
                say(
                    INFO, "fedgauge recorded %d updates in %s. Attack them with: %s", self._taped, folder, self._command
                )
            else:
                say(WARNING, "fedgauge recorded no update in %s; for the reason: %s", folder, self._command)
        finally:
            self._closed = True
            self._lock.close()
            self._ledger.close()
            atexit.unregister(self.close)


class Exchange:
    """One call of a grid: the messages that pass in it, and their replies; the tap lives as long as these may still be read."""

    def __init__(self, recorder: AppRecorder, tapped: object) -> None:
        self._recorder, self._tapped = recorder, tapped
        self._sent: list[_Sent] = []

    def sent(self, message: Message) -> None:
        with _unnoticed():
            sent = _Sent.of(message)
            self._sent.append(sent)
            self._recorder.later("a message", partial(self._recorder.note_sent, sent))

    def pushed(self, ids: Sequence[Any]) -> None:
        """Note the ids by which the replies will be pulled."""
        if len(ids) == len(self._sent):
            for sent, own in zip(self._sent, ids, strict=True):
                sent.id = str(own)

    def came(self, message: Message) -> None:
        with _unnoticed():
            self._recorder.reply(_Reply.of(message), self._sent)

    def unread(self, kind: str) -> None:
        """Warn that messages passed in a collection which is left unread, as reading it might change it."""
        words = f"messages in a {kind} are not recorded: use a list, tuple, set, dict or iterator"
        self._recorder.later("a warning", partial(self._recorder.note_unread, words))

    def over(self) -> None:
        """Record which nodes have not answered, and write all to the ledger."""
        self._recorder.later("a round", partial(self._recorder.end_exchange, self._sent))

    def flush(self) -> None:
        self._recorder.later("a round", self._recorder._flush)


class _RoundNumbers:
    """Rounds as the app counts them, else counted; one that a node has answered, or an earlier number, begins a new round."""

    def __init__(self) -> None:
        self._last = 0
        self._given: int | None = None  # the app's number of the last round
        self._nodes: set[int] = set()  # asked in it

    def of(self, node: int, given: int | None) -> int:
        if not self._last or node in self._nodes or given not in (None, self._given):
            self._last, self._given, self._nodes = max(self._last + 1, given or 0), given, set()
        self._nodes.add(node)
        return self._last

    def unanswered(self, node: int, round: int) -> None:
        """Note that a node did not answer: if it is asked once more in this round, it is the same round."""
        if round == self._last:
            self._nodes.discard(node)


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Log what goes wrong, whatever it is: the app must not notice."""
    try:
        yield
    except Exception as error:
        say(WARNING, "fedgauge: a message is not recorded: %s: %s", type(error).__name__, error)


def say(level: int, text: str, *values: object) -> None:
    """Log to Flower's log; a handler of the app's that raises is not the app's concern here."""
    with suppress(Exception):
        log(level, text, *values)


def _arrays(content: RecordDict) -> dict[str, Arrays]:
    return {
        name: {k: _Array(tuple(a.shape), a.data) for k, a in record.items()}
        for name, record in content.items()
        if isinstance(record, ArrayRecord) and record
    }


def _round_of(message: Message) -> int | None:
    """The round that a message names: `server-round` in its configuration, else its group id."""
    for record in message.content.values():
        number = record.get("server-round") if isinstance(record, ConfigRecord) else None
        if isinstance(number, int) and 1 <= number <= MOST_ROUNDS:
            return number
    group = message.metadata.group_id
    return int(group) if re.fullmatch(r"[1-9]\d{0,5}", group or "") else None


def _size(arrays: Arrays) -> int:
    return sum(len(array.data) for array in arrays.values())


def _kept(tables: Mapping[str, Any]) -> AttackPlan | None:
    """Return the updates that the audit file selects; None: all, also if the file is invalid."""
    with suppress(SpecError):
        if settings_of(TapeOptions, tables.get("tape", {}), "[tape]").keep != "all":
            audit = coerce(tables.get("audit", {}), dict, "[audit]")
            rounds, clients = (coerce(audit.get(key), tuple[int, ...] | None, key) for key in ("rounds", "clients"))
            return AttackPlan((), rounds, max(1, coerce(audit.get("every", 1), int, "every")), clients)
    return None


def _pair(sent: Mapping[str, Arrays], came: Mapping[str, Arrays]) -> tuple[str, str]:
    """The names of the records of weights: alike in names and shapes, else called the same, else larger, else of larger norm."""
    forms = [{k: a.shape for k, a in arrays.items()} for arrays in sent.values()]
    twins = any(forms.count(form) > 1 for form in forms)  # otherwise nothing needs reading

    def fit(pair: tuple[str, str]) -> tuple[bool, bool, int, float]:
        one, other = sent[pair[0]], came[pair[1]]
        alike = {k: a.shape for k, a in one.items()} == {k: a.shape for k, a in other.items()}
        norm = sum(float(t.double().norm()) for t in _tensors(one).values()) if twins else 0.0
        return alike, pair[0] == pair[1], _size(one) + _size(other), norm

    return max(((s, c) for s in sent for c in came), key=fit)


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Arrays as they came.

    Raises:
        ValueError: one is no array of numbers that the tape can hold.
    """
    tensors = {}
    for name, array in arrays.items():
        try:
            tensors[name] = torch.from_numpy(npy_array(array.data))
            _ = DTYPES[tensors[name].dtype]
        except Exception as error:  # a client's bytes can raise anything
            raise ValueError(f"array {name[:60]!r} cannot be read: {error}"[:200]) from error
    return tensors


def _numbers(metrics: MetricRecord) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if isinstance(v, int | float)}


def _mean(weighted: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the weighted mean of the known values, as Flower's strategies compute it."""
    known = [(weight, value) for weight, value in weighted if value is not None]
    return sum(weight * value for weight, value in known) / sum(weight for weight, _ in known) if known else None


def test_figures(metrics: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Return the accuracy in [0, 1] and the loss among a client's metrics, by their names; None without one."""
    named: dict[str, float] = {}
    for name, value in metrics.items():
        for part in re.split(r"[^a-z]+", name.lower().replace("accuracy", "acc")):
            if math.isfinite(value):
                named.setdefault(part, value)
    accuracy = named.get("acc", -1.0)
    if accuracy > 1:
        accuracy /= 100  # in percent
    return accuracy if 0 <= accuracy <= 1 else None, named.get("loss")
