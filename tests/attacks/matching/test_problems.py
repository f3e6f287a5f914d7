"""The objective: that of a plain loop, whichever way it is computed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Budget, Knowledge, Observation, Wave
from fedgauge.attacks.engine.gradient_distances import Distance, cosine, squared
from fedgauge.attacks.engine.gradients.per_problem import whole_batch_update
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.matching import problems
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import total_variation
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.recipes import bayes, inverting_gradients
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.chain import Chain, chain
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.transforms import per_example
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import laplace
from tests.attacks.matching.tiny_problems import (
    CLASSES,
    MEAN,
    SHAPE,
    STD,
    network,
    normalise,
    plain_objective,
    scene,
    streams,
    truth,
)


def evaluate(
    objective: Objective, z: Tensor, wave: Wave, known: Knowledge, group: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The engine's gradients and objectives at images z (K, R, B, C, H, W)."""
    assert known.labels is not None
    labels = known.labels.repeat_interleave(z.shape[1], 0)
    posed = Problems(objective, wave, known, labels, z.shape[1], z.dtype, group)
    value, slopes = posed.value_and_slopes({"x": z.flatten(0, 1)}, torch.arange(posed.count))
    return slopes["x"].view_as(z), value.view(z.shape[:2])


CLIENTS = {
    "fedsgd": (chain(local_sgd(0.1)), {"steps": 1, "clipped": False}),
    "three local steps": (chain(local_sgd(0.1, 3)), {"steps": 3, "clipped": False}),
    "clipped examples": (chain(per_example(clip(1.0)), local_sgd(0.1, 2)), {"steps": 2, "clipped": True}),
}
DISTANCES: dict[str, Distance] = {"cosine": cosine(), "squared": squared()}


@pytest.mark.parametrize("general", [False, True], ids=["by passes", "by vmap"])
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.usefixtures("double")
def test_objective_and_gradient_are_the_plain_loops(
    distance: str, client: str, general: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, plain = CLIENTS[client]
    wave, known, batches = scene(clients=3, links=links)
    if general:
        monkeypatch.setattr(problems, "whole_batch_update", lambda *_: None)
    else:
        assert (whole_batch_update(links.mean) is None) == plain["clipped"]
    objective = Objective(DISTANCES[distance], (total_variation(0.05),))
    z = torch.randn(3, 2, 2, *SHAPE, generator=torch.Generator().manual_seed(5))  # (K, R, B, C, H, W)
    gradients, objectives = evaluate(objective, z, wave, known)
    for k in range(3):
        for r in range(2):
            leaf = z[k, r].clone().requires_grad_()
            value = plain_objective(
                known.model, wave.params, wave.alone(k), leaf, batches[k].y, distance, 0.05, **plain
            )
            (expected,) = torch.autograd.grad(value, leaf)
            assert float(objectives[k, r]) == pytest.approx(value.item(), abs=1e-12)
            assert float((gradients[k, r] - expected).abs().max()) < 1e-9 * float(expected.abs().max())


CHAINS: dict[str, tuple[Chain, bool]] = {
    "clipped gradient": (chain(clip(0.5), local_sgd(0.1)), True),
    "clipped change": (chain(local_sgd(0.1, 3, proximal_mu=0.2), clip(0.01)), True),
    "clipped twice": (chain(clip(0.5), local_sgd(0.1), clip(0.01)), True),
    "noise without a mean": (chain(laplace(0.1), local_sgd(0.1, 2), laplace(0.1)), True),
    "clipped gradients of two steps": (chain(clip(0.5), local_sgd(0.1, 2)), False),
    "slices": (chain(local_sgd(0.1, 2, batch_size=1)), False),
}


@pytest.mark.parametrize("links", CHAINS)
@pytest.mark.usefixtures("double")
def test_every_chain_by_passes_is_the_same_by_vmap(links: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, passes = CHAINS[links]
    assert (whole_batch_update(parts.mean) is not None) == passes
    wave, known, _ = scene(clients=3, links=parts)
    objective = Objective(cosine(), (total_variation(0.05),))
    z = torch.randn(3, 2, 2, *SHAPE, generator=torch.Generator().manual_seed(5))
    ours, values = evaluate(objective, z, wave, known)
    monkeypatch.setattr(problems, "whole_batch_update", lambda *_: None)
    theirs, expected = evaluate(objective, z, wave, known)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))


def test_in_float32_signed_adam_gets_the_same_signs() -> None:
    wave, known, batches = scene(clients=4, n=1)
    objective = inverting_gradients(tv=0.01).objective
    z = torch.randn(4, 4, 1, *SHAPE, generator=torch.Generator().manual_seed(5))
    found, _ = evaluate(objective, z, wave, known)
    exact = []
    model = network().double()
    start = {k: p.double() for k, p in wave.params.items()}
    for k in range(4):
        seen = {name: t.double() for name, t in wave.alone(k).items()}
        for r in range(4):
            leaf = z[k, r].double().requires_grad_()
            value = plain_objective(model, start, seen, leaf, batches[k].y, "cosine", 0.01, steps=1, clipped=False)
            exact.append(torch.autograd.grad(value, leaf)[0])
    agreement = (found.flatten().sign() == torch.stack(exact).flatten().sign()).double().mean()
    assert float(agreement) > 0.999


