"""Strategies are refused before training if they could not aggregate, and only then."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from fedgauge.client.components import SpecError
from fedgauge.server.strategy.build import build_strategy
from fedgauge.simulations.run.in_memory import flower as as_server

CLIENTS = 7
# a strategy, an argument, its last allowed values and the first refused ones, with 7 replies a round
BORDERS = (
    ("FedAvg", "fraction_train", (0.01, 1.0), (0.0, -0.5, 1.01)),
    ("FedTrimmedAvg", "beta", (0.0, 0.49), (0.5, 0.9, -0.1)),
    ("Krum", "num_malicious_nodes", (0, 4), (5, 7, -1)),
    ("MultiKrum", "num_malicious_nodes", (0, 4), (5, 7, -1)),
    ("MultiKrum", "num_nodes_to_select", (1, 7), (0, 8, -1)),
    ("Bulyan", "num_malicious_nodes", (0, 1), (2, -1)),
    ("FedAvgM", "server_learning_rate", (0.01, 2.0), (0.0, -1.0)),
    ("FedAvgM", "server_momentum", (0.0, 0.99), (1.0, -0.1)),
    *((use, "eta", (0.01, 1.0), (0.0, -1.0)) for use in ("FedAdam", "FedAdagrad", "FedYogi")),
    *((use, "tau", (1e-9,), (0.0, -1e-9)) for use in ("FedAdam", "FedAdagrad", "FedYogi")),
    *((use, beta, (0.0, 0.99), (1.0, 1.5, -0.1)) for use in ("FedAdam", "FedYogi") for beta in ("beta_1", "beta_2")),
)  # fmt: skip


@pytest.mark.parametrize(("use", "name", "allowed", "refused"), BORDERS, ids=lambda v: v if isinstance(v, str) else "")
def test_the_borders_of_each_argument(use: str, name: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    for value in allowed:
        build_strategy({"use": use, name: value}, CLIENTS)
    for value in refused:
        with pytest.raises(SpecError, match=rf"\[strategy\]: .*{name}"):
            build_strategy({"use": use, name: value}, CLIENTS)


def test_the_replies_of_a_round_follow_from_fraction_minimum_and_secure_sum() -> None:
    bulyan = {"use": "Bulyan", "num_malicious_nodes": 1}
    build_strategy({**bulyan, "fraction_train": 0.5}, 14)
    build_strategy({**bulyan, "fraction_train": 0.5, "min_train_nodes": 7}, 13)
    for table, clients, groups in (({"fraction_train": 0.5}, 13, None), ({}, 14, 6), ({}, 6, None)):
        with pytest.raises(SpecError, match="num_malicious_nodes"):
            build_strategy({**bulyan, **table}, clients, groups=groups)
    with pytest.raises(SpecError, match="fraction_train"):
        build_strategy({"use": "FedAvg", "fraction_train": 0.2, "min_train_nodes": 0}, 4)
    build_strategy({"use": "FedAvg", "fraction_train": 0.25, "min_train_nodes": 0}, 4)


def aggregated(strategy: flower.Strategy, replies: int) -> np.ndarray[Any, Any] | None:
    """Weights after a round of different replies whose last weight never moved; None if the strategy gives none."""
    start = ArrayRecord({"w": Array(np.zeros(3))})
    grid = type("Grid", (), {"get_node_ids": lambda self: range(1, replies + 1)})()
    with as_server():
        sent = strategy.configure_train(1, start, ConfigRecord(), grid)
        answers = [
            Message(
                RecordDict(
                    {
                        "arrays": ArrayRecord({"w": Array(np.array([1.0 + k, 2.0, 0.0]))}),
                        "metrics": MetricRecord({"num-examples": 1}),
                    }
                ),
                reply_to=m,
            )
            for k, m in enumerate(sent)
        ]
        try:
            arrays, _ = strategy.aggregate_train(1, answers)
        except Exception:  # whichever error Flower raises: it does not aggregate
            return None
    return arrays["w"].numpy() if arrays else None


@pytest.mark.parametrize(("use", "name", "good", "bad"), [
    ("Bulyan", "num_malicious_nodes", 1, 2), ("MultiKrum", "num_nodes_to_select", 1, 0), ("FedAdam", "tau", 1e-9, 0.0),
    ("FedYogi", "tau", 1e-9, 0.0), ("FedAdagrad", "tau", 1e-9, 0.0), ("FedAdam", "beta_1", 0.99, 1.0),
    ("FedAdam", "beta_2", 0.99, 1.0), ("FedYogi", "beta_1", 0.99, 1.0), ("FedAvgM", "server_learning_rate", 0.1, 0.0),
    ("FedAdam", "eta", 0.1, 0.0),
])  # fmt: skip
def test_flower_itself_gives_no_trained_weights_for_what_is_refused(use: str, name: str, good: Any, bad: Any) -> None:
    def moves(value: Any) -> bool:
        with np.errstate(all="ignore"):
            found = aggregated(getattr(flower, use)(fraction_evaluate=0.0, **{name: value}), CLIENTS)
        return found is not None and bool(np.isfinite(found).all() and found[:2].all())

    assert moves(good) and not moves(bad)
