"""DP-SGD against Opacus' own optimizer on one batch, its noise against the normal law, and the places it is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from fedgauge.attacks.limits import known_noise
from fedgauge.client.chain import chain
from fedgauge.client.components import SpecError
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, lenet
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch, Params, Transform, Update, UpdateFn, norm
from fedgauge.defenses.accounting import mechanism
from fedgauge.defenses.clip import clip
from fedgauge.defenses.dp_sgd import dp_sgd
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign
from tests.tensors import seeded

B = 6


def a_client() -> tuple[nn.Module, Params, Batch, UpdateFn]:
    """LeNet, whose examples' gradients differ in norm by a factor of some tens, in float64."""
    torch.manual_seed(0)
    model = lenet((1, 28, 28), 10).double()
    x = torch.rand(B, 1, 28, 28, generator=seeded(), dtype=torch.float64) * torch.logspace(-2, 0, B).view(-1, 1, 1, 1)
    return model, detached_params(model), Batch(x, torch.arange(B)), gradient(model)


def norms(params: Params, batch: Batch, bare: UpdateFn) -> list[float]:
    return [float(norm(bare(params, Batch(x[None], y[None]), None))) for x, y in zip(*batch, strict=True)]


def opacus_step(model: nn.Module, batch: Batch, max_norm: float) -> Update:
    """What Opacus leaves in p.grad: each sample's gradient clipped, summed, divided by the batch; without noise."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(copy.deepcopy(model))  # its hooks stay on what they wrap
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=max_norm,
        expected_batch_size=len(batch.x),
    )
    optimizer.zero_grad()
    F.cross_entropy(wrapped(batch.x), batch.y).backward()
    optimizer.pre_step()
    return {name.removeprefix("_module."): p.grad.clone() for name, p in wrapped.named_parameters()}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # Opacus', as the input has no gradient
@pytest.mark.parametrize("bounded", ["none", "some", "all"])
def test_without_noise_it_is_opacus_mean_of_clipped_gradients(bounded: str) -> None:
    model, params, batch, bare = a_client()
    sizes = sorted(norms(params, batch, bare))
    assert sizes[-1] > 1.05 * sizes[0], "else no bound lies among them"
    max_norm = {"none": 2 * sizes[-1], "some": (sizes[2] + sizes[3]) / 2, "all": sizes[0] / 2}[bounded]
    ours = dp_sgd(max_norm, 0.0, B)(bare)(params, batch, seeded())
    theirs = opacus_step(model, batch, max_norm)
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():  # Opacus divides by norm + 1e-6
        torch.testing.assert_close(t, theirs[name], rtol=1e-4, atol=1e-9)
    assert torch.allclose(norm(ours), norm(bare(params, batch, None))) == (bounded == "none")


def test_its_noise_is_normal_with_the_published_deviation() -> None:
    _, params, batch, bare = a_client()
    link = dp_sgd(0.3, 2.0, B)
    noisy, clipped = link(bare)(params, batch, seeded(1)), link.mean(bare)(params, batch, None)
    drawn = torch.cat([(noisy[k] - clipped[k]).flatten() for k in noisy]).numpy()
    assert len(drawn) > 10_000
    assert stats.kstest(drawn, stats.norm(0, 2.0 * 0.3 / B).cdf).pvalue > 1e-4


def test_it_is_its_parts_to_the_bit() -> None:
    _, params, batch, bare = a_client()
    one, two = dp_sgd(0.3, 2.0, B), (per_example(clip(0.3)), gaussian(2.0 * 0.3 / B))
    for whole, parts in ((chain(one), chain(*two)), (chain(one, local_sgd(0.1, 2)), chain(*two, local_sgd(0.1, 2)))):
        first, second = (c(bare)(params, batch, seeded(3)) for c in (whole, parts))
        assert all(torch.equal(first[k], second[k]) for k in first)
        attacker, other = (c.mean(bare)(params, batch, None) for c in (whole, parts))
        assert all(torch.equal(attacker[k], other[k]) for k in attacker)


@pytest.mark.parametrize("after", [
    (local_sgd(0.1),),
    (local_sgd(0.1, 3),),
    (local_sgd(0.1), sign()),
    (local_sgd(0.1), mask(0.5)),
    (local_sgd(0.1), prune(0.5)),
    (gaussian(0.2), local_sgd(0.1)),
], ids=repr)  # fmt: skip
def test_likelihood_limit_and_accounting_take_it_for_clip_and_noise(after: tuple[Transform, ...]) -> None:
    one, two = chain(dp_sgd(0.3, 2.0, B), *after), chain(per_example(clip(0.3)), gaussian(2.0 * 0.3 / B), *after)
    assert one.update_distribution == two.update_distribution
    assert mechanism(one, B) == mechanism(two, B)
    found = known_noise(one)
    assert found == known_noise(two)
    assert (found is None) == isinstance(after[-1], prune), "pruning's choice tells of the data"


def test_a_batch_of_another_size_is_refused() -> None:
    """Its examples would weigh more in the mean than the noise is for."""
    _, params, batch, bare = a_client()
    with pytest.raises(ValueError, match="dp_sgd"):
        dp_sgd(0.3, 1.0, B)(bare)(params, Batch(batch.x[:3], batch.y[:3]), seeded())


# --------------------------------------------------------------------------------------------------- in a federation

DP = {"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 1.0}
CLIP = {"use": "clip", "max_norm": 1.0}
SGD = {"use": "local_sgd", "rate": 0.1}
MIXUP = {"use": "mixup", "alpha": 0.4}
Make = Callable[..., Federation]


@pytest.mark.parametrize(("local", "size"), [({}, 8), ({"batch_size": 2, "steps": 4}, 2), ({"steps": 3}, 8)])
def test_the_federation_offers_the_batch_of_a_local_step(make_federation: Make, local: Any, size: int) -> None:
    fed = make_federation(data={"batch_size": 8}, chain=[DP, {**SGD, **local}])
    assert fed.chain.links[0] == dp_sgd(1.0, 1.0, size)
    params, buffers = fed.initial()
    update = fed.client_update(params, buffers, 0, 1)
    assert all(torch.isfinite(t).all() for t in update.values())


@pytest.mark.parametrize(("links", "message"), [
    ([{**DP, "each": True}, SGD], r"#1 \(dp_sgd\)"),
    ([SGD, DP], r"#2 \(dp_sgd\)"),
    ([{"use": "sign"}, DP, SGD], r"#2 \(dp_sgd\)"),
    ([{"use": "sign"}, {**CLIP, "each": True}, SGD], r"#2 \(clip\)"),
    ([MIXUP, DP, SGD], r"#2 \(dp_sgd\)"),
    ([{**DP, "batch_size": 3}, SGD], "batch_size"),
])  # fmt: skip
def test_a_place_without_sense_is_refused(make_federation: Make, links: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _ = make_federation(data={"batch_size": 4}, chain=links).chain


def test_batchnorm_in_train_mode_is_refused(make_federation: Make) -> None:
    model = {"use": "convnet", "norm": "batch", "mode": "train", "width": 4}
    with pytest.raises(SpecError):
        _ = make_federation(model=model, data={"batch_size": 4}, chain=[DP, SGD]).chain


@pytest.mark.parametrize("links", [[DP, MIXUP, SGD], [DP, {**SGD, "steps": 2, "batch_size": 2}, MIXUP]])
def test_what_was_trained_on_is_reported_behind_it(make_federation: Make, links: Any) -> None:
    """The examples reach the gradient one by one, inside vmap, from which nothing may be kept."""
    fed = make_federation(data={"batch_size": 4}, chain=links)
    bare = make_federation(data={"batch_size": 4}, chain=links[1:])
    params, buffers = fed.initial()
    found, expected = (f.trained_on(params, buffers, 0, 1) for f in (fed, bare))
    assert found is not None
    assert expected is not None
    assert torch.equal(found.x, expected.x), "the batch is blended before anything else is drawn"
    assert not torch.equal(found.x, fed.batch_at(0, 1).x)
