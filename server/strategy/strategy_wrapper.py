"""Around a strategy, and around its grid: wrappers that change one thing and pass on the rest."""

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy


class Wrapper(Strategy):
    """Passes evaluation and summary on to the wrapped strategy; subclasses define the training methods."""

    inner: Strategy

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.inner.summary()


class OrderedGrid:
    """A grid that lists the known nodes by client number, as node ids are random, and does all else as the grid does."""

    def __init__(self, grid: Grid, clients: Mapping[int, int]) -> None:
        self._grid, self._clients = grid, clients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self._clients.keys() & set(self._grid.get_node_ids()), key=self._clients.__getitem__)
