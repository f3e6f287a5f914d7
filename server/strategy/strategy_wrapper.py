"""The base class of strategies that wrap another one and change only its training."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy


class Wrapper(Strategy):
    """Passes evaluation and summary on to the wrapped strategy; subclasses define the training methods."""

    inner: Strategy

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's."""
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The wrapped strategy's."""
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """The wrapped strategy's."""
        self.inner.summary()
