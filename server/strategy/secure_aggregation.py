"""The server of a secure sum: any Flower strategy, handed one reply for each group of clients in the place of theirs."""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from torch import Tensor

from fedgauge.client.deployment.secure_sum_mod import WEIGHT, Record, read, to_config_record
from fedgauge.server.strategy.wrapper import Wrapper

SUMMED = 101  # error codes of our own: the client's update is in another reply
NO_SUM = 102  # its group has none


class GroupSum(Protocol):
    """What the server learns of a group."""

    @property
    def mean(self) -> NDArray[np.float64]:
        """(size,) of the updates, weighed by their examples."""

    @property
    def examples(self) -> int:
        """Of all of them."""

    @property
    def members(self) -> tuple[int, ...]:
        """Whose updates they are."""


class SecureSumServer(Protocol):
    """The server's side of a protocol, as fedgauge.defenses.secure_sum.PairwiseMasking has it."""

    @property
    def group(self) -> int:
        """The most clients in one sum."""

    @property
    def least(self) -> int:
        """The fewest."""

    def rounds(self, members: Sequence[int], size: int) -> Generator[dict[int, Record], Mapping[int, Record], GroupSum]:
        """Four questions by member; is sent the answers that came; the third question trains. ValueError: no sum."""


class SecureSumStrategy(Wrapper):
    """A strategy that wraps another one: `SecureSumStrategy(FedAvg(), PairwiseMasking(group=5, clip=0.1))`.

    The clients' mod is fedgauge.client.deployment.secure_sum_mod.secure_sum with the same protocol. The wrapped strategy sees the mean update of a group as
    the reply of its first client, with the examples of all and no other metric; of each other client an error that says where
    its update is. A curious one goes inside: it sees no more.

    Args:
        inner: chooses clients and aggregates.
        replies: what the inner strategy expects, and the clients' ClientApp answers with.
        timeout: seconds that clients have to answer a question that does not train.
    """

    def __init__(
        self,
        inner: Strategy,
        protocol: SecureSumServer,
        replies: Literal["updates", "weights"] = "weights",
        timeout: float = 600.0,
    ) -> None:
        self.inner = inner
        self.protocol = protocol
        self.replies = replies
        self.timeout = timeout
        self._groups: list[_Group] = []
        self._left_out: list[Message] = []
        self._grid: Grid | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the wrapped strategy choose clients, and have the groups agree on masks before they train."""
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        parts = list(_parts(messages, self.protocol))
        self._grid = grid
        self._groups = [_Group(self.protocol, part) for part in parts]
        self._left_out = messages[sum(map(len, parts)) :]
        for _ in ("keys", "shares"):
            self._hear(grid.send_and_receive(self._questions(), timeout=self.timeout))
        return [group.training(m) for group in self._groups for m in group.questions]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Unmask each group's sum and hand it on."""
        assert self._grid is not None, "configure_train comes first"
        self._hear(list(replies))
        self._hear(self._grid.send_and_receive(self._questions(), timeout=self.timeout))
        merged = [reply for group in self._groups for reply in group.outcome(self.replies)]
        few = f"left out of this round: with it no group would have {self.protocol.least} clients"
        merged += [Message(Error(NO_SUM, few), reply_to=message) for message in self._left_out]
        self._groups, self._left_out = [], []  # a sum is as large as the model
        return self.inner.aggregate_train(server_round, merged)

    def _questions(self) -> list[Message]:
        return [group.question(m) for group in self._groups for m in group.questions]

    def _hear(self, replies: Iterable[Message]) -> None:
        answers = {m.metadata.src_node_id: _answer(m) for m in replies if not m.has_error()}
        for group in self._groups:
            group.hear(answers)


class _Group:
    """One group in one round: what it was sent, the next question to each member, and in the end its sum or why there is none."""

    def __init__(self, protocol: SecureSumServer, sent: Sequence[Message]) -> None:
        self.sent = {message.metadata.dst_node_id: message for message in sent}
        self.weights = _tensors(sent[0])
        size = sum(t.numel() for t in self.weights.values() if t.is_floating_point())
        self._server = protocol.rounds(list(self.sent), size)
        self.questions: Mapping[int, Record] = next(self._server)
        self.total: GroupSum | None = None
        self.reason = ""

    def question(self, node: int) -> Message:
        """The next question to a member, in a message of its own; it names the round, as training messages do."""
        sent = self.sent[node]
        content = RecordDict({**sent.content.config_records, **to_config_record(self.questions[node])})
        return Message(content, dst_node_id=node, message_type=sent.metadata.message_type)

    def training(self, node: int) -> Message:
        """The training message to a member, with the question in it."""
        message = self.sent[node]
        # strategies send one and the same content to all clients
        message.content = RecordDict({**message.content, **to_config_record(self.questions[node])})
        return message

    def hear(self, answers: Mapping[int, Record]) -> None:
        """Go on to the next question; a group that has ended has none."""
        if not self.questions:
            return
        try:
            self.questions = self._server.send({m: answers[m] for m in self.questions if m in answers})
        except StopIteration as end:
            self.questions, self.total = {}, end.value
        except ValueError as error:  # e.g. too few are left: the group has no sum, the round goes on
            self.questions, self.reason = {}, str(error)

    def outcome(self, replies: str) -> Iterator[Message]:
        """What the wrapped strategy is handed."""
        members = () if self.total is None else self.total.members
        told = f"in a secure sum of {len(members)} clients" if members else f"no secure sum: {self.reason}"
        lost = "dropped out of its secure sum"
        for node, message in self.sent.items():
            if self.total is not None and node == members[0]:
                yield Message(self._content(self.total, replies), reply_to=message)
            elif node in members:
                yield Message(Error(SUMMED, told), reply_to=message)
            else:
                yield Message(Error(NO_SUM, lost if members else told), reply_to=message)

    def _content(self, total: GroupSum, replies: str) -> RecordDict:
        """The mean update, or theta + it; integers among the weights stay as they were sent."""
        floating = {k: t for k, t in self.weights.items() if t.is_floating_point()}
        parts = torch.from_numpy(total.mean).split([t.numel() for t in floating.values()])
        update = {k: part.view(t.shape) for (k, t), part in zip(floating.items(), parts, strict=True)}
        if replies == "weights":
            merged = {k: (t.double() + update[k]).to(t.dtype) if k in update else t for k, t in self.weights.items()}
        else:
            merged = {k: part.to(floating[k].dtype) for k, part in update.items()}
        arrays = ArrayRecord({k: t.contiguous() for k, t in merged.items()})
        return RecordDict({"arrays": arrays, "metrics": MetricRecord({WEIGHT: total.examples})})


def _parts(messages: Sequence[Message], protocol: SecureSumServer) -> Iterator[Sequence[Message]]:
    """As few groups as hold all clients, in their order and of nearly equal size; clients beyond full groups are left out."""
    count = min(math.ceil(len(messages) / protocol.group), len(messages) // protocol.least)
    left = list(messages[: count * protocol.group])
    while count:
        size = math.ceil(len(left) / count)
        yield left[:size]
        left, count = left[size:], count - 1


def _tensors(message: Message) -> dict[str, Tensor]:
    records = dict(message.content.array_records)
    if len(records) != 1:
        raise ValueError(f"a secure sum wants exactly one ArrayRecord in a message, got {sorted(records) or 'none'}")
    return dict(next(iter(records.values())).to_torch_state_dict())


def _answer(message: Message) -> Record:
    """A client's answer; none where it cannot be decoded."""
    try:
        return read(message.content)
    except Exception:  # hostile bytes raise whatever they like; who sends them has dropped out, and is counted so
        return {}
