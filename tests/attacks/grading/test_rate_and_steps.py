"""The sum of a client's rates, inferred from its update: the truth is known to the test alone."""

from collections.abc import Callable
from typing import Any

import pytest

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.rate_and_steps import RateTimesSteps, rate_times_steps
from fedgauge.attacks.grading.training_evidence import training_evidence
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import local_training
from fedgauge.client.rng import generator
from fedgauge.client.training import local_sgd

Make = Callable[..., Federation]
TRAININGS: list[dict[str, Any]] = [
    {"rate": 0.05, "steps": 1},
    {"rate": 0.003, "steps": 1},
    {"rate": 0.02, "steps": 5},
    {"rate": 0.1, "steps": 8},
    {"rate": 0.05, "epochs": 2, "batch_size": 1, "shuffle": True},
    {"rate": 0.01, "steps": 6, "momentum": 0.9},
]


def told(
    make_federation: Make, size: int, client: int, model: str, own: dict[str, Any]
) -> tuple[RateTimesSteps | None, float]:
    """What is inferred, under another assumption, and the truth."""
    data = {"batch_size": size, "auxiliary": 100}
    fed = make_federation(data=data, model={"use": model}, chain=[{"use": "local_sgd", "rate": 1.0}])
    training = local_training(examples=size, **own)
    params, buffers = fed.initial()
    update = training(fed.gradient)(params, fed.shards.batch_at(client, 1), generator("client", client))
    return rate_times_steps(fed, Observation(1, client, params, update, buffers)), training.scale


@pytest.mark.parametrize(
    ("model", "size", "clients"),
    [
        ("lenet", 4, (0,)),
        *(pytest.param(m, b, (0, 1), marks=pytest.mark.full) for m in ("lenet", "mlp") for b in (1, 4)),
    ],
)
def test_the_interval_holds_the_sum_of_the_rates(
    model: str, size: int, clients: tuple[int, ...], make_federation: Make
) -> None:
    held = []
    for own in TRAININGS:
        for client in clients:
            found, truth = told(make_federation, size, client, model, own)
            assert found is not None
            assert found.low <= found.value <= found.high
            if truth < 0.01:  # little drift: the rate is told well
                assert truth / 1.4 < found.value < 1.4 * truth
            held.append(found.low <= truth <= found.high)
    assert sum(held) >= 0.8 * len(held)


def test_where_every_class_may_be_present_nothing_is_said(make_federation: Make) -> None:
    assert told(make_federation, 10, 0, "lenet", TRAININGS[0])[0] is None


def test_it_stands_on_the_card_with_its_uncertainty(make_federation: Make) -> None:
    data = {"batch_size": 4, "auxiliary": 100}
    fed = make_federation(data=data, chain=[{"use": "local_sgd", "rate": 0.1, "steps": 3}])
    params, buffers = fed.initial()
    for own, wrong in ((local_sgd(0.1, 3), False), (local_sgd(0.01, 3), True)):
        update = own(fed.gradient)(params, fed.shards.batch_at(0, 1), None)
        words = training_evidence(fed, Observation(1, 0, params, update, buffers)).words
        assert "the sum of the steps' rates is " in words
        assert ("the chain assumes 0.3" in words) == wrong, words
