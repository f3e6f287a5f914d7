"""What every defense promises, whichever it is: found by walking the package, so a new one is held to it at once."""

import itertools
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.func import vmap

from client.components import build
from client.models import detached_params
from client.protocol import TRANSFORM
from client.update import Batch, OnUpdate, Params, Update, UpdateFn, chain, gradient, local_sgd, mean_of, per_example

# arguments under which a defense changes a small gradient visibly; a new defense needs a line here
ARGUMENTS: dict[str, dict[str, Any]] = {
    "defenses.clip:clip": {"max_norm": 0.05},
    "defenses.mask:mask": {"keep": 0.5},
    "defenses.noise:gaussian": {"sigma": 0.1},
    "defenses.noise:identity": {},
    "defenses.noise:laplace": {"scale": 0.1},
    "defenses.prune:prune": {"keep": 0.3},
    "defenses.sign:sign": {"scale": 0.5},
}
VARIANTS = {**ARGUMENTS, "defenses.mask:mask known": {"keep": 0.5, "seed": 3}}
RANDOM = {"defenses.mask:mask", "defenses.noise:gaussian", "defenses.noise:laplace"}
every = pytest.mark.parametrize("name", VARIANTS)


def make(name: str) -> OnUpdate:
    link = build({"use": name.split(" ")[0], **VARIANTS[name]}, "here", TRANSFORM)
    assert isinstance(link, OnUpdate)
    return link


def test_every_defense_of_the_package_is_held_to_the_contract() -> None:
    listed, there = set(ARGUMENTS), set(TRANSFORM.names()) - {"client.update:local_sgd"}
    assert not there - listed, (
        f"new: {sorted(there - listed)}; add to ARGUMENTS, above, what changes a small gradient visibly (to RANDOM, if it "
        "draws), and its row to README's table"
    )
    assert not listed - there, f"gone: {sorted(listed - there)}; take their lines out of ARGUMENTS"


def an_update(dtype: torch.dtype = torch.float64) -> Update:
    rng = Generator().manual_seed(1)
    shapes = {"weight": (4, 6), "bias": (4,), "scalar": (), "kernel": (2, 3, 2, 2)}
    return {k: torch.randn(s, generator=rng, dtype=torch.float64).to(dtype) for k, s in shapes.items()}


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def same(a: Update, b: Update) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_names_shapes_and_types_stay(name: str, dtype: torch.dtype) -> None:
    update = an_update(dtype)
    defended = make(name).apply(update, seeded())
    assert list(defended) == list(update)
    assert {k: (t.shape, t.dtype) for k, t in defended.items()} == {k: (t.shape, dtype) for k, t in update.items()}


@every
def test_it_does_what_it_is_for(name: str) -> None:
    assert same(make(name).apply(an_update(), seeded()), an_update()) == (name == "defenses.noise:identity")


@every
def test_the_update_is_not_written_to(name: str) -> None:
    update, kept = an_update(), an_update()
    defended = make(name).apply(update, seeded())
    make(name).mean(lambda params, batch, rng: update)({}, Batch(torch.zeros(1), torch.zeros(1)), None)
    assert same(update, kept)
    if name != "defenses.noise:identity":
        assert all(d.data_ptr() != update[k].data_ptr() for k, d in defended.items())


@every
def test_a_zero_update_stays_finite(name: str) -> None:
    zero = {k: torch.zeros_like(t) for k, t in an_update().items()}
    defended = make(name).apply(zero, seeded())
    assert all(torch.isfinite(t).all() for t in defended.values())
    if name not in {"defenses.noise:gaussian", "defenses.noise:laplace"}:
        assert same(defended, zero)


@every
def test_all_randomness_comes_from_the_generator(name: str) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, again, other = (make(name).apply(an_update(), seeded(s)) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first, again)
    assert same(first, other) == (name not in RANDOM)


# ------------------------------------------------------------------------------------------------------- composition

