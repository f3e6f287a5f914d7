"""What hostile input is tried on: a validator with one honest client beside, and how much is tried."""

import os
from collections.abc import Iterable, Iterator

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from hypothesis import HealthCheck, settings

from fedgauge.server.strategy.reply_checks import CheckedStrategy, RoundReplies
from fedgauge.simulations.run.in_memory import MemoryGrid, flower
from tests.wire import travel

EXAMPLES = int(os.environ.get("FEDGAUGE_FUZZ", "100"))  # at each place
settings.register_profile(
    "fuzz",
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize="FEDGAUGE_FUZZ" not in os.environ,  # who asks for a number of inputs gets new ones each time
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Nodes(MemoryGrid):
    """A grid that only says who is there."""

    def __init__(self, clients: int) -> None:
        self.clients = {client + 1: client for client in range(clients)}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.clients)


class Doorway:
    """A validator that has asked two clients: 0 is honest, 1 is not."""

    PARAMS = {"weight": torch.linspace(-1, 1, 6).reshape(2, 3), "bias": torch.tensor([0.5, -0.5])}
    UPDATE = {k: 0.1 * torch.ones_like(t) for k, t in PARAMS.items()}

    def __init__(self, clients: int = 2) -> None:
        self.intakes: list[RoundReplies] = []
        grid = Nodes(clients)
        self.validator = CheckedStrategy(
            FedAvg(1.0, 0.0, 1, 0, clients), self.intakes.append, seed=1, clients=grid.clients
        )
        sent = self.validator.configure_train(1, ArrayRecord(self.PARAMS), ConfigRecord(), grid)
        self.asked = {grid.clients[m.metadata.dst_node_id]: travel(m) for m in sent}

    def reply(self, client: int, content: RecordDict) -> Message:
        return travel(Message(content, reply_to=self.asked[client]))

    def honest(self, client: int = 0) -> Message:
        arrays = ArrayRecord({k: Array(t.numpy()) for k, t in self.UPDATE.items()})
        return self.reply(client, RecordDict({"update": arrays, "metrics": MetricRecord({"num-examples": 2})}))

    def answer(self, *replies: Message) -> dict[str, torch.Tensor] | None:
        arrays, _ = self.validator.aggregate_train(1, replies)
        return dict(arrays.to_torch_state_dict()) if arrays else None


@pytest.fixture(autouse=True)
def identity() -> Iterator[None]:
    """Outside a run, Flower's messages need to know who writes them."""
    with flower():
        yield


@pytest.fixture
def doorway() -> type[Doorway]:
    return Doorway
