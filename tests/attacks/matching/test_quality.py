"""Reconstruction quality on real images beside what the papers' attacks reach."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from fedgauge.attacks.base import Budget, Knowledge, Observation, Wave
from fedgauge.attacks.matching.recipes import inverting_gradients
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import chain
from fedgauge.client.data.batches import batch_of
from fedgauge.client.data.images import cifar10
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, lenet
from fedgauge.client.rng import generator


@pytest.mark.slow
def test_inverting_gradients_reaches_the_published_loops_quality(local_file: Callable[[str], Path]) -> None:
    """Untrained LeNet, the first 8 CIFAR-10 test images, TV 0.1, 500 iterations: the published loop gave 16.9 dB.

    The weights of seeds 0 to 3 give 16.94, 16.56, 17.95 and 16.85 dB.
    """
    local_file("cifar10-*.npz")
    cifar = cifar10()
    model = lenet(cifar.shape, cifar.classes)
    params, train = detached_params(model), local_sgd(0.1)(gradient(model, normalise=cifar.normalise))
    batches = [batch_of(cifar.x_test, cifar.y_test, torch.tensor([i])) for i in range(8)]
    wave = Wave.stack([Observation(1, i, params, train(params, batch, None)) for i, batch in enumerate(batches)])
    known = Knowledge(model, chain(local_sgd(0.1)), cifar.shape, cifar.classes, 1, cifar.mean, cifar.std)
    streams = [partial(generator, "quality", i) for i in range(8)]
    found = inverting_gradients(tv=0.1).reconstruct(wave, known, Budget(500), streams)
    values = []
    for batch, result in zip(batches, found, strict=True):
        assert result.x is not None and result.y is not None
        assert result.y.tolist() == batch.y.tolist(), "labels are restored"
        values.append(float(psnr(batch.x, result.x)))
    assert sum(values) / 8 >= 16.5, [round(v, 2) for v in values]
