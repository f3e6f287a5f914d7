"""The validator checks every reply before the strategy or the curious server uses it.

Clients answer with updates (foreign ClientApps with weights), while Flower's strategies expect weights. The validator
remembers what was sent, checks names, shapes, dtypes and finiteness, hands theta + update to the wrapped strategy in a
stable order, and records what it rejected. A bad reply excludes its client from the round and never ends the round. What was
aggregated is checked, too: replies that make it unusable are left out, and if that does not help the round is undone.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from logging import WARNING
from typing import Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedgauge.client.deployment.guard import WITHHELD
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import seed_of
from fedgauge.client.update import Params, average
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.scenario import ValidatorOptions
from fedgauge.server.strategy import evaluation, reply_checks, round_checks
from fedgauge.server.strategy.aggregation import Aggregate, Aggregation
from fedgauge.server.strategy.guard_check import GuardCheck
from fedgauge.server.strategy.ordered_grid import OrderedGrid
from fedgauge.server.strategy.reply_checks import MOST_EXAMPLES, AcceptedReply, GuardReport, ReplyRejected
from fedgauge.server.strategy.secure_aggregation import SUMMED
from fedgauge.server.strategy.strategy_state import StateSnapshot

WEIGHT = "num-examples"
OUT = "out of all proportion"
MOST_NAMED = 10  # of a group's clients, in a sentence
CLIENT_ABSENT = "it was not connected when the round began"


@dataclass(frozen=True, eq=False)
class RoundReplies:
    """One round as the validator saw it: what was sent, the accepted replies by client, and why the others have none.

    Args:
        sent: by client, the weights of the clients that were sent others than params. For a secure sum: by its first client,
            and only if no member was sent params.
        notes: sentences on what was wrong with the round as a whole.
        usual_norm: the largest median so far of a round's norms of accepted updates.
        summed: clients whose updates are part of another client's reply.
    """

    round: int
    params: Params
    buffers: Mapping[str, Tensor]
    accepted: tuple[AcceptedReply, ...]
    refused: tuple[Participation, ...]
    sent: Mapping[int, Params] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    usual_norm: float = 0.0
    summed: frozenset[int] = frozenset()


class UpdateValidator(Strategy):
    """A strategy that wraps another one and passes on checked replies only.

    Args:
        inner: any of Flower's strategies; it gets weights, as it expects.
        record: called once per round with the replies, before aggregation.
        buffers: floating-point buffers of the model, sent beside the weights and averaged if clients return them.
        seed: client sampling is drawn from it and the round.
        clients: node id -> client number; an unknown node gets the next free number.
        replies: what clients answer with: updates (fedgauge's ClientApp) or weights (other ClientApps).
        protocol: of a simulation. If it has a [secure_sum], the validator simulates it: `record` and the wrapped strategy see
            only the mean of a group's updates, as the reply of its first client.
        strict: nodes that are not in clients take no part.
        counts: whether the wrapped strategy averages a client's reply in a round, and so its buffers; None: always.
        options: bounds on a reply.
        usable: why the model cannot be trained with some weights and buffers; empty if it can.
        guards: what honest clients' guards would make of the next weights; None: they are not asked.
        groups: of a round, whose updates come together as the reply of one of them; default: those of the protocol's sum.
    """

    def __init__(
        self,
        inner: Strategy,
        record: Callable[[RoundReplies], None] = lambda intake: None,
        buffers: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        clients: Mapping[int, int] | None = None,
        replies: Literal["updates", "weights"] = "updates",
        protocol: Protocol | None = None,
        strict: bool = False,
        counts: Callable[[int, int], bool] | None = None,
        options: ValidatorOptions | None = None,
        usable: Callable[[Params, Mapping[str, Tensor]], str] = lambda params, buffers: "",
        guards: GuardCheck | None = None,
        groups: Callable[[int], Sequence[Sequence[int]]] | None = None,
    ) -> None:
        self.inner = inner
        self.options = options or ValidatorOptions()
        self.usable = usable
        self.guards = guards
        self.usual_norm = 0.0  # the largest median of a round's norms; to be set where a training continues
        self.strict = strict
        self.counts = counts or (lambda round, client: True)
        self.record = record
        self.buffers = dict(buffers or {})
        self.seed = seed
        self.clients = dict(clients or {})
        self.replies = replies
        self.protocol = protocol
        summed = protocol is not None and protocol.secure_sum is not None
        self.groups = protocol.groups if groups is None and protocol is not None and summed else groups
        self._params: Params = {}
        self._sent: dict[int, Params] = {}  # by client, if the wrapped strategy sends it other weights
        self._asked: set[int] = set()  # node ids
        self._evaluating: set[int] | None = None  # node ids; None: the wrapped strategy's own loop chose them
        self.evaluation_notes: list[str] = []  # on the latest evaluation's replies
        self._away: set[int] = set()  # clients
        self._forgiven: set[str] = set()  # of the wrapped strategy's state
        self._trusted: tuple[Params, Mapping[str, Tensor], StateSnapshot] | None = None  # what most clients trained on
        self._refusing: set[int] = set()  # clients that withheld what most trained on, since they last answered
        self._large: set[int] = set()  # clients that made the others hardly count, and were named

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the wrapped strategy choose clients; remember what was sent, and to whom.

        Raises:
            ValueError: the strategy would fail over arrays of such dtypes, or they cannot be checked.
        """
        self._params = dict(arrays.to_torch_state_dict())
        round_checks.check_kinds(self.inner, self._params)
        random.seed(seed_of(self.seed, "sample", server_round))  # Flower's strategies sample with the global generator
        messages = list(
            self.inner.configure_train(
                server_round, arrays, config, OrderedGrid(grid, self._client, self.clients if self.strict else None)
            )
        )
        buffers = ArrayRecord(self.buffers)
        for message in messages:
            if "config" in message.content.config_records:  # a user's strategy may have another name for it
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
        """Check and record the replies, and pass the accepted ones on as weights, ordered by client."""
        received = list(replies)
        passed, rejected = self._checked(received)
        sent = self._sent
        if self.protocol is not None and self.protocol.secure_sum is not None:
            sent = self._sent_to_groups(self.protocol, server_round, [reply.client for reply, _ in passed])
            passed, alone = self._summed(self.protocol, server_round, passed)
            rejected |= alone
        else:  # of a deployment's sum each reply is the mean of several already
            rejected = {client: self._as_group(server_round, p) for client, p in rejected.items()}
        passed, unlike, outsized = self._alike(passed)
        rejected |= {client: self._as_group(server_round, p) for client, p in unlike.items()}
        notes = [f"round {server_round}: client {p.client}: {rejected[p.client].reason}" for p in outsized]
        try:
            result, left_out, found = self._aggregated(server_round, passed, received)
            notes += found
            passed = [pair for i, pair in enumerate(passed) if i not in left_out]
            rejected |= {p.client: self._as_group(server_round, p) for p in left_out.values()}
            named = [(p.client, self._group_words(server_round, p.client)) for p in left_out.values()]
            notes += [f"round {server_round}: client {client}: {words}" for client, words in named if words]
            if result.arrays is not None:  # what a round that was undone brought is nobody's measure
                norms = [round_checks.norm(reply.update) for reply, _ in passed]
                self.usual_norm = max(self.usual_norm, round_checks.usual_norm(norms))
            notes += [f"round {server_round}: {share}" for share in self._large_shares(passed)]
        finally:  # whatever the wrapped strategy raises, the replies are recorded
            refused = (*rejected.values(), *self._missing(received))
            accepted = tuple(reply for reply, _ in passed)
            summed = frozenset(
                self._client(m.metadata.src_node_id)
                for m in received
                if m.has_error() and m.error.code == SUMMED and m.metadata.src_node_id in self._asked
            )
            facts = (dict(self.buffers), accepted, refused, sent, tuple(notes), self.usual_norm, summed)
            self.record(RoundReplies(server_round, self._params, *facts))
        self.buffers = result.buffers
        return result.arrays, result.metrics

    def _aggregated(
        self, round: int, passed: Sequence[tuple[AcceptedReply, Message]], received: Sequence[Message]
    ) -> tuple[Aggregate, dict[int, Participation], list[str]]:
        """As `Aggregation.of`; the latest weights on which most clients trained, if those of this round turned most away.

        An owner's audit, or bound on the norm, may withhold the update of every round: who withholds where most train, or
        at weights from which there is no way back, is not turned away by later ones until it has answered again.
        """
        codes = {m.metadata.src_node_id: m.error.code if m.has_error() else None for m in received}
        asked = {self._client(node): codes[node] for node in self._asked & codes.keys()}
        honest = {client: code for client, code in asked.items() if client not in self._sent}
        answered = {client for client, code in honest.items() if code in (None, SUMMED)}
        withheld = {client for client, code in honest.items() if code == WITHHELD}
        turned = withheld - self._refusing
        self._refusing -= answered
        if self._trusted is not None and len(turned) > max(len(answered), 1):  # one alone takes nothing back
            return self._taken_back(round, passed, *self._trusted)
        sent = self._params, dict(self.buffers)
        aggregation = Aggregation(self.inner, round, *sent, self.usable, self.counts, self._forgiven)
        if self.guards is not None and not self._sent:  # replies to crafted weights may move them anywhere
            aggregation = replace(aggregation, refused=partial(self.guards.alarms, round, self._params))
        made = aggregation.of(passed)
        if self._trusted is None or len(turned) < len(answered):
            self._refusing |= withheld
            self._trusted = (*sent, aggregation.state)
        return made

    def _taken_back(
        self,
        round: int,
        passed: Sequence[tuple[AcceptedReply, Message]],
        params: Params,
        buffers: Mapping[str, Tensor],
        state: StateSnapshot,
    ) -> tuple[Aggregate, dict[int, Participation], list[str]]:
        """As `Aggregation.of`, with earlier weights, buffers and state, and none of the replies."""
        self._trusted = None  # there is no way further back
        state.restore()
        why = "most clients withhold their updates, so the weights are again the latest on which most trained"
        note = f"round {round}: {why}, and no update of this round counts"
        log(WARNING, "fedgauge: %s", note)
        refused = {
            i: Participation(reply.client, "rejected", f"left out, as {why}") for i, (reply, _) in enumerate(passed)
        }
        return Aggregate(ArrayRecord(params), None, dict(buffers)), refused, [note]

    def _checked(
        self, received: Sequence[Message]
    ) -> tuple[list[tuple[AcceptedReply, Message]], dict[int, Participation]]:
        """Each reply by itself: those that pass, ordered by client and as weights, and by client those that do not."""
        answers = Counter(m.metadata.src_node_id for m in received if not m.has_error())
        passed: list[tuple[AcceptedReply, Message]] = []
        rejected: dict[int, Participation] = {}
        for message in received:
            if message.has_error():
                continue
            node = message.metadata.src_node_id
            client = self._client(node)
            try:
                if answers[node] > 1:  # which one came first is chance, so neither counts
                    raise ReplyRejected(f"the client answered {answers[node]} times")
                reply, weights = self._check(client, message)
            except ReplyRejected as reason:
                rejected[client] = Participation(client, "rejected", str(reason))
                continue
            message.content = self._rebuilt(message.content, weights)  # so that memory does not hold all replies twice
            passed.append((reply, message))
        return sorted(passed, key=lambda pair: pair[0].client), rejected

    def _rebuilt(self, content: RecordDict, weights: Params) -> RecordDict:
        """A checked reply as the wrapped strategy gets it, its arrays in the order and dtypes that were sent.

        Strategies take arrays by position, and the first reply's dtype for the sum.
        """
        (metrics, figures), *_ = content.metric_records.items()
        if self.replies == "updates":
            return RecordDict({"arrays": ArrayRecord(weights), "metrics": figures})
        (name,) = [name for name in content.array_records if name != "buffers"]
        return RecordDict({**content.config_records, name: ArrayRecord(weights), metrics: figures})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's, with the same order of nodes."""
        random.seed(seed_of(self.seed, "sample evaluate", server_round))
        messages = list(
            self.inner.configure_evaluate(
                server_round, arrays, config, OrderedGrid(grid, self._client, self.clients if self.strict else None)
            )
        )
        self._evaluating = {message.metadata.dst_node_id for message in messages}
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The wrapped strategy's, over replies ordered by client, without those that spoil it; None if it fails."""
        # a dead node's error comes from the SuperLink, which is not a client
        ordered = sorted(replies, key=lambda m: self.clients.get(m.metadata.src_node_id, math.inf))
        asked, self._evaluating = self._evaluating, None
        key, most = self._weight_key, self.options.max_examples or MOST_EXAMPLES
        metrics, self.evaluation_notes = evaluation.aggregate(
            self.inner, server_round, ordered, asked, self.clients, key, most
        )
        return metrics

    def summary(self) -> None:
        """The wrapped strategy's."""
        self.inner.summary()

    @property
    def _weight_key(self) -> str:
        return str(getattr(round_checks.innermost(self.inner), "weighted_by_key", WEIGHT))

    def _client(self, node: int) -> int:
        if node not in self.clients:
            self.clients[node] = max(self.clients.values(), default=-1) + 1
        return self.clients[node]

    def _check(self, client: int, message: Message) -> tuple[AcceptedReply, Params]:
        """The reply's update, and the weights that the wrapped strategy expects.

        Raises:
            ReplyRejected: it says what is wrong.
        """
        if message.metadata.src_node_id not in self._asked:
            raise ReplyRejected("the client was not asked in this round")
        records = dict(message.content.array_records)
        buffers = records.pop("buffers", None)
        if len(records) != 1:
            raise ReplyRejected(f"expected one ArrayRecord of weights, got {sorted(records) or 'none'}")
        tensors = reply_checks.tensors_of(next(iter(records.values())), self._params, loose=self.replies == "weights")
        sent = self._sent.get(client)
        weights: Params = tensors  # as they came: theta + (weights - theta) would add rounding errors
        if self.replies == "updates":
            update = tensors
        else:
            update = {k: reply_checks.difference(t, (sent or self._params)[k]) for k, t in tensors.items()}
        if self.replies == "updates" or sent is not None:
            weights = {k: t + self._params[k] for k, t in update.items()}
        weights = {k: t.to(self._params[k].dtype) for k, t in weights.items()}
        for name in tensors:
            if not (torch.isfinite(update[name]).all() and torch.isfinite(weights[name]).all()):
                raise ReplyRejected(f"{name} overflows the weights")
        key = WEIGHT if self.replies == "updates" else self._weight_key
        examples = reply_checks.examples_of(message, key, self.options.max_examples or MOST_EXAMPLES)
        returned = reply_checks.tensors_of(buffers, self.buffers) if buffers is not None else {}
        reply_checks.check_variances(returned, self.buffers)
        return AcceptedReply(client, update, examples, returned, GuardReport.of(message)), weights

    def _alike(
        self, passed: list[tuple[AcceptedReply, Message]]
    ) -> tuple[list[tuple[AcceptedReply, Message]], dict[int, Participation], list[Participation]]:
        """The replies within bounds, the rejections, and those of them that stand out of all proportion to weights and others."""
        replies = [reply for reply, _ in passed]
        norms, limit = [round_checks.norm(reply.update) for reply in replies], self.options.max_norm
        # weights that a malicious server crafted may bring any update
        honest = [i for i, reply in enumerate(replies) if reply.client not in self._sent]
        large = round_checks.outsized([norms[i] for i in honest], round_checks.norm(self._params), self.usual_norm)
        moved = [round_checks.norm(reply.moved(self.buffers)) for reply in replies]
        far = round_checks.outsized([moved[i] for i in honest], round_checks.norm(self.buffers), 0.0)
        sent = [self._sent.get(reply.client, self._params) for reply in replies]
        updates, examples = [reply.update for reply in replies], [reply.examples for reply in replies]
        negative = round_checks.negative_variances(updates, sent, examples) if self.replies == "weights" else {}
        reasons = {i: f"{name} is negative, and it is a variance" for i, name in negative.items()}
        usual = max(self.usual_norm, round_checks.usual_norm(norms))
        words = f"others' usual one is {usual:.3g}" if usual else "there is no other to compare it with"
        for i, is_large, is_far in zip(honest, large, far, strict=True):
            if is_large and limit is None:
                reasons[i] = f"its update's norm is {norms[i]:.3g}, {OUT} ({words})"
            elif is_far:
                reasons[i] = f"it moves the model's buffers by {moved[i]:.3g}, {OUT} to the others' steps"
        outsized = reasons.keys() - negative.keys()
        for i, n in enumerate(norms):
            if limit is not None and n > limit:
                outsized -= {i}
                reasons[i] = f"its update's norm is {n:.3g}, above [validator] max_norm = {limit:g} ({words})"
        kept = [pair for i, pair in enumerate(passed) if i not in reasons]
        refused = {i: Participation(replies[i].client, "rejected", reason) for i, reason in reasons.items()}
        return kept, {p.client: p for p in refused.values()}, [refused[i] for i in refused if i in outsized]

    def _large_shares(self, passed: Sequence[tuple[AcceptedReply, Message]]) -> list[str]:
        """Sentences on clients that make the others hardly count, the first time that they do."""
        clients, found = [reply.client for reply, _ in passed], dict[int, str]()
        if round_checks.may_weigh_by_examples(self.inner):
            found = round_checks.large_share(clients, [reply.examples for reply, _ in passed])
        if key := getattr(round_checks.innermost(self.inner), "train_loss_key", None):
            losses = [reply_checks.metrics_of(message).get(key) for _, message in passed]
            found |= round_checks.odd_losses(clients, losses, key)
        new = [sentence for client, sentence in found.items() if client not in self._large]
        self._large |= found.keys()
        return new

    def _altered(self, messages: Iterable[Message], arrays: ArrayRecord) -> dict[int, Params]:
        """By client, the weights of messages that carry other weights than the federation's."""
        altered = {}
        for message in messages:
            key = getattr(round_checks.innermost(self.inner), "arrayrecord_key", "arrays")
            record = message.content.array_records.get(key, arrays)
            # strategies pass on the same record object, so only a different one needs comparing
            if record is arrays or record.keys() != arrays.keys():
                continue
            if any(record[name].data != arrays[name].data for name in arrays):
                altered[self._client(message.metadata.dst_node_id)] = dict(record.to_torch_state_dict())
        return altered

    def _sent_to_groups(self, protocol: Protocol, round: int, present: Sequence[int]) -> dict[int, Params]:
        """By first client, what was sent to the groups of which no member got the federation's weights."""
        sent = {}
        for group in protocol.groups(round):
            members = [client for client in group if client in present]
            altered = [self._sent[client] for client in members if client in self._sent]
            if altered and len(altered) == len(members):
                sent[members[0]] = altered[0]
        return sent

    def _summed(
        self, protocol: Protocol, round: int, passed: list[tuple[AcceptedReply, Message]]
    ) -> tuple[list[tuple[AcceptedReply, Message]], dict[int, Participation]]:
        """One reply for each group that has a sum, and the rejections of the groups that have none."""
        replies = {reply.client: (reply, message) for reply, message in passed}
        merged: list[tuple[AcceptedReply, Message]] = []
        alone: dict[int, Participation] = {}
        for group in protocol.groups(round):
            present = [replies[client] for client in group if client in replies]
            reason = _no_sum(protocol, round, group, [reply.client for reply, _ in present])
            if reason:
                alone |= {reply.client: Participation(reply.client, "rejected", reason) for reply, _ in present}
            elif present:
                merged.append(self._merged(*zip(*present, strict=True)))
        return sorted(merged, key=lambda pair: pair[0].client), alone

    def _group_words(self, round: int, client: int) -> str:
        """That a reply is of several clients; empty if it is of one."""
        group = next((g for g in self.groups(round) if client in g), ()) if self.groups is not None else ()
        others = len(group) - MOST_NAMED
        named = ", ".join(map(str, group[:MOST_NAMED])) + (f" and {others} more" if others > 0 else "")
        return f"it is the mean of clients {named}, not one client's update" if len(group) > 1 else ""

    def _as_group(self, round: int, rejected: Participation) -> Participation:
        """A rejection that blames no single client for the sum of several."""
        words = self._group_words(round, rejected.client)
        return replace(rejected, reason=f"{words}: {rejected.reason}") if words else rejected

    def _merged(self, replies: Sequence[AcceptedReply], messages: Sequence[Message]) -> tuple[AcceptedReply, Message]:
        """The mean of a group's updates, weighted by examples, as its first client's message; other metrics are dropped."""
        examples = [reply.examples for reply in replies]
        returned = all(reply.buffers for reply in replies)
        update = average([reply.update for reply in replies], examples)
        buffers = average([dict(reply.buffers) for reply in replies], examples) if returned else {}
        arrays = ArrayRecord({k: t + update[k] for k, t in self._params.items()})
        message = messages[0]
        message.content = RecordDict({"arrays": arrays, "metrics": MetricRecord({WEIGHT: sum(examples)})})
        report = GuardReport.together({reply.client: reply.guard for reply in replies if reply.guard is not None})
        return AcceptedReply(replies[0].client, update, sum(examples), buffers, report), message

    def _absent(self, grid: Grid) -> set[int]:
        """The protocol's clients that are not connected; empty if the federation's nodes are not all known."""
        if not self.strict or self.protocol is None:
            return set()
        connected = self._asked.union(grid.get_node_ids()) & self.clients.keys()
        return set(range(self.protocol.clients)) - {self.clients[node] for node in connected}

    def _missing(self, received: list[Message]) -> list[Participation]:
        """Clients that were asked and did not answer, or answered with an error; and clients that were not connected."""
        errors = {m.metadata.src_node_id: m.error for m in received if m.has_error()}
        reasons = {node: (error.reason or "").strip() or "error" for node, error in errors.items()}
        withheld = {self._client(node) for node, error in errors.items() if error.code == WITHHELD}
        # the SuperLink reports a dead node under an id of its own
        unplaced = [r for node, r in reasons.items() if node not in self._asked]
        answered = {m.metadata.src_node_id for m in received if not m.has_error()}
        silent = "no reply" + (f" ({unplaced[0].splitlines()[0]})" if unplaced else "")
        missing = {c: Participation(c, "missing", CLIENT_ABSENT) for c in self._away}
        for node in self._asked - answered:
            client, reason = self._client(node), reasons.get(node, silent).splitlines()[-1]
            alarm = True if client in withheld else None
            missing[client] = Participation(client, "missing", reason, alarm=alarm, silent=node not in reasons)
        return [missing[client] for client in sorted(missing)]


def _no_sum(protocol: Protocol, round: int, group: Sequence[int], present: Sequence[int]) -> str:
    """Why a group has no sum although clients answered; empty if it has one."""
    assert protocol.secure_sum is not None
    least = protocol.secure_sum.least
    if 0 < len(present) < least:
        return f"no secure sum: {len(present)} of its group's {len(group)} clients answered, fewer than the threshold {least}"
    if present and (failed := sorted(set(protocol.members(group[0], round)) - set(present))):
        # an audit recomputes who was summed from the scenario, which only knows about stragglers
        return f"no secure sum: client {failed[0]} of its group failed, and it is not one of the scenario's stragglers"
    return ""
