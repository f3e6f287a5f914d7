"""What every defense promises, whichever it is: found by walking the package, so a new one is held to it at once."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.func import vmap

from fedgauge.client.chain import Chain, chain
from fedgauge.client.components import SpecError, build
from fedgauge.client.federation import TRANSFORM
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import LOCAL_TRAININGS, local_sgd
from fedgauge.client.models.vision import detached_params
from fedgauge.client.transforms import (
    Link,
    StatefulTransform,
    TransformState,
    UpdateTransform,
    noise_free,
    per_example,
)
from fedgauge.client.update import Batch, Params, Transform, Update, UpdateFn
from tests.tensors import identical, seeded

# arguments under which a defense changes a small gradient visibly; a new defense needs a line here
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ats": {"policy": "7-4-15+21-13-3"},
    "clip": {"max_norm": 0.05},
    "dp_sgd": {"max_norm": 0.05, "noise_multiplier": 0.5},
    "freeze": {"layers": ["scale", "conv"]},
    "mask": {"keep": 0.5},
    "mixup": {"alpha": 0.4},
    "gaussian": {"sigma": 0.1},
    "identity": {},
    "laplace": {"scale": 0.1},
    "private_layers": {"layers": ["scale", "conv"]},
    "prune": {"keep": 0.3},
    "local_dp": {"epsilon": 50.0},
    "percentile_privacy": {"percentile": 30.0},
    "quantize": {"bits": 4},
    "sign": {"scale": 0.5},
    "soteria": {"rate": 0.5},
    "svt_privacy": {"gamma": 0.05, "tau": 0.0, "noise_var": 5.0},
    "top_k": {"keep": 0.3},
}
VARIANTS: dict[str, dict[str, Any]] = {
    **ARGUMENTS,
    "mask known": {"keep": 0.5, "seed": 3},
    "quantize uniform": {"bits": 3, "kind": "uniform"},
    "top_k without memory": {"keep": 0.3, "error_feedback": False},
}
RANDOM = {
    "ats",
    "dp_sgd",
    "mask",
    "mixup",
    "gaussian",
    "laplace",
    "local_dp",
    "quantize",
    "quantize uniform",
    "svt_privacy",
}
# what zeros do not become zeros again under
NOISE = {"gaussian", "laplace", "local_dp", "svt_privacy"}


class Small(nn.Module):
    """A kernel, matrices, vectors and a scalar: every form that a parameter has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.hidden, self.last = nn.Linear(18, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.scale * self.last(self.hidden(self.conv(x).sigmoid().flatten(1)).sigmoid())
        return logits


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    MODEL = Small().double()
PARAMS: Params = detached_params(MODEL)
BATCH = Batch(torch.rand(4, 1, 4, 4, generator=seeded(), dtype=torch.float64), torch.tensor([0, 1, 2, 0]))
BARE: UpdateFn = gradient(MODEL)
OFFERED = {"model": MODEL, "shape": (1, 4, 4), "classes": 3, "batch_size": 4, "normalise": lambda x: x}


def make(name: str) -> Link:
    link = build({"use": name.split(" ")[0], **VARIANTS[name]}, "here", TRANSFORM, OFFERED)
    assert isinstance(link, Link)
    return link


every = pytest.mark.parametrize("name", VARIANTS)
OF_UPDATES = [name for name in VARIANTS if isinstance(make(name), UpdateTransform | StatefulTransform)]
of_updates = pytest.mark.parametrize("name", OF_UPDATES)
ALONE = [name for name in VARIANTS if isinstance(make(name), UpdateTransform)]


def test_every_defense_of_the_package_is_held_to_the_contract() -> None:
    listed, there = set(ARGUMENTS), set(TRANSFORM.names()) - set(LOCAL_TRAININGS)
    assert not there - listed, (
        f"new: {sorted(there - listed)}; add to ARGUMENTS, above, what changes a small gradient visibly (to RANDOM, if it "
        "draws), and its row to README's table"
    )
    assert not listed - there, f"gone: {sorted(listed - there)}; take their lines out of ARGUMENTS"


def an_update(dtype: torch.dtype = torch.float64) -> Update:
    rng = seeded(1)
    return {k: torch.randn(p.shape, generator=rng, dtype=torch.float64).to(dtype) for k, p in PARAMS.items()}


def applied(link: Transform, update: Update, rng: Generator | None) -> Update:
    """What a defense of the update makes of one."""
    return link(lambda params, batch, rng: update)(PARAMS, BATCH, rng)


@pytest.mark.product
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_names_shapes_and_types_are_kept(name: str, dtype: torch.dtype) -> None:
    params, batch = {k: p.to(dtype) for k, p in PARAMS.items()}, Batch(BATCH.x.to(dtype), BATCH.y)
    link = make(name)
    if name in OF_UPDATES:
        defended = link(lambda *_: an_update(dtype))(params, batch, seeded())
    else:
        defended = link(BARE)(params, batch, seeded())
    assert list(defended) == list(PARAMS)
    assert {k: (t.shape, t.dtype) for k, t in defended.items()} == {k: (t.shape, dtype) for k, t in PARAMS.items()}


@every
def test_the_example_does_its_task(name: str) -> None:
    assert identical(make(name)(BARE)(PARAMS, BATCH, seeded()), BARE(PARAMS, BATCH, None)) == (name == "identity")


@every
def test_the_weights_and_the_examples_are_not_written_to(name: str) -> None:
    params, batch = {k: p.clone() for k, p in PARAMS.items()}, Batch(*(t.clone() for t in BATCH))
    for client in (make(name)(BARE), make(name).mean(BARE)):
        client(params, batch, seeded())
        assert identical(params, PARAMS)
        assert torch.equal(batch.x, BATCH.x)
        assert torch.equal(batch.y, BATCH.y)


@of_updates
def test_the_update_is_not_written_to(name: str) -> None:
    update, kept = an_update(), an_update()
    defended = applied(make(name), update, seeded())
    applied(make(name).mean, update, None)
    assert identical(update, kept)
    if name != "identity":
        assert all(d.data_ptr() != update[k].data_ptr() for k, d in defended.items())


@of_updates
def test_a_zero_update_stays_finite(name: str) -> None:
    zero = {k: torch.zeros_like(t) for k, t in an_update().items()}
    defended = applied(make(name), zero, seeded())
    assert all(torch.isfinite(t).all() for t in defended.values())
    if name not in NOISE:
        assert identical(defended, zero)


def sizes(dtype: torch.dtype) -> list[float]:
    info = torch.finfo(dtype)
    smallest = info.tiny * info.eps
    return [0.0, smallest, 7 * smallest, 71 * smallest, info.tiny, 1.0, 2 * info.max**0.5, info.max]


@pytest.mark.product
@of_updates
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_finite_inputs_give_finite_outputs(name: str, dtype: torch.dtype) -> None:
    """From the smallest number to the largest: a gradient's size is the weights' choice, and noise does not hide infinity."""
    link = make(name)
    for a, b in itertools.combinations_with_replacement(sizes(dtype), 2):
        update = {k: t.fill_(a) for k, t in an_update(dtype).items()}
        for t in update.values():
            t.view(-1)[::2] = -b
        memory: TransformState = {}
        rounds = link.bound(memory, "") if isinstance(link, StatefulTransform) else link
        for seed in range(3):
            defended = applied(rounds, update, seeded(seed))
            assert all(torch.isfinite(t).all() for t in (*defended.values(), *memory.values())), (a, b)


@every
def test_all_randomness_comes_from_the_generator(name: str) -> None:
    state = torch.get_rng_state()
    first, again, other = (make(name)(BARE)(PARAMS, BATCH, seeded(s)) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert identical(first, again)
    assert identical(first, other) == (name not in RANDOM)


# ------------------------------------------------------------------------------------------------------- composition


def moved(update: Update) -> Update:
    return {k: -0.5 * t for k, t in update.items()}


@pytest.mark.product
@pytest.mark.parametrize("first", ALONE)
@pytest.mark.parametrize("second", ALONE)
def test_defenses_of_the_update_compose_in_every_order_and_position(first: str, second: str) -> None:
    a, b, sgd = make(first), make(second), local_sgd(0.5)
    g = BARE(PARAMS, BATCH, None)

    def by_hand(*steps: Any) -> Update:
        update, rng = g, seeded(3)
        for step in steps:
            update = step.apply(update, rng) if isinstance(step, UpdateTransform) else moved(update)
        return update

    for links in ((a, b, sgd), (a, sgd, b), (sgd, a, b)):
        assert identical(chain(*links)(BARE)(PARAMS, BATCH, seeded(3)), by_hand(*links)), links
    several = chain(per_example(chain(a, b)), a, local_sgd(0.5, 3), b)(BARE)(PARAMS, BATCH, seeded(3))
    assert all(torch.isfinite(t).all() for t in several.values())
    assert {k: t.shape for k, t in several.items()} == {k: p.shape for k, p in PARAMS.items()}


def makes_sense(composed: Chain) -> bool:
    """Whether a federation would take this order."""
    if list(composed.faults()):
        return False
    local = composed.links.index(composed.local)
    return not any(isinstance(link, StatefulTransform) for link in composed.links[:local])


@pytest.mark.product
@pytest.mark.parametrize(
    ("first", "second"), [p for p in itertools.permutations(ARGUMENTS, 2) if not set(p) <= set(ALONE)]
)
def test_defenses_of_other_kinds_compose_wherever_a_federation_takes_them(first: str, second: str) -> None:
    a, b, sgd = make(first), make(second), local_sgd(0.5, 2)
    sensible = [c for c in map(Chain, ((a, b, sgd), (a, sgd, b), (sgd, a, b))) if makes_sense(c)]
    for composed in sensible:
        update = composed(BARE)(PARAMS, BATCH, seeded(3))
        assert all(torch.isfinite(t).all() for t in update.values())
        assert {k: t.shape for k, t in update.items()} == {k: p.shape for k, p in PARAMS.items()}
        assert identical(update, composed(BARE)(PARAMS, BATCH, seeded(3))), "the same seed, the same bits"


def alone(x: Tensor, y: Tensor) -> Batch:
    return Batch(x[None], y[None])


@pytest.mark.parametrize("name", ALONE)
def test_per_example_is_the_loop_over_examples(name: str) -> None:
    link = make(name)
    found = per_example(link)(BARE)(PARAMS, BATCH, seeded())
    if name in RANDOM:
        assert identical(found, per_example(link)(BARE)(PARAMS, BATCH, seeded()))
        return
    looped = [applied(link, BARE(PARAMS, alone(x, y), None), None) for x, y in zip(*BATCH, strict=True)]
    for k, t in found.items():
        torch.testing.assert_close(t, torch.stack([u[k] for u in looped]).mean(0), rtol=0, atol=1e-12)


def places(link: Link) -> Sequence[Chain]:
    """Everywhere that a federation takes a defense."""
    anywhere = [(link, local_sgd(0.5, 2)), (local_sgd(0.5, 2), link)]
    each = [(per_example(link), local_sgd(0.5, 2))] if isinstance(link, UpdateTransform) else []
    found = [c for c in map(Chain, [*each, *anywhere]) if makes_sense(c)]
    assert found, "no place for it in any chain"
    return found


@every
def test_the_attackers_form_is_its_loop_under_vmap(name: str) -> None:
    """As the matching engine calls it: no generator, and vmap refuses any draw of torch's."""
    problems = torch.rand(3, *BATCH.x.shape, generator=seeded(5), dtype=torch.float64)
    for composed in places(make(name)):
        client = composed.mean(BARE)
        state = torch.get_rng_state()
        together = vmap(lambda x, client=client: client(PARAMS, Batch(x, BATCH.y), None))(problems)
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
    assert torch.autograd.gradcheck(of_x, x, eps=1e-7, atol=1e-5, fast_mode=True)
    (g,) = torch.autograd.grad(of_x(x).square().sum(), x)
    if name != "clip":  # a clipped update always has the same norm
        assert g.abs().max() > 1e-8


@of_updates
def test_the_attackers_form_is_the_average_of_the_clients(name: str) -> None:
    link, update = make(name), an_update()
    expected = applied(noise_free(link), update, None)
    if name == "sign":  # its stand-in agrees on the sign and stays inside the true values
        defended = applied(link, update, None)
        assert all(torch.equal(expected[k].sign(), defended[k].sign()) for k in update)
        assert all((expected[k].abs() < defended[k].abs()).all() for k in update)
        return
    if name not in RANDOM:
        assert identical(expected, applied(link, update, None))
        return
    rng, n = seeded(), 1500
    draws = [applied(link, update, rng) for _ in range(n)]
    if name == "svt_privacy":  # which entries are sent depends on all; its stand-in has the average's direction
        averages = torch.cat([torch.stack([d[k] for d in draws]).mean(0).flatten() for k in expected])
        assert torch.cosine_similarity(averages, torch.cat([t.flatten() for t in expected.values()]), dim=0) > 0.9
        return
    for k, mean in expected.items():
        stacked = torch.stack([d[k] for d in draws])
        # an entry that is a level, or the only one of its tensor, is rounded to itself each time
        error = (stacked.mean(0) - mean).abs() / (stacked.std(0) / n**0.5 + 1e-12)
        assert error.max() < 5, "an average off by five standard errors"


NAN = float("nan")


@pytest.mark.parametrize(("use", "arguments", "name"), [
    ("clip", {"max_norm": 0.0}, "max_norm"), ("clip", {"max_norm": NAN}, "max_norm"),
    ("mask", {"keep": 0.0}, "keep"), ("mask", {"keep": 1.1}, "keep"), ("mask", {"keep": NAN}, "keep"),
    ("prune", {"keep": 0.0}, "keep"), ("prune", {"keep": 1.1}, "keep"), ("top_k", {"keep": NAN}, "keep"),
    ("gaussian", {"sigma": -1.0}, "sigma"), ("gaussian", {"sigma": NAN}, "sigma"), ("laplace", {"scale": -1.0}, "scale"),
    ("sign", {"scale": 0.0}, "scale"), ("quantize", {"bits": 1}, "bits"), ("quantize", {"bits": 17}, "bits"),
    ("quantize", {"bits": 8, "kind": "int8"}, "kind"), ("mixup", {"alpha": 0.0}, "alpha"), ("mixup", {"alpha": NAN}, "alpha"),
    ("dp_sgd", {"max_norm": 0.0, "noise_multiplier": 1.0}, "max_norm"),
    ("dp_sgd", {"max_norm": 1.0, "noise_multiplier": NAN}, "noise_multiplier"),
    ("soteria", {"rate": 1.0}, "rate"), ("soteria", {"rate": NAN}, "rate"), ("soteria", {"layer": "fc"}, "fc"),
    ("freeze", {"layers": []}, "layers"), ("freeze", {"layers": ["fc"]}, "fc"),
    ("freeze", {"layers": ["conv", "hidden", "last", "scale"]}, "layers"), ("private_layers", {"layers": ["hid"]}, "hid"),
    ("ats", {"policy": "7-50"}, "50"), ("ats", {"policy": [-1]}, "-1"), ("ats", {"policy": "7-4-"}, "policy"),
    ("percentile_privacy", {"percentile": 101.0}, "percentile"), ("percentile_privacy", {"gamma": 0.0}, "gamma"),
    ("svt_privacy", {"fraction": 0.0}, "fraction"), ("svt_privacy", {"noise_var": 0.0}, "noise_var"),
    ("svt_privacy", {"steps": 0}, "steps"), ("svt_privacy", {"version": "2.9"}, "version"),
    ("svt_privacy", {"version": "2.7", "epsilon_release": 1.0}, "version"),
    ("svt_privacy", {"epsilon_query": 0.05, "epsilon_threshold": 0.01}, "epsilon_query"),
    ("svt_privacy", {"epsilon_query": 0.2}, "epsilon_query"), ("svt_privacy", {"epsilon_release": 0.0}, "epsilon_release"),
    ("local_dp", {"epsilon": 0.0}, "epsilon"), ("soteria", {"model": nn.Conv2d(1, 2, 3)}, "connected"),
    ("ats", {"policy": "7", "shape": (2, 32, 32)}, "shape"), ("ats", {"policy": "7", "shape": (16,)}, "shape"),
    ("mixup", {"alpha": 0.4, "batch_size": 1}, "batch_size"),
])  # fmt: skip
def test_a_value_without_sense_is_refused(use: str, arguments: dict[str, Any], name: str) -> None:
    offered = {key: arguments.get(key, value) for key, value in OFFERED.items()}
    table = {"use": use, **{key: value for key, value in arguments.items() if key not in OFFERED}}
    with pytest.raises(SpecError, match=name):
        build(table, "here", TRANSFORM, offered)
