"""The vocabulary of updates, against autograd, torch.optim and loops over samples."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedgauge.client.chain import Chain, chain
from fedgauge.client.rng import generator, seed_of
from fedgauge.client.training import StochasticLayer, gradient, local_sgd
from fedgauge.client.transforms import (
    BatchTransform,
    Link,
    StatefulTransform,
    TransformState,
    UpdateTransform,
    noise_free,
    per_example,
)
from fedgauge.client.update import Batch, Params, Transform, Update, UpdateFn, norm
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian, identity


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def params_of(model: nn.Module) -> Params:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def examples(n: int, seed: int = 0) -> Batch:
    rng = Generator().manual_seed(seed)
    return Batch(
        torch.rand(n, 1, 3, 4, generator=rng, dtype=torch.float64), torch.randint(3, (n,), generator=rng)
    )  # fmt: skip


def autograd(model: nn.Module, params: Params, batch: Batch, loss: Callable[..., Tensor] = F.cross_entropy) -> Update:
    own = copy.deepcopy(model)
    own.load_state_dict(params, strict=False)
    loss(own(batch.x), batch.y).backward()
    return {k: p.grad for k, p in own.named_parameters() if p.grad is not None}


def largest_difference(a: Update, b: Update) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


# ------------------------------------------------------------------------------------------------------- the gradient


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda z, y: F.cross_entropy(z, y, reduction="sum")])
def test_the_gradient_is_autograds(loss: Callable[..., Tensor]) -> None:
    model, batch = network(), examples(6)
    found = gradient(model, loss)(params_of(model), batch, None)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert largest_difference(found, autograd(model, params_of(model), batch, loss)) < 1e-15


def test_the_gradient_is_taken_at_the_given_params_not_at_the_models() -> None:
    model, batch, other = network(0), examples(6), params_of(network(1))
    assert largest_difference(gradient(model)(other, batch, None), autograd(model, other, batch)) < 1e-15


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
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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


# ---------------------------------------------------------------------------------------------------------- the chain


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


def test_a_chain_is_the_nesting_of_its_links() -> None:
    model, batch = network(), examples(4)
    links: tuple[Transform, ...] = (clip(0.3), local_sgd(0.1, steps=2), clip(0.01))
    nested = links[2](links[1](links[0](gradient(model))))(params_of(model), batch, None)
    assert largest_difference(chain(*links)(gradient(model))(params_of(model), batch, None), nested) == 0


@pytest.mark.parametrize("links", [(), (clip(1.0),), (local_sgd(0.1), local_sgd(0.1))], ids=["0", "no", "two"])
def test_a_chain_has_exactly_one_local_sgd(links: tuple[Transform, ...]) -> None:
    count = sum(isinstance(link, local_sgd) for link in links)
    with pytest.raises(ValueError, match=f"exactly one local_sgd.*this one has {count}"):
        _ = chain(*links).local
    assert chain(clip(1.0), local_sgd(0.3), clip(1.0)).local == local_sgd(0.3)


def test_mean_of_takes_the_noise_out_of_every_nesting() -> None:
    noisy = chain(per_example(chain(clip(1.0), gaussian(1.0))), gaussian(1.0), local_sgd(0.1), gaussian(1.0))
    expected = chain(per_example(chain(clip(1.0), identity())), identity(), local_sgd(0.1), identity())
    assert noisy.mean == expected
    assert noise_free(noisy) == expected

    def anybodys(compute: UpdateFn) -> UpdateFn:
        return compute

    assert noise_free(anybodys) is anybodys


def test_a_link_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Link()  # type: ignore[abstract]


# --------------------------------------------------------------------------------------------------------- local_sgd


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


def test_the_proximal_term_holds_the_weights_back() -> None:
    model, batch = network(), examples(6)
    sizes = [
        float(norm(local_sgd(0.1, 20, proximal_mu=mu)(gradient(model))(params_of(model), batch, None)))
        for mu in (0.0, 1.0, 5.0)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < 0.8 * sizes[0]


def test_scale_is_how_far_a_constant_gradient_moves_the_weights() -> None:
    train = local_sgd(0.25, steps=8)
    moved = train(lambda params, batch, rng: {"w": torch.ones(1)})({"w": torch.zeros(1)}, examples(1), None)
    assert moved["w"].item() == -train.scale == -2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0.0}, "rate must be above 0, got 0.0"),
        ({"rate": -1.0}, "rate must be above 0, got -1.0"),
        ({"rate": float("nan")}, "rate must be above 0, got nan"),
        ({"rate": 0.1, "steps": 0}, "steps must be at least 1, got 0"),
        ({"rate": 0.1, "batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"rate": 0.1, "proximal_mu": -0.1}, "proximal_mu must not be negative, got -0.1"),
        ({"rate": 0.1, "proximal_mu": float("nan")}, "proximal_mu must not be negative, got nan"),
    ],
)
def test_local_sgd_refuses(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local_sgd(**arguments)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- per_example


def clipped_sample_by_sample(model: nn.Module, batch: Batch, max_norm: float) -> Update:
    """DP-SGD's clipping as a loop over samples, by autograd."""
    total = {k: torch.zeros_like(p) for k, p in params_of(model).items()}
    for x, y in zip(batch.x, batch.y, strict=True):
        g = autograd(model, params_of(model), Batch(x[None], y[None]))
        size = sum(float((t * t).sum()) for t in g.values()) ** 0.5
        for k, t in g.items():
            total[k] += t * min(1.0, max_norm / size)
    return {k: t / len(batch.x) for k, t in total.items()}


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 100.0])
def test_clipping_each_example_is_the_loop_over_samples(max_norm: float) -> None:
    model, batch = network(), examples(9)
    found = per_example(clip(max_norm))(gradient(model))(params_of(model), batch, None)
    assert largest_difference(found, clipped_sample_by_sample(model, batch, max_norm)) < 1e-9


