"""A network for each example: the parts of an update are those of single examples, on which any attack works."""

from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.malicious.separate_models import SeparateNetworks, separate, separate_models, separated
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import convnet, detached_params, lenet, mlp
from fedgauge.client.rng import generator
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch
from fedgauge.defenses.clip import clip
from tests.attacks.malicious.served import answer, check_refused, read

SHAPE, CLASSES = (1, 6, 6), 5
MEAN, STD = (0.4,), (0.3,)


def examples(seed: int, n: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(n, *SHAPE, generator=rng), torch.randint(CLASSES, (n,), generator=rng))


def network(count: int, seed: int = 0) -> SeparateNetworks:
    torch.manual_seed(seed)
    return separate(mlp(SHAPE, CLASSES, hidden=[12]), count)


def knowledge(model: nn.Module, size: int, links: Chain | None = None) -> Knowledge:
    public = examples(10**6, 9)
    return Knowledge(model, links or chain(local_sgd(0.1)), SHAPE, CLASSES, size, MEAN, STD, auxiliary=public)


def attacked(known: Knowledge, batch: Batch, how: separated) -> Reconstruction:
    params = detached_params(known.model)
    return read(how, known, params, answer(known, params, batch), iterations=20)


@given(size=st.integers(1, 9), count=st.integers(1, 5))
def test_each_example_goes_through_its_own_network_and_comes_back_in_its_place(size: int, count: int) -> None:
    model, x = network(count), examples(size, size).x
    for place, own in enumerate(model.models):  # otherwise they all say the same
        own.load_state_dict({k: t * (1 + place) for k, t in own.state_dict().items()})
    with torch.no_grad():
        logits = model(x)
        alone = torch.cat([model.models[i % count](x[i : i + 1]) for i in range(size)])
    assert torch.allclose(logits, alone, atol=1e-6)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 6), steps=st.integers(1, 3))
def test_a_part_is_the_update_of_a_client_with_this_example_at_a_rate_of_one_bth(
    seed: int, size: int, steps: int
) -> None:
    model, batch = network(size, seed), examples(seed, size)
    whole = chain(local_sgd(0.3, steps))(gradient(model))(detached_params(model), batch, None)
    for i, own in enumerate(model.models):
        one = Batch(batch.x[i : i + 1], batch.y[i : i + 1])
        part = chain(local_sgd(0.3 / size, steps))(gradient(own))(detached_params(own), one, None)
        for k, t in part.items():
            assert torch.allclose(whole[f"models.{i}.{k}"], t, atol=1e-6)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 6), spare=st.integers(0, 2))
def test_a_batch_is_read_in_its_order_with_its_labels(seed: int, size: int, spare: int) -> None:
    known, batch = knowledge(network(size + spare, seed), size), examples(seed, size)
    found = attacked(known, batch, separated())
    assert found.status == "converged", found.reason
    assert found.x is not None and found.y is not None
    assert float(psnr(batch.x, found.x).min()) > 60
    assert torch.equal(found.y, batch.y)


def test_any_attack_works_on_the_parts() -> None:
    known = knowledge(separate(lenet(SHAPE, CLASSES), 2), 2)
    how = separated({"use": "idlg"})
    found, again = (attacked(known, examples(1, 2), how) for _ in range(2))
    assert found.x is not None and again.x is not None and found.x.shape == (2, *SHAPE)
    assert torch.equal(found.x, again.x)
    assert found.iterations > attacked(known, examples(1, 2), separated()).iterations
    assert not torch.equal(found.x[0], found.x[1])


def test_buffers_of_each_network_are_its_own() -> None:
    """In this network every neuron is off: the update is the same for all images."""
    model = separate(convnet((1, 9, 9), CLASSES, width=1), 2).eval()
    known = Knowledge(model, chain(local_sgd(0.1)), (1, 9, 9), CLASSES, 2, MEAN, STD)
    batch = Batch(torch.rand(2, 1, 9, 9), torch.tensor([0, 1]))
    params = detached_params(model)
    update = known.chain(gradient(model, normalise=known.normalise))(params, batch, None)
    buffers = {k: b for k, b in model.named_buffers() if b.is_floating_point()}
    wave = Wave.stack([Observation(1, 0, params, update, buffers)])
    how = separated({"use": "inverting_gradients"})
    (found,) = how.reconstruct(wave, known, Budget(2), [partial(generator, "separate")])
    assert found.x is not None and found.x.shape == (2, 1, 9, 9)


def test_inseparable_batches_are_refused_by_both() -> None:
    plain, one_by_one = chain(local_sgd(0.1)), chain(per_example(clip(1.0)), local_sgd(0.1))
    slices = chain(local_sgd(0.1, steps=2, batch_size=2))
    for model, links in (
        (mlp(SHAPE, CLASSES), plain),
        (network(4), one_by_one),
        (network(4), slices),
        (network(3), plain),
    ):
        check_refused(separate_models(4), separated(), knowledge(model, 4, links))
