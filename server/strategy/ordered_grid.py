"""Flower's grid with its nodes in the order of client numbers, as node ids are random in every run."""

from collections.abc import Callable, Container, Iterable
from typing import Any

from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid


class OrderedGrid:
    """A grid that lists its nodes by client number, and does all else as the grid does.

    Args:
        only: if given, the only nodes that it lists.
    """

    def __init__(self, grid: Grid, client: Callable[[int], int], only: Container[int] | None = None) -> None:
        self._grid, self._client, self._only = grid, client, only

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_node_ids(self) -> Iterable[int]:
        nodes = (n for n in self._grid.get_node_ids() if self._only is None or n in self._only)
        return sorted(sorted(nodes), key=self._client)

    def get_nodes(self) -> Iterable[NodeInfo]:
        nodes = (n for n in self._grid.get_nodes() if self._only is None or n.node_id in self._only)
        return sorted(nodes, key=lambda node: self._client(node.node_id))
