"""flowertune: FedAvg that counts what travels."""

from collections.abc import Iterable
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg


class CommunicationTracker:
    def __init__(self):
        self.curr_comm_cost = 0.0

    def track(self, messages: list[Message]) -> None:
        size = sum(array.count_bytes() for msg in messages for array in msg.content.array_records.values()) / 1024**2
        self.curr_comm_cost += size
        log(INFO, "Communication budget: used %.2f MB (+%.2f MB this round)", self.curr_comm_cost, size)


class FlowerTuneLlm(FedAvg):
    """FedAvg that tracks the communication cost."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.comm_tracker = CommunicationTracker()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.comm_tracker.track(messages)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]):
        replies = list(replies)
        self.comm_tracker.track(replies)
        return super().aggregate_train(server_round, replies)
