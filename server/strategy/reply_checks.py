"""The one check at the border of a scenario's own server: every reply by its header, then by its values.

A bad reply is dropped, recorded with its reason, and shown. If the aggregate is not finite, or there is none, the round is undone
and named.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from statistics import median_low
from typing import cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedgauge.client.inspection.policy import WITHHELD
from fedgauge.client.mods import tensors_of
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import seed_of
from fedgauge.client.update import Params, Update, average
from fedgauge.server.store.ledger_types import Participation, sanitised
from fedgauge.server.store.scenario import ValidatorOptions
from fedgauge.server.strategy.secure_aggregation import SUMMED
from fedgauge.server.strategy.strategy_wrapper import OrderedGrid, Wrapper

WEIGHT = "num-examples"
MOST_EXAMPLES = 10**9  # that one client may claim if the server does not know better
OUTSIZED = 1000  # times the norm of the weights and the round's usual norm: no training gets there in a round
CLIENT_ABSENT = "it was not connected when the round began"


@dataclass(frozen=True)
class GuardReport:
    """A client guard's report on the weights that it was sent; it may be false.

    Args:
        alarm: None: no guard said anything.
    """

    words: str
    alarm: bool | None

    @classmethod
    def of(cls, message: Message) -> "GuardReport | None":
        """The report in a reply; None if there is none, or it is not one that a guard writes."""
        said = message.content.config_records.get("guard", ConfigRecord())
        words, alarm = said.get("words"), said.get("alarm")
        return cls(f"guard: {words}", alarm) if isinstance(words, str) and isinstance(alarm, bool) else None

    @classmethod
    def together(cls, reports: Mapping[int, "GuardReport"]) -> "GuardReport | None":
        """The report on a sum, by its clients' reports."""
        if not reports:
            return None
        words = "; ".join(f"client {client}: {report.words}" for client, report in reports.items())
        return cls(words, any(report.alarm for report in reports.values()))


@dataclass(frozen=True, eq=False)
class AcceptedReply:
    client: int
    update: Update
    examples: int
    buffers: Mapping[str, Tensor]
    guard: GuardReport | None = None


@dataclass(frozen=True, eq=False)
class RoundReplies:
    """One round as the server saw it: what was sent, the accepted replies by client, and why the others have none.

    Args:
        sent: by client, the weights of the clients that were sent others than params. For a secure sum: by its first client,
            and only if no member was sent params.
        undone: why the round was undone; empty if it counts.
        summed: clients with updates inside another client's reply.
    """

    round: int
    params: Params
    buffers: Mapping[str, Tensor]
    accepted: tuple[AcceptedReply, ...]
    refused: tuple[Participation, ...]
    sent: Mapping[int, Params] = field(default_factory=dict)
    undone: str = ""
    summed: frozenset[int] = frozenset()


Passed = list[tuple[AcceptedReply, Message]]


