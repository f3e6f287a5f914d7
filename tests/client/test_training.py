"""Local training: the gradient is autograd's, and the steps are those of torch's SGD."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedgauge.client.gradient import StochasticLayer, gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Update, norm
from tests.client.networks import autograd, examples, largest_difference, network, params_of


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda z, y: F.cross_entropy(z, y, reduction="sum")])
def test_the_gradient_is_autograds(loss: Callable[..., Tensor]) -> None:
    model, batch = network(), examples(6)
    found = gradient(model, loss)(params_of(model), batch, None)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert largest_difference(found, autograd(model, params_of(model), batch, loss)) < 1e-15


def test_normalisation_stands_before_the_model() -> None:
    model, batch = network(), examples(6)
    found = gradient(model, normalise=lambda x: (x - 0.3) / 0.2)(params_of(model), batch, None)
    expected = autograd(model, params_of(model), Batch((batch.x - 0.3) / 0.2, batch.y))
    assert largest_difference(found, expected) < 1e-15


def test_labels_may_be_probabilities() -> None:
    model, batch = network(), examples(6)
    hard = gradient(model)(params_of(model), batch, None)
    soft = gradient(model)(params_of(model), Batch(batch.x, F.one_hot(batch.y, 3).double()), None)
    assert largest_difference(hard, soft) < 1e-15


def test_the_gradient_is_taken_at_the_given_params_not_at_the_models() -> None:
    model, batch, other = network(0), examples(6), params_of(network(1))
    assert largest_difference(gradient(model)(other, batch, None), autograd(model, other, batch)) < 1e-15


class Normed(nn.Module):
    """BatchNorm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x.flatten(1))))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_running_statistics_move_at_a_client_in_train_mode_alone(training: bool, track: bool) -> None:
    model, batch = Normed().double().train(training), examples(6)
    reference = copy.deepcopy(model)
    expected = autograd(reference, params_of(model), batch)
    before = {k: b.clone() for k, b in model.named_buffers()}
    found = gradient(model, track=track)(params_of(model), batch, None)
    assert largest_difference(found, expected) < 1e-15
    moved = {k: not torch.equal(b, before[k]) for k, b in model.named_buffers()}
    assert set(moved.values()) == {training and track}, moved
    if training and track:
        reference(batch.x)  # autograd() above ran on a copy; this is torch's own forward in train mode
        torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()), rtol=0, atol=1e-15)
    assert model.norm.track_running_stats is True


def test_train_mode_batchnorm_can_be_differentiated_twice_under_vmap() -> None:
    model = Normed().double().train()
    compute, params, batch = gradient(model), params_of(model), examples(6)

    def size(x: Tensor) -> Tensor:
        return norm(compute(params, Batch(x, batch.y), None)).square()

    problems = torch.stack([batch.x, batch.x.flip(-1)])
    found = vmap(torch.func.grad(size))(problems)
    for x, g in zip(problems, found, strict=True):
        x = x.clone().requires_grad_()
        own = {k: p.clone().requires_grad_() for k, p in params.items()}
        logits = functional_call(copy.deepcopy(model), own, (x,))
        first = torch.autograd.grad(F.cross_entropy(logits, batch.y), list(own.values()), create_graph=True)
        (expected,) = torch.autograd.grad(sum(t.square().sum() for t in first), x)  # type: ignore[arg-type]
        assert float((g - expected).abs().max()) < 1e-12


def test_one_step_is_minus_rate_times_the_gradient_to_the_bit() -> None:
    model, batch = network(), examples(4)
    g = gradient(model)(params_of(model), batch, None)
    update = local_sgd(0.3)(gradient(model))(params_of(model), batch, None)
    assert all(torch.equal(update[k], -0.3 * g[k]) for k in g)


