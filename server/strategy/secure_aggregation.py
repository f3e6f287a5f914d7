"""The server's side of a secure sum: the wrapped Flower strategy gets one reply per group of clients."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedgauge.client.deployment.secure_sum import PairwiseMasking, Record
from fedgauge.client.deployment.secure_sum_mod import WEIGHT, read, to_config_record
from fedgauge.client.inspection.policy import REASON, WITHHELD
from fedgauge.client.mods import only_arrays
from fedgauge.server.strategy.strategy_wrapper import Wrapper

SUMMED = 101  # our error codes: the client's update is part of another reply
NO_SUM = 102  # its group has no sum


@dataclass(eq=False)
class SecureSumStrategy(Wrapper):
    """A strategy that wraps another one: `SecureSumStrategy(FedAvg(), PairwiseMasking(group=5, clip=0.1))`.

    Clients need the mod fedgauge.client.deployment.secure_sum_mod.secure_sum with the same protocol. The wrapped strategy
    gets a group's mean update as its first client's reply, with the examples of all and no other metric. For each other
    client it gets an error that says where the update is. A curious strategy goes inside and sees no more than that.

    Args:
        inner: chooses clients and aggregates.
        replies: what the inner strategy expects and the ClientApp answers with.
        timeout: seconds that clients have to answer a question without training.
        groups: of the nodes that the wrapped strategy chose: which of them are summed together, at most `group` and
            at least `least` in each; the others are left out. Default: the fewest groups that hold all, in the nodes' order.
    """

    inner: Strategy
    protocol: PairwiseMasking
    replies: Literal["updates", "weights"] = "weights"
    timeout: float = 600.0
    groups: Callable[[Sequence[int]], Sequence[Sequence[int]]] | None = None

    def __post_init__(self) -> None:
        self._groups: list[_Group] = []
        self._left_out: list[Message] = []
        self._grid: Grid | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the wrapped strategy choose clients; the groups agree on masks before they train."""
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        sent = {message.metadata.dst_node_id: message for message in messages}
        chosen = list(fewest_groups(list(sent), self.protocol)) if self.groups is None else self.groups(list(sent))
        parts = [[sent.pop(node) for node in nodes] for nodes in chosen if len(nodes) >= self.protocol.least]
        self._grid, self._left_out = grid, list(sent.values())
        self._groups = [_Group(self.protocol, part) for part in parts]
        for _ in ("keys", "shares"):
            self._collect(grid.send_and_receive(self._questions(), timeout=self.timeout))
        return [group.training(m) for group in self._groups for m in group.questions]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Unmask each group's sum and pass it on."""
        assert self._grid is not None, "configure_train comes first"
        self._collect(list(replies))
        while questions := self._questions():
            self._collect(self._grid.send_and_receive(questions, timeout=self.timeout))
        merged = [reply for group in self._groups for reply in group.outcome(self.replies)]
        few = f"left out of this round: too few clients are left for another group of {self.protocol.least}"
        merged += [Message(Error(NO_SUM, few), reply_to=message) for message in self._left_out]
        self._groups, self._left_out = [], []  # a sum is as large as the model
        return self.inner.aggregate_train(server_round, merged)

    def _questions(self) -> list[Message]:
        return [group.question(m) for group in self._groups for m in group.questions]

    def _collect(self, replies: Iterable[Message]) -> None:
        replies = list(replies)
        answers = {m.metadata.src_node_id: _answer(m) for m in replies if not m.has_error()}
        withheld = {m.metadata.src_node_id for m in replies if m.has_error() and m.error.code == WITHHELD}
        for group in self._groups:
            group.withheld |= withheld
            group.collect(answers)


class _Group:
    """One group in one round: what it was sent, the next question to each member, and finally its sum or why there is none."""

    def __init__(self, protocol: PairwiseMasking, sent: Sequence[Message]) -> None:
        self.sent = {message.metadata.dst_node_id: message for message in sent}
        self.weights = only_arrays(sent[0])[1].to_torch_state_dict()
        size = sum(t.numel() for t in self.weights.values() if t.is_floating_point())
        self._server = protocol.rounds(list(self.sent), size)
        self.questions: Mapping[int, Record] = next(self._server)
        self.total: Any = None
        self.reason = ""
        self.withheld = set[int]()  # nodes whose guards let no update leave

    def question(self, node: int) -> Message:
        sent = self.sent[node]
        content = RecordDict({**sent.content.config_records, **to_config_record(self.questions[node])})
        return Message(content, dst_node_id=node, message_type=sent.metadata.message_type)

    def training(self, node: int) -> Message:
        message = self.sent[node]
        # strategies share one content object among all clients
        message.content = RecordDict({**message.content, **to_config_record(self.questions[node])})
        return message

    def collect(self, answers: Mapping[int, Record]) -> None:
        """Take the answers and prepare the next question; a finished group has none."""
        if not self.questions:
            return
        try:
            self.questions = self._server.send({m: answers[m] for m in self.questions if m in answers})
        except StopIteration as end:
            self.questions, self.total = {}, end.value
        except ValueError as error:  # e.g. too few clients are left: the group has no sum, and the round goes on
            self.questions, self.reason = {}, str(error)

    def outcome(self, replies: str) -> Iterator[Message]:
        """The replies that the wrapped strategy gets."""
        members: tuple[int, ...] = () if self.total is None else self.total.members
        fate = f"in a secure sum of {len(members)} clients" if members else f"no secure sum: {self.reason}"
        lost = "dropped out of its secure sum"
        for node, message in self.sent.items():
            if self.total is not None and node == members[0]:
                yield Message(self._content(self.total, replies), reply_to=message)
            elif node in members:
                yield Message(Error(SUMMED, fate), reply_to=message)
            elif node in self.withheld:
                yield Message(Error(WITHHELD, REASON), reply_to=message)
            else:
                yield Message(Error(NO_SUM, lost if members else fate), reply_to=message)

    def _content(self, total: Any, replies: str) -> RecordDict:
        """The mean update, or theta plus the mean update; integer weights stay as they were sent."""
        floating = {k: t for k, t in self.weights.items() if t.is_floating_point()}
        parts = torch.from_numpy(total.mean).split([t.numel() for t in floating.values()])
        update = {k: part.view(t.shape) for (k, t), part in zip(floating.items(), parts, strict=True)}
        if replies == "weights":
            merged = {k: (t.double() + update[k]).to(t.dtype) if k in update else t for k, t in self.weights.items()}
        else:
            merged = {k: part.to(floating[k].dtype) for k, part in update.items()}
        arrays = ArrayRecord({k: t.contiguous() for k, t in merged.items()})
        return RecordDict({"arrays": arrays, "metrics": MetricRecord({WEIGHT: total.examples})})


def fewest_groups(nodes: Sequence[int], protocol: PairwiseMasking) -> Iterator[Sequence[int]]:
    """The fewest groups that hold all clients, in order and of nearly equal size; clients beyond full groups are left out."""
    count = min(math.ceil(len(nodes) / protocol.group), len(nodes) // protocol.least)
    left = nodes[: count * protocol.group]
    while count:
        size = math.ceil(len(left) / count)
        yield left[:size]
        left, count = left[size:], count - 1


def _answer(message: Message) -> Record:
    """A client's answer; empty if it cannot be decoded."""
    try:
        return read(message.content)
    except Exception:  # hostile bytes can raise anything; their sender counts as one that dropped out
        return {}
