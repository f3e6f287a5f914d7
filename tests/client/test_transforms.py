"""Transforms: of one example, of the batch, with state, and their noise-free forms."""

from dataclasses import dataclass

import pytest
import torch
from torch import Generator

from fedgauge.client.chain import chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.rng import generator
from fedgauge.client.transforms import BatchTransform, StatefulTransform, TransformState, noise_free, per_example
from fedgauge.client.update import Batch, Params, Update, UpdateFn
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import discrete, gaussian, identity, laplace
from tests.client.networks import autograd, examples, largest_difference, network, params_of


def test_mean_of_takes_the_noise_out_of_every_nesting() -> None:
    noisy = chain(per_example(chain(clip(1.0), gaussian(1.0))), gaussian(1.0), local_sgd(0.1), gaussian(1.0))
    expected = chain(per_example(chain(clip(1.0), identity())), identity(), local_sgd(0.1), identity())
    assert noisy.mean == expected
    assert noise_free(noisy) == expected

    def anybodys(compute: UpdateFn) -> UpdateFn:
        return compute

    assert noise_free(anybodys) is anybodys


def test_a_deployment_draws_discrete_noise_wherever_it_stands() -> None:
    links = chain(per_example(clip(1.0)), per_example(gaussian(1.0)), per_example(laplace(1.0)), gaussian(1.0))
    expected = [per_example(discrete(gaussian(1.0))), per_example(discrete(laplace(1.0))), discrete(gaussian(1.0))]
    assert links.deployed == chain(per_example(clip(1.0)), *expected)


@pytest.mark.parametrize("noise", [per_example(gaussian(1.0)), per_example(gaussian(1.0)).deployed], ids=repr)
def test_each_example_gets_its_own_noise(noise: per_example) -> None:
    def zeros(params: Params, batch: Batch, rng: Generator | None) -> Update:
        return {"w": torch.zeros(10_000) + 0 * batch.x.sum()}

    sixteen = noise(zeros)({}, examples(16), Generator().manual_seed(1))["w"]
    # a mean of 16 independent draws has deviation 1/4; the sample deviation of n draws errs by 1/sqrt(2n)
    assert abs(float(sixteen.std()) * 4 - 1) < 5 / (2 * 10_000) ** 0.5


@dataclass(frozen=True)
class _shifted(BatchTransform):
    """Every pixel moves by a draw of its own."""

    def transform(self, batch: Batch, rng: Generator | None) -> Batch:
        return Batch(batch.x + torch.rand(batch.x.shape, generator=rng, dtype=batch.x.dtype), batch.y)


def test_what_acts_on_the_batch_acts_before_the_gradient_and_in_each_local_step_anew() -> None:
    model, batch = network(), examples(4)
    params = params_of(model)
    rng = generator("shift")
    steps = [_shifted().transform(batch, rng) for _ in range(2)]
    change: Update = {}
    for step in steps:
        here = {k: p + change.get(k, 0) for k, p in params.items()}
        change = {k: change.get(k, 0) - 0.5 * t for k, t in autograd(model, here, step).items()}
    inside = chain(_shifted(), local_sgd(0.5, 2))(gradient(model))(params, batch, generator("shift"))
    assert largest_difference(inside, change) < 1e-12
    once = chain(local_sgd(0.5, 2), _shifted())(gradient(model))(params, batch, generator("shift"))
    assert largest_difference(once, chain(local_sgd(0.5, 2))(gradient(model))(params, steps[0], None)) == 0


@dataclass(frozen=True)
class _delayed(StatefulTransform):
    """Sends what it kept of the round before, and keeps this one."""

    def initial(self, update: Update) -> Update:
        return {k: torch.zeros_like(t) for k, t in update.items()}

    def advance(self, update: Update, memory: Update, rng: Generator | None) -> tuple[Update, Update]:
        return memory, update


def test_memory_lasts_from_round_to_round_and_each_link_has_its_own() -> None:
    model, rounds = network(), [examples(2, seed) for seed in range(3)]
    params = params_of(model)
    whole, memory = chain(local_sgd(0.5), _delayed(), _delayed()), TransformState()
    sent = [whole.with_state(memory)(gradient(model))(params, batch, None) for batch in rounds]
    first = chain(local_sgd(0.5))(gradient(model))(params, rounds[0], None)
    assert all(not t.any() for round in sent[:2] for t in round.values()), "two links delay by two rounds"
    assert largest_difference(sent[2], first) == 0
    assert all(not t.any() for t in whole(gradient(model))(params, rounds[0], None).values()), "unbound: a first round"


def test_one_example_fails_for_itself_alone() -> None:
    """Replacing it moves the mean by no more than its share, also where vmap refuses all of them together."""

    def fussy(params: Params, batch: Batch, rng: torch.Generator | None) -> Params:
        if bool(batch.x.sum() > 2):  # a branch on values, which vmap refuses
            return {"w": torch.full((2,), torch.nan)}
        return {"w": batch.x.mean() * torch.ones(2)}

    each = per_example(clip(10.0))(fussy)
    x = torch.tensor([[1.0], [2.0], [3.0], [1.0]])
    found = each({"w": torch.zeros(2)}, Batch(x, torch.zeros(4)), None)["w"]
    assert found.tolist() == [1.0, 1.0], "(1 + 2 + 0 + 1) / 4"