@pytest.mark.usefixtures("double")
def test_restarts_of_a_group_are_held_together() -> None:
    wave, known, _ = scene(clients=1)
    z = torch.randn(1, 3, 2, *SHAPE, generator=torch.Generator().manual_seed(5))
    free, _ = evaluate(Objective(cosine()), z, wave, known)
    held, higher = evaluate(Objective(cosine()), z, wave, known, group=0.7)
    apart = z - z.mean(1, keepdim=True)
    size = 2 * SHAPE[1] * SHAPE[2] * SHAPE[0]
    torch.testing.assert_close(held - free, 0.7 * 2 * apart / size, rtol=0, atol=1e-9)
    _, plain = evaluate(Objective(cosine()), z, wave, known)
    torch.testing.assert_close(higher - plain, 0.7 * apart.square().flatten(2).mean(2), rtol=0, atol=1e-9)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("disturbed", [False, True], ids=["factored", "disturbed"])
@pytest.mark.usefixtures("double")
def test_updates_of_large_layers_are_compared_by_their_factors_to_the_same_end(
    disturbed: bool, distance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1.weight and 3.weight, not 5.weight
    monkeypatch.setattr("fedgauge.attacks.engine.gradients.factored.FORM_BELOW", 300)
    torch.manual_seed(0)
    wave, known, batches = scene(clients=3, model=mlp(SHAPE, CLASSES, (24, 20), "tanh"))
    if disturbed:
        wave.update["1.weight"][1] += 1e-9 * torch.randn(24, 64, generator=torch.Generator().manual_seed(2))
    z = torch.randn(3, 2, 2, *SHAPE, generator=torch.Generator().manual_seed(5))
    assert known.labels is not None
    posed = Problems(Objective(DISTANCES[distance]), wave, known, known.labels.repeat_interleave(2, 0), 2, z.dtype)
    for some in (torch.arange(6), torch.tensor([4, 5, 1])):  # all, then those that are left
        value, slopes = posed.value_and_slopes({"x": z.flatten(0, 1)[some]}, some)
        for place, row in enumerate(some.tolist()):
            k, leaf = row // 2, z.flatten(0, 1)[row].clone().requires_grad_()
            expected = plain_objective(
                known.model, wave.params, wave.alone(k), leaf, batches[k].y, distance, 0.0, steps=1, clipped=False
            )
            assert float(value[place]) == pytest.approx(expected.item(), abs=1e-12)
            torch.testing.assert_close(
                slopes["x"][place], torch.autograd.grad(expected, leaf)[0], rtol=1e-9, atol=1e-11
            )
    assert {k: f is not None for k, f in posed.factors.items()} == {"1.weight": not disturbed, "3.weight": True}


def test_the_chains_own_likelihood_comes_nearer_than_the_cosine_under_laplace_noise() -> None:
    links = chain(local_sgd(1.0), laplace(0.2))
    model = network()
    params = detached_params(model)
    batches = [truth(seed, 1) for seed in range(24)]
    client = links(gradient(model, normalise=normalise))
    seen = [Observation(1, c, params, client(params, b, generator("noise", c))) for c, b in enumerate(batches)]
    labels = torch.stack([b.y for b in batches])
    known = Knowledge(model, links, SHAPE, CLASSES, 1, MEAN, STD, labels=labels)
    errors = {}
    for name in ("known", "cosine"):
        attack = bayes(name, tv=0.0, rate=0.05, decay=0.99)  # type: ignore[arg-type]
        found = attack.reconstruct(Wave.stack(seen), known, Budget(150), streams(*range(24)))
        errors[name] = sum(
            float((f.x - b.x).square().mean()) for f, b in zip(found, batches, strict=True) if f.x is not None
        )
    assert errors["known"] < errors["cosine"]


def test_pruned_entries_are_not_compared(
    make_federation: Callable[..., Federation], observe: Callable[..., Wave]
) -> None:
    """A guess is not held against entries that were dropped: who knows of the pruning comes nearer, on every client."""
    dropping = [{"use": "local_sgd", "rate": 0.1}, {"use": "prune", "keep": 0.02}]
    fed = make_federation(clients=2, chain=dropping)
    wave, auditor = observe(fed, (0, 1)), Auditor(FederationSource(fed))
    found = {}
    for defense in ("known", "unknown"):
        table = {"use": "inverting_gradients", "iterations": 80, "defense": defense, "labels": "given"}
        done = auditor.audit(PlannedAttack.from_table(table, "here"), wave)
        found[defense] = torch.tensor([row.value for a in done for row in a.rows if row.metric == "psnr"])
    gain = found["known"] - found["unknown"]
    assert gain.min() > 0 and gain.mean() > 2, found
