"""A chain: the order of its links, and the whole client that it makes."""

from dataclasses import dataclass

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.func import vmap

from fedgauge.client.chain import chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.transforms import UpdateTransform, per_example
from fedgauge.client.update import Batch, Params, Transform, Update, UpdateFn
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from tests.client.networks import examples, largest_difference, network, params_of


@dataclass(frozen=True)
class footprint(UpdateTransform):
    """Writes its name into a list when its turn comes."""

    name: str
    seen: list[str]

    def apply(self, update: Update, rng: Generator | None) -> Update:
        self.seen.append(self.name)
        return dict(update)


def test_the_first_link_of_a_chain_is_nearest_the_gradient() -> None:
    seen: list[str] = []

    def bare(params: Params, batch: Batch, rng: Generator | None) -> Update:
        seen.append("gradient")
        return {k: torch.ones_like(p) for k, p in params.items()}

    links = (footprint("a", seen), footprint("b", seen), local_sgd(0.5, steps=2), footprint("c", seen))
    update = chain(*links)(bare)({"w": torch.zeros(2)}, examples(1), None)
    assert seen == ["gradient", "a", "b", "gradient", "a", "b", "c"]
    assert update["w"].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("links", [(), (clip(1.0),), (local_sgd(0.1), local_sgd(0.1))], ids=["0", "no", "two"])
def test_a_chain_has_exactly_one_local_sgd(links: tuple[Transform, ...]) -> None:
    count = sum(isinstance(link, local_sgd) for link in links)
    with pytest.raises(ValueError, match=f"local_sgd.* {count}"):
        _ = chain(*links).local
    assert chain(clip(1.0), local_sgd(0.3), clip(1.0)).local == local_sgd(0.3)


def whole_client(model: nn.Module) -> UpdateFn:
    return chain(per_example(chain(clip(1.0), gaussian(0.1))), gaussian(0.05), local_sgd(0.1, 2), gaussian(0.01))(
        gradient(model)
    )


def test_a_client_with_a_generator_works_inside_another_vmap() -> None:
    model, batch = network(), examples(5)

    def advance(x: Tensor, rng: Generator) -> Update:
        return whole_client(model)(params_of(model), Batch(x, batch.y), rng)

    def packed() -> Update:
        rng = Generator().manual_seed(3)
        return vmap(lambda x: advance(x, rng), randomness="different")(torch.stack([batch.x, batch.x]))

    first, again = packed(), packed()
    assert largest_difference(first, again) == 0
    assert all((t[0] != t[1]).any() for t in first.values())


def test_inputs_are_not_touched() -> None:
    model, batch = network(), examples(5)
    params = params_of(model)
    kept, x, y = {k: p.clone() for k, p in params.items()}, batch.x.clone(), batch.y.clone()
    whole_client(model)(params, batch, Generator().manual_seed(0))
    local_sgd(0.1, 3, batch_size=2, proximal_mu=1.0)(gradient(model))(params, batch, None)
    assert largest_difference(params, kept) == 0
    assert torch.equal(batch.x, x)
    assert torch.equal(batch.y, y)
    assert all(p.grad is None for p in model.parameters())
