"""Mixup: what is blended with what, by which weights, and what its clients and its attackers see of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Budget
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import SpecError
from fedgauge.client.federation import Federation
from fedgauge.client.update import Batch
from fedgauge.defenses.mixup import mixup
from tests.tensors import seeded

SGD = {"use": "local_sgd", "rate": 0.1}
MIXUP = {"use": "mixup", "alpha": 0.4}


def named(count: int = 6) -> Batch:
    """Example i is an image of which pixel i alone is 1, with label i: a blend shows of whom, and how much."""
    return Batch(torch.eye(count, dtype=torch.float64).view(count, 1, 1, count), torch.arange(count))


def shares(link: mixup, batch: Batch, rng: Generator) -> Tensor:
    """Row i: how much of each example is in the i-th blend."""
    mixed = link.transform(batch, rng)
    assert torch.equal(mixed.x.flatten(1), mixed.y), "labels are blended as the images are"
    return mixed.y


def test_a_batch_of_one_has_nothing_to_blend(make_federation: Callable[..., Federation]) -> None:
    with pytest.raises(SpecError):
        make_federation(chain=[MIXUP, SGD]).check()
    steps_of_one = make_federation(chain=[MIXUP, {**SGD, "steps": 4, "batch_size": 1}], data={"batch_size": 4})
    params, buffers = steps_of_one.initial()
    with pytest.raises(ValueError, match="batch_size"):
        steps_of_one.client_update(params, buffers, 0, 1)


@pytest.mark.parametrize("seed", range(5))
def test_each_example_is_blended_with_one_other_and_each_serves_once(seed: int) -> None:
    found = shares(mixup(0.7, 6, 6), named(), seeded(seed))
    assert torch.allclose(found.sum(1), torch.ones(6, dtype=torch.float64))
    others = found.clone().fill_diagonal_(0) > 0
    assert others.sum(1).tolist() == [1] * 6
    assert others.sum(0).tolist() == [1] * 6


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0])
def test_the_weights_are_beta_distributed(alpha: float) -> None:
    link, rng = mixup(alpha, 6, 6), seeded()
    weights = torch.cat([shares(link, named(), rng).diagonal() for _ in range(500)])
    assert stats.kstest(weights.numpy(), stats.beta(alpha, alpha).cdf).pvalue > 1e-4


def test_the_client_trains_on_the_blends(make_federation: Callable[..., Federation]) -> None:
    """Its gradient is the weights' mean of the two cross-entropies at the blended image: the paper's loss."""
    fed = make_federation(chain=[MIXUP, SGD], data={"batch_size": 4}, model={"use": "mlp", "hidden": [8]})
    params, buffers = fed.initial()
    update = fed.client_update(params, buffers, 0, 1)
    blends = fed.trained_on(params, buffers, 0, 1)
    assert blends is not None
    assert blends.y.shape == (4, 10)
    logits = fed.model(fed.shards.dataset.normalise(blends.x))
    loss = -(blends.y * F.log_softmax(logits, 1)).sum(1).mean()
    for (name, _), g in zip(
        fed.model.named_parameters(), torch.autograd.grad(loss, list(fed.model.parameters())), strict=True
    ):
        torch.testing.assert_close(update[name], -0.1 * g, rtol=1e-4, atol=1e-7)


def test_an_attack_is_graded_against_the_originals_and_the_blends(
    make_federation: Callable[..., Federation], observe: Callable[..., Any]
) -> None:
    fed = make_federation(chain=[MIXUP, SGD], data={"batch_size": 2}, model={"use": "mlp", "activation": "sigmoid"})
    planned = PlannedAttack("dlg", {"use": "dlg"}, Budget(100))
    (result,) = Auditor(FederationSource(fed)).audit(planned, observe(fed))
    values = {m: [r.value for r in result.rows if r.metric == m] for m in ("psnr", "psnr_augmented")}
    assert len(values["psnr"]) == len(values["psnr_augmented"]) == 2
    assert min(v for v in values["psnr_augmented"] if v is not None) > 25, "soft labels do not stop DLG"
    assert max(v for v in values["psnr"] if v is not None) < min(v for v in values["psnr_augmented"] if v is not None)
