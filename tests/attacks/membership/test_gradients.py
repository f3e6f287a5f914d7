"""Candidates' gradients: every shortcut equals autograd, one example at a time."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import convsmall, detached_params, lenet, resnet20
from fedgauge.client.rng import generator
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch
from fedgauge.defenses.clip import clip
from fedgauge.defenses.dp_sgd import dp_sgd
from fedgauge.defenses.precode import precode
from tests.zoo.layers import Lambda, OldSquare

SHAPE = (1, 12, 12)
PLAIN = chain(local_sgd(0.1))


class Scaled(nn.Linear):
    """A layer that computes with a multiple of its weights, so that no shortcut reads them."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, 2 * self.weight, self.bias)


def attention(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


NETS: dict[str, Callable[..., nn.Module]] = {
    "lenet": lenet,
    "convsmall": convsmall,
    "resnet20": resnet20,
    "precode": lambda *shape: precode(
        lenet(*shape), 4, beta=0.1
    ),  # a layer that draws, at its mean, and adds to the loss
    # vmap has no rule for its kernel, of which no warning reaches the user
    "attention": lambda *shape: nn.Sequential(Lambda(attention), nn.Flatten(), Scaled(144, 4)),
    "refuses_vmap": lambda *shape: nn.Sequential(Lambda(OldSquare.apply), nn.Flatten(), Scaled(144, 4)),
}


def candidates(net: str = "lenet", links: Chain = PLAIN, n: int = 6, **changed: object) -> CandidateGradients:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NETS[net](SHAPE, 4).eval()
    rng = generator("membership", net)
    batch = Batch(torch.rand(n, *SHAPE, generator=rng), torch.randint(4, (n,), generator=rng))
    known = replace(Knowledge(model, links, SHAPE, 4, 2, (0.5,), (0.25,)), **changed)  # type: ignore[arg-type]
    return CandidateGradients(known, detached_params(model), batch)


def by_autograd(found: CandidateGradients) -> Tensor:
    bare = gradient(found.known.model, found.known.loss, normalise=found.known.normalise, plain=True)
    each = [bare(found.params, Batch(x[None], y[None]), None) for x, y in zip(*found.batch, strict=True)]
    return torch.stack([torch.cat([t.flatten() for t in one.values()]) for one in each])


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("net", sorted(NETS))
def test_rows_norms_and_products_are_those_of_autograd(net: str, plain: bool) -> None:
    found = candidates(net, plain=plain)
    rows = by_autograd(found)
    assert torch.allclose(torch.cat(list(found.rows())), rows, atol=1e-5)
    assert torch.allclose(found.norms, rows.double().norm(dim=1), rtol=1e-4)
    directions = torch.randn(3, rows.shape[1], generator=generator("directions"))
    assert torch.allclose(found.products(directions), (rows @ directions.T).T.double(), atol=1e-3)


def test_a_loss_is_the_examples_own() -> None:
    found = candidates()
    for i, loss in enumerate(found.losses.tolist()):
        x, y = found.batch.x[i : i + 1], found.batch.y[i : i + 1]
        own = found.known.loss(found.known.model(found.known.normalise(x)), y)
        assert own.item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    "links", [chain(dp_sgd(0.5, 1.0, 2), local_sgd(0.1)), chain(per_example(clip(0.5)), local_sgd(0.1))]
)
def test_clipping_each_example_keeps_a_part_of_its_gradient(links: Chain) -> None:
    found = candidates(links=links)
    assert found.norms.min() > 0.5, "otherwise nothing is clipped"
    assert torch.allclose(found.kept, 0.5 / found.norms, rtol=1e-4)
    assert candidates(links=chain(clip(0.5), local_sgd(0.1))).kept.eq(1).all(), "clips the mean, not the example"


def test_candidates_of_a_large_network_are_differentiated_one_by_one() -> None:
    """The gradient of one is as large as a gibibyte, and a vision transformer's of 86 million weights a third of one."""
    few = candidates()
    assert few.chunk == 128
    large = {"w": torch.empty(2**28, device="meta")}
    assert (
        replace(few, params=large).chunk == 1
        and replace(few, params={"w": torch.empty(86 * 10**6, device="meta")}).chunk == 3
    )


def test_mixed_examples_are_refused() -> None:
    found = candidates("resnet20")
    found.known.model.train()
    summed = replace(candidates().known, loss=nn.CrossEntropyLoss(reduction="sum"))
    for known, named in ((found.known, "eval"), (summed, "mean")):
        with pytest.raises(ValueError, match=named):
            replace(found, known=known)
