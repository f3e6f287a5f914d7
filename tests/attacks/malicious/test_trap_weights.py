"""Trap weights: rows are what the paper says, and what is read are the images that rows hold alone."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge, Reconstruction
from fedgauge.attacks.malicious.trap_weights import SCALES, activated_alone, read_rows, trap_weights
from fedgauge.client.chain import chain
from fedgauge.client.data.batches import batch_of
from fedgauge.client.data.images import cifar10
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, lenet, mlp
from fedgauge.client.update import Batch, Params
from tests.attacks.malicious.served import answer, check_refused, craft, proven
from tests.attacks.malicious.served import read as read_update
from tests.attacks.refusals import check_named

SHAPE, CLASSES, ROWS = (3, 6, 6), 5, 60
MEAN, STD = (0.4, 0.5, 0.3), (0.3, 0.2, 0.25)


def examples(seed: int, n: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (n, *SHAPE), generator=rng).float() / 255
    return Batch(x, torch.randint(CLASSES, (n,), generator=rng))


def knowledge(size: int, model: nn.Module | None = None, public: int = 64) -> Knowledge:
    torch.manual_seed(0)
    network = model or mlp(SHAPE, CLASSES, hidden=[ROWS])
    auxiliary = examples(10**6, public) if public else None
    return Knowledge(network, chain(local_sgd(0.1)), SHAPE, CLASSES, size, MEAN, STD, auxiliary=auxiliary)


def crafted(known: Knowledge, scale: float | None = None, seed: int = 0) -> Params:
    return craft(trap_weights(scale), known, seed)


def read(known: Knowledge, params: Params, batch: Batch) -> Reconstruction:
    return read_update(read_rows(), known, params, answer(known, params, batch))


def on(known: Knowledge, params: Params, x: Tensor) -> Tensor:
    """Which rows (B, m) images turn on, in float64."""
    fed = known.normalise(x.double()).flatten(1)
    rows: Tensor = fed @ params["1.weight"].double().T + params["1.bias"].double()
    assert float(rows.abs().min()) > 1e-6, "none is on the edge"
    return rows > 0


def test_half_of_every_row_is_negative_and_larger() -> None:
    known = knowledge(1)
    params = crafted(known, scale=0.25)
    pixels = params["1.weight"].view(ROWS, *SHAPE) / torch.tensor(STD).view(3, 1, 1)
    assert (pixels < 0).flatten(1).sum(1).tolist() == [54] * ROWS
    assert (pixels > 0).flatten(1).sum(1).tolist() == [54] * ROWS
    up, down = pixels[pixels > 0].mean(), -pixels[pixels < 0].mean()
    assert float(up / down) == pytest.approx(0.25, rel=0.1)
    black = known.normalise(torch.zeros(1, *SHAPE)).flatten(1)
    assert torch.allclose(black @ params["1.weight"].T + params["1.bias"], torch.zeros(1, ROWS), atol=1e-5)


def test_a_client_that_turns_on_a_row_by_himself_is_alone() -> None:
    rows = torch.tensor([[[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]], dtype=torch.bool)
    assert activated_alone(rows).tolist() == [[True, True, False]]
    assert activated_alone(rows[:, :, 1:2]).tolist() == [[False, False, False]]


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 10), scale=st.sampled_from([0.8, 0.9, 1.0]))
def test_proven_are_the_images_that_are_alone_in_a_row(seed: int, size: int, scale: float) -> None:
    known, batch = knowledge(size), examples(seed, size)
    params = crafted(known, scale, seed)
    expected = int(activated_alone(on(known, params, batch.x)[None]).sum())
    found = read(known, params, batch)
    if found.x is None:
        assert not on(known, params, batch.x).any()
        assert found.status == "not_applicable" and "reveals nothing" in found.reason
        return
    assert found.x.shape == (size, *SHAPE)
    assert proven(found) == expected
    for x in found.x[:expected]:
        assert bool((batch.x == x).flatten(1).all(1).any()), "what is proven is the image to the bit"


def test_rows_that_agree_prove_nothing() -> None:
    """Two images of one label, with rows that hold both alike: all agree on what is neither."""
    known, batch = knowledge(2), examples(3, 2)
    params = detached_params(known.model)
    params["1.bias"] += 100  # every row is on
    params["3.weight"] *= 1e-4  # an untrained network that says the same of everything
    found = read(known, params, Batch(batch.x, torch.tensor([1, 1])))
    assert found.x is not None and proven(found) == 0
    assert torch.allclose(found.x[0], batch.x.mean(0), atol=1e-2)


def test_the_scale_is_the_one_by_which_most_public_images_are_alone() -> None:
    known = knowledge(8)
    assert known.auxiliary is not None
    params = crafted(known)

    def share(params: Params) -> float:
        assert known.auxiliary is not None
        return float(activated_alone(on(known, params, known.auxiliary.x).view(-1, 8, ROWS)).float().mean())

    tuned, others = share(params), [share(crafted(known, float(s))) for s in SCALES[::8]]
    assert tuned >= max(others)
    assert tuned > min(others) + 0.1


def test_a_third_of_a_batch_of_twenty_photographs_and_hardly_any_without(local_data: Path) -> None:
    data = cifar10()
    model = mlp(data.shape, 10, hidden=[1000])
    public = batch_of(data.x, data.y, torch.arange(len(data.y) - 200, len(data.y)))
    known = Knowledge(model, chain(local_sgd(0.01)), data.shape, 10, 20, data.mean, data.std, auxiliary=public)
    batch = batch_of(data.x_test, data.y_test, torch.arange(20))
    trapped, honest = read(known, crafted(known), batch), read(known, detached_params(model), batch)
    assert proven(trapped) >= 6
    assert proven(honest) <= 2
    assert trapped.x is not None
    there = (trapped.x[:, None] == batch.x[None]).flatten(2).all(2).any(1)
    assert int(there.sum()) == proven(trapped)


WITHOUT_BIAS = nn.Sequential(nn.Flatten(), nn.Linear(108, 9, bias=False), nn.ReLU(), nn.Linear(9, CLASSES))
UNFIT: dict[str, nn.Module] = {
    "no fully connected layer": lenet(SHAPE, CLASSES),
    "no ReLU follows layer '1'": mlp(SHAPE, CLASSES, activation="tanh"),
    "no ReLU": mlp(SHAPE, CLASSES, hidden=[]),
    "no bias": WITHOUT_BIAS,
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_network_without_the_layer_is_refused_by_both(name: str) -> None:
    check_refused(trap_weights(), read_rows(), knowledge(2, UNFIT[name]))


@pytest.mark.parametrize("scale", [0.0, 1.5, float("nan")])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    check_named("scale", lambda: trap_weights(scale))


def test_tuning_needs_a_batch_of_public_images() -> None:
    known = knowledge(8, public=7)
    check_named("auxiliary", lambda: crafted(known))
    assert crafted(known, scale=0.9)
