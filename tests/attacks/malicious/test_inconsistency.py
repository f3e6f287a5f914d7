"""Dead layers: a client that receives them adds only to the classifier's bias in a secure sum."""

from functools import partial

import pytest
import torch
from torch import nn

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.computation import classifier
from fedgauge.attacks.malicious.inconsistency import dead_layer, lone_target
from fedgauge.attacks.modality.image_metrics import match, psnr
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import convnet, detached_params, lenet, mlp, resnet20
from fedgauge.client.rng import generator
from fedgauge.client.transforms import GroupMean
from fedgauge.client.update import Batch, average
from tests.attacks.malicious.served import craft, read
from tests.attacks.refusals import check_named

CLASSES, MEMBERS = 5, 4


def knowledge(model: nn.Module, shape: tuple[int, int, int], members: int = MEMBERS) -> Knowledge:
    links = Chain((local_sgd(0.1), GroupMean(members)))
    public = Batch(torch.rand(8, *shape, generator=generator("public")), torch.arange(8) % CLASSES)
    statistics = (0.4,) * shape[0], (0.3,) * shape[0]
    return Knowledge(model.eval(), links, shape, CLASSES, members, *statistics, auxiliary=public)


@pytest.mark.parametrize("make", [lenet, convnet, resnet20, mlp])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_dead_network_sends_its_bias_and_nothing_else(make: object, steps: int) -> None:
    shape = (3, 12, 12)
    model = make(shape, CLASSES)  # type: ignore[operator]
    known = knowledge(model, shape)
    honest = detached_params(model)
    params = dead_layer().craft(honest, known, generator("malice"))
    batch = Batch(torch.rand(3, *shape, generator=generator("own")), torch.tensor([0, 1, 1]))
    client = chain(local_sgd(0.1, steps))(gradient(model.eval(), normalise=known.normalise))
    update = client(params, batch, generator("client"))
    assert [k for k, t in update.items() if bool(t.count_nonzero())] == [f"{classifier(model, shape)}.bias"]


def test_a_network_that_does_not_die_is_refused() -> None:
    shape, shift = (1, 6, 6), nn.Identity()
    shift.register_parameter("bias", nn.Parameter(torch.zeros(36)))  # without a weight
    for model, name in (
        (nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)), "no layer"),
        (nn.Sequential(nn.Flatten(), shift, nn.Linear(36, CLASSES)), "no layer"),
        (mlp(shape, CLASSES, activation="tanh"), "weight"),  # not zero where it is flat
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, CLASSES)), "2.weight"),
    ):
        check_named(name, partial(craft, dead_layer(), knowledge(model, shape)))


def test_the_target_of_a_secure_sum_is_inverted_and_no_other_client() -> None:
    shape = (1, 6, 6)
    model = mlp(shape, CLASSES, hidden=[30])
    known, honest = knowledge(model, shape), detached_params(model)
    dead = dead_layer().craft(honest, known, generator("malice"))
    client = chain(local_sgd(0.1))(gradient(model, normalise=known.normalise))
    rng = generator("own")
    batch = Batch(torch.rand(MEMBERS, *shape, generator=rng), torch.randint(CLASSES, (MEMBERS,), generator=rng))
    updates = [
        client(honest if i == 2 else dead, Batch(batch.x[i : i + 1], batch.y[i : i + 1]), rng) for i in range(MEMBERS)
    ]
    attack = lone_target({"use": "inverting_gradients", "tv": 0.0})
    found = read(attack, known, honest, average(updates, [1] * MEMBERS), iterations=400)
    assert found.x is not None and found.y is None
    scores = psnr(batch.x, found.x[match(batch.x, found.x)])
    assert scores[2] > 30
    assert scores[[0, 1, 3]].max() < 20
    assert "1 of 4" in found.reason


def test_without_a_sum_there_is_nothing_to_take_apart() -> None:
    known = Knowledge(mlp((1, 6, 6), CLASSES), chain(local_sgd(0.1)), (1, 6, 6), CLASSES, 1, (0.4,), (0.3,))
    params = detached_params(known.model)
    found = read(lone_target(), known, params, params)
    assert (found.status, found.x) == ("not_applicable", None) and "no sum" in found.reason