@dataclass(eq=False)
class CheckedStrategy(Wrapper):
    """A strategy that wraps another one and passes on checked replies, as weights, ordered by client.

    Args:
        inner: any of Flower's strategies; it gets weights, as it expects.
        record: called once per round with the replies.
        buffers: floating-point buffers of the model, sent with the weights and averaged if clients return them.
        seed: client sampling is drawn from it and the round.
        clients: node id -> client number; other nodes take no part.
        protocol: of a simulation. If it has a [secure_sum], it is simulated here: `record` and the wrapped strategy see only
            the mean of a group's updates, as the reply of its first client.
        counts: whether the wrapped strategy averages a client's reply in a round, and so its buffers; default: always.
        options: bounds on a reply.
    """

    inner: Strategy
    record: Callable[[RoundReplies], object] = lambda intake: None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    seed: int = 0
    clients: dict[int, int] = field(default_factory=dict)
    protocol: Protocol | None = None
    counts: Callable[[int, int], bool] = lambda round, client: True
    options: ValidatorOptions = field(default_factory=ValidatorOptions)

    def __post_init__(self) -> None:
        self.buffers, self.clients = dict(self.buffers), dict(self.clients)
        self._params: Params = {}
        self._sent: dict[int, Params] = {}  # by client, if the wrapped strategy sends it other weights
        self._asked: set[int] = set()  # node ids
        self._away: set[int] = set()  # clients

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the wrapped strategy choose clients; remember what was sent to each client."""
        self._params = dict(arrays.to_torch_state_dict())
        random.seed(seed_of(self.seed, "sample", server_round))  # Flower's strategies sample with the global generator
        nodes = cast(Grid, OrderedGrid(grid, self.clients))
        messages = list(self.inner.configure_train(server_round, arrays, config, nodes))
        buffers = ArrayRecord(dict(self.buffers))
        for message in messages:
            message.content.config_records["config"]["server-round"] = server_round
            if buffers:
                message.content["buffers"] = buffers
        self._asked = {message.metadata.dst_node_id for message in messages}
        self._sent = self._altered(messages, arrays)
        self._away = self._absent(grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and record the replies, and pass the accepted ones on."""
        received = list(replies)
        passed, rejected = self._checked(received)
        sent = self._sent
        if self.protocol is not None and self.protocol.secure_sum is not None:
            passed, alone, sent = self._summed(self.protocol, server_round, passed)
            rejected |= alone
        passed, outsized = self._within_norm(passed)
        rejected |= outsized
        accepted = tuple(reply for reply, _ in passed)
        before = dict(self.buffers)
        arrays, metrics, undone = self._aggregated(server_round, passed, bool(rejected))
        if undone:
            undone += ", so the round was undone: the next begins with the same weights"
            log(WARNING, "fedgauge: round %d: %s", server_round, undone)
        summed = frozenset(
            self.clients[m.metadata.src_node_id]
            for m in received
            if m.has_error() and m.error.code == SUMMED and m.metadata.src_node_id in self._asked
        )
        refused = (*rejected.values(), *self._missing(received))
        self.record(RoundReplies(server_round, self._params, before, accepted, refused, sent, undone, summed))
        return arrays, metrics

    def _aggregated(
        self, round: int, passed: Passed, incomplete: bool
    ) -> tuple[ArrayRecord | None, MetricRecord | None, str]:
        """The next weights in the dtypes that were sent (FedAdam returns float64 under NumPy 2); or why the round is undone.

        Raises:
            Exception: the strategy's own, where no reply was refused, so that no client is the cause.
        """
        if not passed:
            return None, None, ""
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # looked for below
                arrays, metrics = self.inner.aggregate_train(round, [message for _, message in passed])
        except Exception as error:  # a strategy may need more replies than passed
            if not incomplete and len(passed) == len(self._asked):
                raise
            return None, None, f"the strategy failed ({sanitised(f'{type(error).__name__}: {error}')})"
        if arrays is None:
            counted = [reply for reply, _ in passed if self.counts(round, reply.client)]
            return None, metrics, f"the strategy aggregated nothing of {len(counted)} replies" if counted else ""
        weights = {k: t.to(self._params[k].dtype) for k, t in arrays.to_torch_state_dict().items()}
        buffers = self._averaged_buffers(round, [reply for reply, _ in passed])
        for name, t in (*weights.items(), *buffers.items()):
            if not torch.isfinite(t).all():
                return None, None, f"the aggregated {name} is not finite"
        self.buffers = buffers
        return ArrayRecord(weights), metrics, ""

    def _averaged_buffers(self, round: int, accepted: Sequence[AcceptedReply]) -> Mapping[str, Tensor]:
        returned = [a for a in accepted if a.buffers and self.counts(round, a.client)]
        if not returned:
            return self.buffers
        return average([dict(a.buffers) for a in returned], [a.examples for a in returned])

    def _checked(self, received: Sequence[Message]) -> tuple[Passed, dict[int, Participation]]:
        """Each reply by itself: those that pass, ordered by client and as weights, and by client those that do not."""
        passed: Passed = []
        rejected: dict[int, Participation] = {}
        for message in received:
            if message.has_error():
                continue
            client = self.clients[message.metadata.src_node_id]
            try:
                reply = self._check(client, message)
            except ValueError as reason:
                rejected[client] = Participation(client, "rejected", str(reason))
                continue
            message.content = self._as_weights(reply)
            passed.append((reply, message))
        return sorted(passed, key=lambda pair: pair[0].client), rejected

    def _check(self, client: int, message: Message) -> AcceptedReply:
        """The reply's update; ValueError says what is wrong."""
        records = dict(message.content.array_records)
        buffers = records.pop("buffers", None)
        if len(records) != 1:
            raise ValueError(f"expected one ArrayRecord of updates, got {sorted(records) or 'none'}")
        update = tensors_of(next(iter(records.values())), self._params)
        returned = tensors_of(buffers, self.buffers) if buffers is not None else {}
        return AcceptedReply(client, update, self._examples(message), returned, GuardReport.of(message))

    def _examples(self, message: Message) -> int:
        metrics, most = list(message.content.metric_records.values()), self.options.max_examples or MOST_EXAMPLES
        examples = metrics[0].get(WEIGHT) if len(metrics) == 1 else None
        if not isinstance(examples, int | float) or not 1 <= examples <= most or examples != int(examples):
            raise ValueError(f"{WEIGHT} must be a whole number from 1 to {most}, got {str(examples)[:40]}")
        return int(examples)

    def _as_weights(self, reply: AcceptedReply) -> RecordDict:
        """A reply as the wrapped strategy gets it: theta + update, in the order and dtypes that were sent."""
        weights = {k: (t + self._params[k]).to(self._params[k].dtype) for k, t in reply.update.items()}
        return RecordDict({"arrays": ArrayRecord(weights), "metrics": MetricRecord({WEIGHT: reply.examples})})

    def _within_norm(self, passed: Passed) -> tuple[Passed, dict[int, Participation]]:
        """Return the replies with norms within bounds, and the others by client."""
        norms = [norm(reply.update) for reply, _ in passed]
        # of an even number the lower middle, so that one of two cannot set it by being large
        usual = max(norm(self._params), median_low(norms) if norms else 0.0, 1.0)
        limit = OUTSIZED * usual if self.options.max_norm is None else self.options.max_norm
        within, outsized = [], {}
        for n, (reply, message) in zip(norms, passed, strict=True):
            # weights that a malicious server crafted may bring any update
            if n <= limit or reply.client in self._sent:
                within.append((reply, message))
            else:
                why = f"its update's norm is {n:.3g}, and the limit {limit:.3g} ([validator] max_norm)"
                outsized[reply.client] = Participation(reply.client, "rejected", why)
        return within, outsized

    def _altered(self, messages: Iterable[Message], arrays: ArrayRecord) -> dict[int, Params]:
        """By client, the weights of messages that carry other weights than the federation's."""
        altered = {}
        for message in messages:
            record = message.content.array_records["arrays"]
            # strategies pass on the same record object, so only a different one needs comparing
            if record is not arrays and any(record[name].data != arrays[name].data for name in arrays):
                altered[self.clients[message.metadata.dst_node_id]] = dict(record.to_torch_state_dict())
        return altered

    def _summed(
        self, protocol: Protocol, round: int, passed: Passed
    ) -> tuple[Passed, dict[int, Participation], dict[int, Params]]:
        """By groups: a reply for each sum, the rejections of those without, and what was sent where no client got the usual."""
        replies = {reply.client: (reply, message) for reply, message in passed}
        merged: Passed = []
        alone, sent = dict[int, Participation](), dict[int, Params]()
        for group in protocol.groups:
            if failed := [client for client in group if client not in replies]:  # an audit recomputes whole sums
                reason = f"no secure sum: client {failed[0]} sent no update"
                alone |= {client: Participation(client, "rejected", reason) for client in group if client in replies}
                continue
            merged.append(self._merged([replies[client] for client in group]))
            if self._sent.keys() >= set(group):
                sent[group[0]] = self._sent[group[0]]
        return sorted(merged, key=lambda pair: pair[0].client), alone, sent

    def _merged(self, group: Passed) -> tuple[AcceptedReply, Message]:
        replies, examples = [reply for reply, _ in group], [reply.examples for reply, _ in group]
        buffers = (
            average([dict(reply.buffers) for reply in replies], examples) if all(r.buffers for r in replies) else {}
        )
        guard = GuardReport.together({reply.client: reply.guard for reply in replies if reply.guard is not None})
        update = average([reply.update for reply in replies], examples)
        merged = AcceptedReply(replies[0].client, update, sum(examples), buffers, guard)
        group[0][1].content = self._as_weights(merged)
        return merged, group[0][1]

    def _absent(self, grid: Grid) -> set[int]:
        """The protocol's clients that are not connected."""
        if self.protocol is None:
            return set()
        connected = self._asked.union(grid.get_node_ids()) & self.clients.keys()
        return set(range(self.protocol.clients)) - {self.clients[node] for node in connected}

    def _missing(self, received: Sequence[Message]) -> list[Participation]:
        """Clients that were asked and did not answer, or answered with an error; and clients that were not connected."""
        errors = {m.metadata.src_node_id: m.error for m in received if m.has_error()}
        reasons = {node: ((error.reason or "").strip() or "error").splitlines()[-1] for node, error in errors.items()}
        # the SuperLink reports a dead node under an id of its own
        unplaced = next((f" ({reason})" for node, reason in reasons.items() if node not in self._asked), "")
        missing = {c: Participation(c, "missing", CLIENT_ABSENT) for c in self._away}
        for node in self._asked - {m.metadata.src_node_id for m in received if not m.has_error()}:
            client, reason = self.clients[node], reasons.get(node, f"no reply{unplaced}")
            alarm = True if node in errors and errors[node].code == WITHHELD else None
            missing[client] = Participation(client, "missing", reason, alarm=alarm, silent=node not in reasons)
        return [missing[client] for client in sorted(missing)]


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all tensors, in float64, where no float32 overflows."""
    parts = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors.values() if t.is_floating_point()]
    return float(torch.linalg.vector_norm(torch.stack(parts))) if parts else 0.0
