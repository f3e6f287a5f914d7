"""Parameters that keep principal components: nothing is lost where a layer is wide enough, and least where it is not."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge, Reconstruction
from fedgauge.attacks.malicious.optimised_features import LinearEstimate, optimised_features, read_features
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import Chain, chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, lenet, mlp
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Params
from fedgauge.defenses.noise import gaussian
from tests.attacks.malicious.served import answer, check_refused, craft, read
from tests.attacks.refusals import check_named

SHAPE, CLASSES = (3, 8, 8), 10


def pictures(count: int, seed: int) -> Tensor:
    """Images of eight smooth components of their own kind, in [0, 1]."""
    rng = generator(seed)
    smooth = torch.rand(count, 3, 3, 3, generator=rng)
    return nn.functional.interpolate(smooth, SHAPE[1:], mode="bilinear", align_corners=True)


def knowledge(model: nn.Module, size: int = 1, public: int = 400, links: Chain | None = None) -> Knowledge:
    batch = Batch(pictures(public, 1), torch.zeros(public, dtype=torch.int64))
    mean, std = (0.4, 0.5, 0.3), (0.3, 0.2, 0.25)
    return Knowledge(model, links or chain(local_sgd(0.1)), SHAPE, CLASSES, size, mean, std, auxiliary=batch)


def crafted(known: Knowledge, zero: bool = False) -> Params:
    return craft(optimised_features(zero), known)


def attacked(known: Knowledge, params: Params, batch: Batch) -> Reconstruction:
    return read(read_features(), known, params, answer(known, params, batch))


def decibel(known: Knowledge, params: Params, count: int = 20) -> float:
    """Mean PSNR over batches of images that are not public."""
    values = []
    for x in pictures(count * known.batch_size, 2).split(known.batch_size):
        found = attacked(known, params, Batch(x, torch.arange(len(x))))
        assert found.x is not None
        values += [float(v) for v in psnr(found.x, x)]
    return sum(values) / len(values)


def test_the_estimate_is_the_conditional_mean_on_paper() -> None:
    """x = h + e of variances 4 and 1, with noise of variance 4 on h: half of what h says is believed."""
    h = torch.tensor([[2.0], [-2.0], [2.0], [-2.0]])
    x = h + torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]) + 5
    fit = LinearEstimate.fitted(h, x, 0.0)
    assert fit(torch.tensor([[2.0]]), torch.zeros(1)).item() == pytest.approx(7)
    assert fit(torch.tensor([[2.0]]), torch.full((1,), 4.0)).item() == pytest.approx(6)


@pytest.mark.parametrize("hidden", [[192], [400], [250, 192]])
def test_a_layer_as_wide_as_its_input_loses_nothing(hidden: list[int]) -> None:
    known = knowledge(mlp(SHAPE, CLASSES, hidden=hidden))
    assert decibel(known, crafted(known)) > 40


def test_components_reconstruct_better_than_honest_weights() -> None:
    for model in (lenet(SHAPE, CLASSES), mlp(SHAPE, CLASSES, hidden=[30])):
        known = knowledge(model)
        assert decibel(known, crafted(known)) > decibel(known, detached_params(model)) + 4


def test_a_batch_of_distinct_labels_is_taken_apart_at_a_classifier_of_zeros() -> None:
    alone, four = (knowledge(lenet(SHAPE, CLASSES), size) for size in (1, 4))
    single, together = decibel(alone, crafted(alone)), decibel(four, crafted(four, zero=True), 5)
    assert together == pytest.approx(single, abs=1.0)
    found = attacked(four, crafted(four), Batch(pictures(4, 3), torch.arange(4)))
    assert found.status == "not_applicable" and "zero = true" in found.reason


def test_noise_that_drowns_what_was_read_leaves_the_mean_image() -> None:
    quiet, loud = (knowledge(lenet(SHAPE, CLASSES), links=chain(local_sgd(0.1), gaussian(s))) for s in (1e-6, 100.0))
    x = pictures(1, 4)
    near, far = (attacked(known, crafted(known), Batch(x, torch.tensor([2]))).x for known in (quiet, loud))
    assert near is not None and far is not None and quiet.auxiliary is not None
    mean = quiet.auxiliary.x.mean(0, keepdim=True)
    assert float(psnr(near, x)[0]) > float(psnr(mean, x)[0]) + 8
    torch.testing.assert_close(far, mean, atol=1e-2, rtol=0)


def test_limitations_are_reported() -> None:
    check_refused(optimised_features(), read_features(), knowledge(lenet(SHAPE, CLASSES), public=3))
    padded = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.Flatten(), nn.Linear(256, CLASSES))
    for model in (padded, mlp(SHAPE, CLASSES, hidden=[])):
        check_named("layer", partial(crafted, knowledge(model)))
    steps = knowledge(lenet(SHAPE, CLASSES), links=chain(local_sgd(0.1, steps=2)))
    assert "2 local steps" in attacked(steps, crafted(steps), Batch(pictures(1, 3), torch.tensor([1]))).reason