def test_the_clipping_threshold_of_that_test_bites() -> None:
    model, batch = network(), examples(9)
    whole = gradient(model)(params_of(model), batch, None)
    assert largest_difference(clipped_sample_by_sample(model, batch, 0.5), whole) > 1e-2


def test_per_example_of_nothing_is_the_mean_gradient() -> None:
    model, batch = network(), examples(9)
    whole = gradient(model)(params_of(model), batch, None)
    assert largest_difference(per_example(identity())(gradient(model))(params_of(model), batch, None), whole) < 1e-15


def test_each_example_gets_its_own_noise() -> None:
    def zeros(params: Params, batch: Batch, rng: Generator | None) -> Update:
        return {"w": torch.zeros(10_000) + 0 * batch.x.sum()}

    sixteen = per_example(gaussian(1.0))(zeros)({}, examples(16), Generator().manual_seed(1))["w"]
    # a mean of 16 independent draws has deviation 1/4; the sample deviation of n draws errs by 1/sqrt(2n)
    assert abs(float(sixteen.std()) * 4 - 1) < 5 / (2 * 10_000) ** 0.5


def whole_client(model: nn.Module) -> UpdateFn:
    return chain(per_example(chain(clip(1.0), gaussian(0.1))), gaussian(0.05), local_sgd(0.1, 2), gaussian(0.01))(
        gradient(model)
    )


def test_a_client_is_a_function_of_its_seed() -> None:
    model, batch = network(), examples(5)
    runs = [whole_client(model)(params_of(model), batch, Generator().manual_seed(s)) for s in (7, 7, 8)]
    assert largest_difference(runs[0], runs[1]) == 0
    assert largest_difference(runs[0], runs[2]) > 1e-3


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


# --------------------------------------------------------------------------------------------------------------- norm


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_norm_is_that_of_all_entries_together(entries: list[list[float]]) -> None:
    update = {str(i): torch.tensor(row, dtype=torch.float64) for i, row in enumerate(entries)}
    flat = torch.cat(list(update.values()))
    assert float(norm(update)) == pytest.approx(float(torch.linalg.vector_norm(flat)), rel=1e-12, abs=1e-150)


def test_the_norm_has_a_derivative_at_zero() -> None:
    x = torch.zeros(3, requires_grad=True)
    norm({"w": x}).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0, 0.0]
    assert norm({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}).item() == 5.0


# ---------------------------------------------------------------------------------------------------------- the seeds


def test_seeds_depend_on_every_part_and_on_their_order() -> None:
    parts: list[tuple[str | int, ...]] = [(1, "a"), ("a", 1), ("1", "a"), (1, "a", 0), (1,), (), (11, "a"), (1, 1, "a")]
    seeds = [seed_of(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= s < 2**63 for s in seeds)


def test_seeds_are_the_same_on_every_machine() -> None:
    # blake2b("(0, 'batch', 1, 2)"), computed by b2sum -l 64
    assert seed_of(0, "batch", 1, 2) == 0x16417D442201E917 >> 1
    assert torch.equal(torch.rand(3, generator=generator(1, "x")), torch.rand(3, generator=generator(1, "x")))
    assert not torch.equal(torch.rand(3, generator=generator(1, "x")), torch.rand(3, generator=generator(2, "x")))


def test_a_chain_is_a_value() -> None:
    assert chain(clip(1.0), local_sgd(0.1)) == Chain((clip(1.0), local_sgd(0.1)))
    assert hash(per_example(clip(1.0))) == hash(per_example(clip(1.0)))


# ------------------------------------------------------------------------- examples, memory, and layers that draw


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
    sent = [whole.remembering(memory)(gradient(model))(params, batch, None) for batch in rounds]
    first = chain(local_sgd(0.5))(gradient(model))(params, rounds[0], None)
    assert all(not t.any() for round in sent[:2] for t in round.values()), "two links delay by two rounds"
    assert largest_difference(sent[2], first) == 0
    assert all(not t.any() for t in whole(gradient(model))(params, rounds[0], None).values()), "unbound: a first round"


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
