"""A round whose aggregate is not finite is undone, and its replies are recorded all the same."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from fedgauge.server.strategy.reply_checks import CheckedStrategy, RoundReplies

PARAMS = {"weight": torch.linspace(-1, 1, 6).reshape(2, 3), "bias": torch.tensor([0.5, -0.5])}
CLIENTS = 2


class Diverging(FedAvg):
    """FedAvg whose first average has one entry that is not finite; None: there is none, as Bulyan does with few replies."""

    def __init__(self, value: float | None) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
        self.value = value

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        weights = arrays.to_torch_state_dict()
        if server_round == 1 and self.value is None:
            return None, None
        if server_round == 1:
            weights["bias"][0] = self.value
        return ArrayRecord(weights), metrics


@pytest.mark.parametrize(("value", "why"), [(float("nan"), "bias"), (float("inf"), "bias"), (None, "nothing")])
def test_an_aggregate_that_is_not_finite_or_none_undoes_its_round_only(
    kit: Any, caplog: pytest.LogCaptureFixture, value: float | None, why: str
) -> None:
    intakes: list[RoundReplies] = []
    grid = kit.MemoryGrid("", CLIENTS)
    checked = CheckedStrategy(Diverging(value), intakes.append, seed=1, clients=grid.nodes)
    trained: list[ArrayRecord | None] = []
    for round in (1, 2):
        asked = [
            kit.travel(m) for m in checked.configure_train(round, ArrayRecord(PARAMS), ConfigRecord({"lr": 0.1}), grid)
        ]
        replies = [kit.reply(m, {k: torch.full_like(t, 0.25) for k, t in PARAMS.items()}) for m in asked]
        trained.append(checked.aggregate_train(round, replies)[0])
    undone, kept = trained
    assert undone is None and kept is not None
    assert torch.equal(kept.to_torch_state_dict()["bias"], PARAMS["bias"] + 0.25)
    assert [len(intake.accepted) for intake in intakes] == [CLIENTS, CLIENTS]
    assert [bool(intake.undone) for intake in intakes] == [True, False] and why in intakes[0].undone
    assert len([r for r in caplog.records if r.levelname == "WARNING" and "round 1" in r.getMessage()]) == 1