def torch_sgd(
    model: nn.Module, batch: Batch, rate: float, steps: int, batch_size: int | None, mu: float = 0.0
) -> Update:
    """Local training as torch users write it: an optimizer, slices in order, FedProx's term in the loss."""
    own = copy.deepcopy(model)
    start = [p.detach().clone() for p in own.parameters()]
    optimizer = torch.optim.SGD(own.parameters(), lr=rate)
    size = batch_size or len(batch.x)
    slices = list(zip(batch.x.split(size), batch.y.split(size), strict=True))
    for step in range(steps):
        x, y = slices[step % len(slices)]
        proximity = sum(((p - s) ** 2).sum() for p, s in zip(own.parameters(), start, strict=True))
        loss = F.cross_entropy(own(x), y) + mu / 2 * proximity
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {k: p.detach() - s for (k, p), s in zip(own.named_parameters(), start, strict=True)}


@pytest.mark.parametrize(
    ("steps", "batch_size", "mu"),
    [(1, None, 0.0), (5, None, 0.0), (7, 2, 0.0), (3, 6, 0.0), (4, None, 0.8), (7, 3, 0.8), (1, None, 0.8)],
)
def test_local_training_is_torchs_sgd(steps: int, batch_size: int | None, mu: float) -> None:
    model, batch = network(), examples(6)
    train = local_sgd(0.4, steps=steps, batch_size=batch_size, proximal_mu=mu)
    found = train(gradient(model))(params_of(model), batch, None)
    assert largest_difference(found, torch_sgd(model, batch, 0.4, steps, batch_size, mu)) < 1e-12


def test_scale_is_how_far_a_constant_gradient_moves_the_weights() -> None:
    train = local_sgd(0.25, steps=8)
    moved = train(lambda params, batch, rng: {"w": torch.ones(1)})({"w": torch.zeros(1)}, examples(1), None)
    assert moved["w"].item() == -train.scale == -2.0


class _Noisy(StochasticLayer):
    """Adds its draws, and their square to the loss."""

    def forward(self, x: Tensor) -> Tensor:
        if self.noise is not None:
            draws = self.noise
        elif self.rng is not None:
            draws = torch.randn(x.shape, generator=self.rng, dtype=x.dtype)
        else:
            draws = torch.zeros_like(x)
        self.penalty = (x * draws).square().sum()
        return x + draws


def test_a_layer_that_draws_gets_the_clients_generator_and_adds_to_the_loss() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), _Noisy(), nn.Linear(7, 3)).double()
    params, batch = params_of(model), examples(3)
    draws = torch.randn((3, 7), generator=generator("layer"), dtype=torch.float64)
    own = {k: p.clone().requires_grad_() for k, p in params.items()}
    hidden = F.linear(batch.x.flatten(1), own["1.weight"], own["1.bias"])
    loss = F.cross_entropy(F.linear(hidden + draws, own["3.weight"], own["3.bias"]), batch.y)
    expected = dict(
        zip(own, torch.autograd.grad(loss + (hidden * draws).square().sum(), list(own.values())), strict=True)
    )
    assert largest_difference(gradient(model)(params, batch, generator("layer")), expected) < 1e-12
    plain = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Identity(), nn.Linear(7, 3)).double()
    quiet = gradient(model)(params, batch, None)
    assert largest_difference(quiet, gradient(plain)(params, batch, None)) < 1e-12, "without a generator: its mean"
    layer = next(m for m in model.modules() if isinstance(m, _Noisy))
    assert layer.rng is None and layer.penalty is None, "nothing of a pass is kept"


class _InNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(2 * g.numpy())


@pytest.mark.parametrize(("written", "slope"), [(_InNumPy.apply, 2.0), (lambda x: torch.zeros(1), 0.0)])
def test_a_backward_of_numpy_and_a_loss_of_nothing_have_their_gradients(
    written: Callable[[Tensor], Tensor], slope: float
) -> None:
    batch = Batch(torch.ones(1, 1), torch.zeros(1))
    update = gradient(nn.Linear(1, 1, bias=False), lambda out, y: written(out).sum())
    assert float(update({"weight": torch.ones(1, 1)}, batch, None)["weight"]) == slope
