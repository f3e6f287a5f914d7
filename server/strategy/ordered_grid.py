"""Flower's grid with its nodes in the order of client numbers, as node ids are random in every run."""

from collections.abc import Callable, Container, Iterable

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run


class OrderedGrid(Grid):
    """A grid that lists its nodes by client number."""

    def __init__(self, grid: Grid, client: Callable[[int], int], only: Container[int] | None = None) -> None:
        self._grid = grid
        self._client = client
        self._only = only  # if given, only these nodes

    def get_node_ids(self) -> Iterable[int]:
        nodes = (n for n in self._grid.get_node_ids() if self._only is None or n in self._only)
        return sorted(sorted(nodes), key=self._client)

    def get_nodes(self) -> Iterable[NodeInfo]:
        nodes = (n for n in self._grid.get_nodes() if self._only is None or n.node_id in self._only)
        return sorted(nodes, key=lambda node: self._client(node.node_id))

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self._grid.send_and_receive(messages, timeout=timeout)
