"""A trial of a strategy of Flower: a round of small replies, of which it must make new weights."""

from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedgauge.client.deployment.secure_sum_mod import WEIGHT
from fedgauge.simulations.run.in_memory import flower


class _Nodes:
    """A grid that lists some nodes and has nobody to ask."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_node_ids(self) -> range:
        return range(1, self.count + 1)


def aggregated(strategy: Strategy, clients: int, most: int) -> bool:
    """Whether a strategy makes finite, new weights of the replies of the clients that it chooses, or of the first of them."""
    start = ArrayRecord({"w": Array(np.zeros(3))})  # the last of which no client moves
    with flower(), np.errstate(all="ignore"):
        sent = list(strategy.configure_train(1, start, ConfigRecord(), cast(Grid, _Nodes(clients))))[:most]
        replies = []
        for k, message in enumerate(sent):
            arrays = ArrayRecord({"w": Array(np.array([1.0 + k, 2.0, 0.0]))})
            content = RecordDict({"arrays": arrays, "metrics": MetricRecord({WEIGHT: 1})})
            replies.append(Message(content, reply_to=message))
        found, _ = strategy.aggregate_train(1, replies)
    made = found["w"].numpy() if found else np.zeros(3)
    return bool(np.isfinite(made).all() and made[:2].all())