MODEL = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3)).double()
PARAMS: Params = detached_params(MODEL)
BATCH = Batch(torch.rand(4, 5, generator=seeded(), dtype=torch.float64), torch.tensor([0, 1, 2, 0]))
BARE: UpdateFn = gradient(MODEL)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(VARIANTS, repeat=2)))
def test_defenses_compose_in_every_order_and_position(first: str, second: str) -> None:
    a, b, sgd = make(first), make(second), local_sgd(0.5)
    g = BARE(PARAMS, BATCH, None)

    def moved(update: Update) -> Update:
        return {k: -0.5 * t for k, t in update.items()}

    def by_hand(*steps: Any) -> Update:
        update, rng = g, seeded(3)
        for step in steps:
            update = step.apply(update, rng) if isinstance(step, OnUpdate) else moved(update)
        return update

    for links in ((a, b, sgd), (a, sgd, b), (sgd, a, b)):
        assert same(chain(*links)(BARE)(PARAMS, BATCH, seeded(3)), by_hand(*links)), links
    several = chain(per_example(chain(a, b)), a, local_sgd(0.5, 3), b)(BARE)(PARAMS, BATCH, seeded(3))
    assert all(torch.isfinite(t).all() for t in several.values())
    assert {k: t.shape for k, t in several.items()} == {k: p.shape for k, p in PARAMS.items()}


def alone(x: Tensor, y: Tensor) -> Batch:
    return Batch(x[None], y[None])


@every
def test_per_example_is_the_loop_over_examples(name: str) -> None:
    link = make(name)
    found = per_example(link)(BARE)(PARAMS, BATCH, seeded())
    if name in RANDOM:
        assert same(found, per_example(link)(BARE)(PARAMS, BATCH, seeded()))
        return
    looped = [link.apply(BARE(PARAMS, alone(x, y), None), None) for x, y in zip(*BATCH, strict=True)]
    for k, t in found.items():
        torch.testing.assert_close(t, torch.stack([u[k] for u in looped]).mean(0), rtol=0, atol=1e-12)


@every
@pytest.mark.parametrize("place", ["each", "before", "after"])
def test_the_attackers_form_is_its_loop_under_vmap(name: str, place: str) -> None:
    """As the matching engine calls it: no generator, and vmap refuses any draw of torch's."""
    link = make(name)
    links = {
        "each": (per_example(link), local_sgd(0.5, 2)),
        "before": (link, local_sgd(0.5, 2)),
        "after": (local_sgd(0.5, 2), link),
    }
    client = chain(*links[place]).mean(BARE)
    problems = torch.rand(3, *BATCH.x.shape, generator=seeded(5), dtype=torch.float64)
    state = torch.get_rng_state()
    together = vmap(lambda x: client(PARAMS, Batch(x, BATCH.y), None))(problems)
    assert torch.equal(torch.get_rng_state(), state)
    for k, x in enumerate(problems):
        for name_, t in client(PARAMS, Batch(x, BATCH.y), None).items():
            torch.testing.assert_close(together[name_][k], t, rtol=0, atol=1e-12)


@every
def test_the_attackers_form_can_be_differentiated(name: str) -> None:
    client = chain(make(name), local_sgd(0.5)).mean(BARE)

    def of_x(x: Tensor) -> Tensor:
        return torch.cat([t.flatten() for t in client(PARAMS, Batch(x, BATCH.y), None).values()])

    x = BATCH.x.clone().requires_grad_()
    assert torch.autograd.gradcheck(of_x, x, eps=1e-7, atol=1e-5)
    (g,) = torch.autograd.grad(of_x(x).square().sum(), x)
    if name != "defenses.clip:clip":  # a clipped update always has the same norm
        assert g.abs().max() > 1e-8


@every
def test_the_attackers_form_is_the_average_of_the_clients(name: str) -> None:
    link, update = make(name), an_update()
    expected = mean_of(link)(lambda params, batch, rng: update)({}, BATCH, None)
    if name == "defenses.sign:sign":  # its stand-in agrees on the sign and stays inside the true values
        defended = link.apply(update, None)
        assert all(torch.equal(expected[k].sign(), defended[k].sign()) for k in update)
        assert all((expected[k].abs() < defended[k].abs()).all() for k in update)
        return
    if name not in RANDOM:
        assert same(expected, link.apply(update, None))
        return
    rng, n = seeded(), 4000
    draws = [link.apply(update, rng) for _ in range(n)]
    for k, mean in expected.items():
        stacked = torch.stack([d[k] for d in draws])
        error = (stacked.mean(0) - mean).abs() / (stacked.std(0) / n**0.5)
        assert error.max() < 5, "an average off by five standard errors"
