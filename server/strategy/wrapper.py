"""A strategy round another one, which does as that one wherever it has no say of its own."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy


class Wrapper(Strategy):
    """Hands evaluation and the summary on; what it changes of training a subclass says."""

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
