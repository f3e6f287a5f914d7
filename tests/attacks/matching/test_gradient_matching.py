"""The matching engine, against the published loops as a user of torch would write them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Stream, Wave
from fedgauge.attacks.engine.distances import Distance, cosine, squared
from fedgauge.attacks.engine.optimizers import adam, lbfgs
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.image_metrics import psnr
from fedgauge.attacks.matching import problems
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.priors import total_variation
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.recipes import CUTS, bayes, dlg, idlg, inverting_gradients, surrogate
from fedgauge.attacks.matching.whole_batch import whole_batch_update
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.chain import Chain, chain
from fedgauge.client.federation import Federation
from fedgauge.client.models.vision import detached_params, lenet, mlp
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch, Params, Update, UpdateFn
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import laplace

SHAPE, CLASSES = (1, 8, 8), 4
MEAN, STD = (0.3,), (0.6,)


def normalise(x: Tensor) -> Tensor:
    return (x - MEAN[0]) / STD[0]


def network() -> nn.Module:
    torch.manual_seed(0)
    return lenet(SHAPE, CLASSES)


def truth(seed: int, n: int = 2) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(n, *SHAPE, generator=rng), torch.randint(CLASSES, (n,), generator=rng).sort().values)


def streams(*numbers: int) -> list[Stream]:
    return [partial(generator, "matching", n) for n in numbers]


def evaluate(attack: GradientMatching, z: Tensor, wave: Wave, known: Knowledge) -> tuple[Tensor, Tensor]:
    """The engine's gradients and objectives at images z (K, R, B, C, H, W)."""
    assert known.labels is not None
    labels = known.labels.repeat_interleave(z.shape[1], 0)
    posed = Problems(attack, wave, known, labels, z.shape[1], z.dtype)
    value, slopes = posed.value_and_slopes({"x": z.flatten(0, 1)}, torch.arange(posed.count))
    return slopes["x"].view_as(z), value.view(z.shape[:2])


def scene(
    clients: int = 1, n: int = 2, links: Chain | None = None, labels: bool = True, model: nn.Module | None = None
) -> tuple[Wave, Knowledge, list[Batch]]:
    """What a server sees of some clients with random images, and an attacker who knows all but the images."""
    model, links = model or network(), links or chain(local_sgd(0.1))
    params = detached_params(model)
    batches = [truth(seed, n) for seed in range(clients)]
    client = links(gradient(model, normalise=normalise))
    wave = Wave.stack([Observation(1, c, params, client(params, b, None)) for c, b in enumerate(batches)])
    known = Knowledge(
        model=model,
        chain=links,
        shape=SHAPE,
        classes=CLASSES,
        batch_size=n,
        mean=MEAN,
        std=STD,
        labels=torch.stack([b.y for b in batches]) if labels else None,
    )
    return wave, known, batches


# -------------------------------------------------------------------------------------------------- the plain loop

Parts = list[Tensor]


def plain_gradient(model: nn.Module, params: Parts, x: Tensor, y: Tensor) -> Parts:
    names = [name for name, _ in model.named_parameters()]
    loss = F.cross_entropy(functional_call(model, dict(zip(names, params, strict=True)), (x,)), y)
    return list(torch.autograd.grad(loss, params, create_graph=True))


def plain_step(model: nn.Module, params: Parts, x: Tensor, y: Tensor, clipped: bool) -> Parts:
    """One local step's gradient, each example's clipped to norm 1 or not."""
    if not clipped:
        return plain_gradient(model, params, x, y)
    total = [torch.zeros_like(p) for p in params]
    for i in range(len(x)):
        g = plain_gradient(model, params, x[i : i + 1], y[i : i + 1])
        size = torch.cat([t.flatten() for t in g]).norm()
        total = [t + u * torch.clamp(1.0 / size, max=1.0) for t, u in zip(total, g, strict=True)]
    return [t / len(x) for t in total]


def plain_update(model: nn.Module, start: Params, z: Tensor, y: Tensor, steps: int, clipped: bool) -> Parts:
    params = [p.clone().requires_grad_() for p in start.values()]
    first = params
    for _ in range(steps):
        g = plain_step(model, params, z, y, clipped)
        params = [p - 0.1 * t for p, t in zip(params, g, strict=True)]
    return [p - q for p, q in zip(params, first, strict=True)]


def plain_objective(
    model: nn.Module, start: Params, seen: Update, z: Tensor, y: Tensor, distance: str, tv: float, **client: Any
) -> Tensor:
    expected = torch.cat([t.flatten() for t in plain_update(model, start, z, y, **client)])
    target = torch.cat([seen[k].flatten() for k in start])
    if distance == "cosine":
        value = 1 - F.cosine_similarity(expected, target, dim=0)
    else:
        value = (expected - target).square().sum() / target.square().sum()
    rough = (z[..., 1:] - z[..., :-1]).abs().mean() + (z[..., 1:, :] - z[..., :-1, :]).abs().mean()
    return value + tv * rough


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
        assert (whole_batch_update(links) is None) == plain["clipped"]
    attack = GradientMatching(DISTANCES[distance], (total_variation(0.05),))
    z = torch.randn(3, 2, 2, *SHAPE, generator=torch.Generator().manual_seed(5))  # (K, R, B, C, H, W)
    gradients, objectives = evaluate(attack, z, wave, known)
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
    assert (whole_batch_update(parts) is not None) == passes
    wave, known, _ = scene(clients=3, links=parts)
    attack = GradientMatching(cosine(), (total_variation(0.05),))
    z = torch.randn(3, 2, 2, *SHAPE, generator=torch.Generator().manual_seed(5))
    ours, values = evaluate(attack, z, wave, known)
    monkeypatch.setattr(problems, "whole_batch_update", lambda *_: None)
    theirs, expected = evaluate(attack, z, wave, known)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))


def test_in_float32_signed_adam_gets_the_same_signs() -> None:
    wave, known, batches = scene(clients=4, n=1)
    attack = inverting_gradients(tv=0.01)
    z = torch.randn(4, 4, 1, *SHAPE, generator=torch.Generator().manual_seed(5))
    found, _ = evaluate(attack, z, wave, known)
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


def plain_attack(
    wave: Wave, known: Knowledge, recipe: str, iterations: int, stream: Stream, y: Tensor, tv: float
) -> tuple[Tensor, Tensor, float]:
    """A whole published attack on the wave's first client, with torch's own optimiser and schedule."""
    model, seen = known.model, wave.alone(0)
    z = torch.randn(known.batch_size, *SHAPE, generator=stream("start", 0)).requires_grad_()
    soft = torch.randn(known.batch_size, CLASSES, generator=stream("labels", 0)).requires_grad_()
    leaves = [z, soft] if recipe == "dlg" else [z]
    optimizer = torch.optim.Adam(leaves, lr=0.1)
    cuts = [iterations * 3 // 8, iterations * 5 // 8, iterations * 7 // 8]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, cuts, gamma=0.1)
    distance = "cosine" if recipe == "inverting_gradients" else "squared"

    def objective() -> Tensor:
        target = soft.softmax(1) if recipe == "dlg" else y
        return plain_objective(model, wave.params, seen, z, target, distance, tv, steps=1, clipped=False)

    for _ in range(iterations):
        for leaf, g in zip(leaves, torch.autograd.grad(objective(), leaves), strict=True):
            leaf.grad = g.sign() if recipe == "inverting_gradients" else g
        optimizer.step()
        schedule.step()
        if recipe == "inverting_gradients":
            with torch.no_grad():
                z.clamp_((0 - MEAN[0]) / STD[0], (1 - MEAN[0]) / STD[0])
    pixels = (z.detach() * STD[0] + MEAN[0]).clamp(0, 1)
    return pixels, soft.detach().argmax(1) if recipe == "dlg" else y, objective().item()


@pytest.mark.parametrize(
    ("recipe", "attack", "tv"),
    [
        ("inverting_gradients", inverting_gradients(tv=0.02), 0.02),
        ("dlg", GradientMatching(squared(), (), adam(cuts=CUTS), box=False, labels="optimised"), 0.0),
        ("idlg", GradientMatching(squared(), (), adam(cuts=CUTS), box=False), 0.0),
    ],
    ids=["inverting_gradients", "dlg by Adam", "idlg by Adam"],
)
@pytest.mark.usefixtures("double")
def test_matching_is_the_published_loop_from_start_to_end(recipe: str, attack: GradientMatching, tv: float) -> None:
    wave, known, batches = scene(labels=recipe != "dlg")
    (found,) = attack.reconstruct(wave, known, Budget(64), streams(0))
    x, y, objective = plain_attack(wave, known, recipe, 64, streams(0)[0], batches[0].y, tv)
    assert found.x is not None
    assert found.y is not None
    assert float((found.x - x).abs().max()) < 1e-9
    assert torch.equal(found.y, y)
    assert found.objective == pytest.approx(objective, rel=1e-9)
    assert (found.status, found.reason, found.iterations) == ("converged", "", 64)


# ----------------------------------------------------------------------------------------------------- what it promises


@pytest.mark.parametrize("distance", [cosine(), squared()])
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.usefixtures("double")
def test_the_truth_is_a_stationary_point_at_distance_zero(distance: Distance, client: str) -> None:
    wave, known, batches = scene(links=CLIENTS[client][0])
    g, value = evaluate(GradientMatching(distance), normalise(batches[0].x)[None, None], wave, known)
    other, higher = evaluate(GradientMatching(distance), normalise(truth(9).x)[None, None], wave, known)
    assert abs(float(value)) < 1e-14
    assert float(higher) > 1e-3
    assert float(g.abs().max()) < 1e-10 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize(
    ("attack", "iterations", "gain"),
    [(inverting_gradients(), 150, 3), (dlg(), 300, 1), (idlg(), 150, 3)],
    ids=["inverting_gradients", "dlg", "idlg"],
)
def test_the_objective_falls_and_the_image_comes_nearer(attack: GradientMatching, iterations: int, gain: float) -> None:
    wave, known, batches = scene(clients=2, n=1, labels=False)
    few, many = (attack.reconstruct(wave, known, Budget(n), streams(0, 1)) for n in (1, iterations))
    for batch, early, late in zip(batches, few, many, strict=True):
        assert late.objective < 0.2 * early.objective
        assert early.x is not None
        assert late.x is not None
        assert float(psnr(batch.x, late.x)) > float(psnr(batch.x, early.x)) + gain


@pytest.mark.usefixtures("double")
def test_permuted_problems_give_permuted_results() -> None:
    wave, known, batches = scene(clients=4)
    order = [2, 0, 3, 1]
    assert known.labels is not None
    shuffled = Wave(1, tuple(order), wave.params, {k: t[order] for k, t in wave.update.items()})
    moved = replace(known, labels=known.labels[order])
    plain = inverting_gradients().reconstruct(wave, known, Budget(30), streams(0, 1, 2, 3))
    found = inverting_gradients().reconstruct(shuffled, moved, Budget(30), streams(*order))
    for place, k in enumerate(order):
        torch.testing.assert_close(found[place].x, plain[k].x, rtol=0, atol=1e-9)
        assert found[place].y is not None
        assert torch.equal(found[place].y, batches[k].y)


def test_packing_changes_no_start() -> None:
    wave, known, _ = scene(clients=4, labels=False)
    nothing = Budget(iterations=50, restarts=2, seconds=1e-9)  # out of time before the first step: the start itself
    packed = inverting_gradients().reconstruct(wave, known, nothing, streams(0, 1, 2, 3))
    for k in range(4):
        alone = Wave(1, (k,), wave.params, {n: t[k : k + 1] for n, t in wave.update.items()})
        (one,) = inverting_gradients().reconstruct(alone, known, nothing, streams(k))
        assert one.x is not None
        assert packed[k].x is not None
        assert torch.equal(one.x, packed[k].x)


def test_packing_changes_scores_by_rounding_alone() -> None:
    wave, known, batches = scene(clients=4, n=1, labels=False)
    packed = inverting_gradients().reconstruct(wave, known, Budget(40), streams(0, 1, 2, 3))
    for k, batch in enumerate(batches):
        alone = Wave(1, (k,), wave.params, {n: t[k : k + 1] for n, t in wave.update.items()})
        (one,) = inverting_gradients().reconstruct(alone, known, Budget(40), streams(k))
        assert one.x is not None
        assert packed[k].x is not None
        assert float(psnr(batch.x, one.x)) == pytest.approx(float(psnr(batch.x, packed[k].x)), abs=0.1)


def test_equal_streams_give_equal_bits() -> None:
    wave, known, _ = scene(clients=2)
    runs = [inverting_gradients().reconstruct(wave, known, Budget(20, restarts=2), streams(3, 4)) for _ in range(2)]
    for first, again in zip(*runs, strict=True):
        assert first.x is not None
        assert again.x is not None
        assert torch.equal(first.x, again.x)
        assert first.objective == again.objective


@pytest.mark.usefixtures("double")
def test_the_restart_with_the_lowest_objective_is_kept() -> None:
    wave, known, _ = scene(clients=2)
    attack, restarts = inverting_gradients(), 4

    def only(stream: Stream, restart: int) -> Stream:
        return lambda purpose, _: stream(purpose, restart)

    both = attack.reconstruct(wave, known, Budget(15, restarts), streams(0, 1))
    single = [attack.reconstruct(wave, known, Budget(15), [only(s, r) for s in streams(0, 1)]) for r in range(restarts)]
    for k, found in enumerate(both):
        each = [results[k] for results in single]
        best = min(each, key=lambda result: result.objective)
        assert len({round(result.objective, 9) for result in each}) == restarts, "the restarts differ"
        assert found.objective == pytest.approx(best.objective, abs=1e-12)
        torch.testing.assert_close(found.x, best.x, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("restarts", "measured"), [(2, 0), (3, 1)])
@pytest.mark.parametrize("iterations", [1, 7])
def test_the_budget_counts_gradient_evaluations(iterations: int, restarts: int, measured: int) -> None:
    wave, known, _ = scene()
    calls: list[int] = []

    def counting(compute: UpdateFn) -> UpdateFn:
        def counted(params: Params, batch: Batch, rng: Any) -> Update:
            calls.append(1)
            return compute(params, batch, rng)

        return counted

    watched = replace(known, chain=chain(local_sgd(0.1), counting))
    (found,) = inverting_gradients().reconstruct(wave, watched, Budget(iterations, restarts), streams(0))
    assert found.iterations == iterations
    assert len(calls) == iterations + 1 + measured, "for the objective at the end, and for the memory that many need"


def test_time_ends_an_attack_with_what_it_has() -> None:
    wave, known, _ = scene(clients=2)
    found = inverting_gradients().reconstruct(wave, known, Budget(10**9, seconds=0.2), streams(0, 1))
    for result in found:
        assert result.status == "out_of_budget"
        assert 0 < result.iterations < 10**9
        assert result.reason == f"{result.iterations} of 1000000000 iterations in 0.2 s"
        assert result.x is not None
        assert torch.isfinite(result.x).all()


@pytest.mark.parametrize("arguments", [{"iterations": 0}, {"restarts": 0}, {"seconds": 0.0}, {"seconds": float("nan")}])
def test_a_budget_of_nothing_is_refused(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name} must be "):
        Budget(**arguments)


@pytest.mark.parametrize("arguments", [{"tv": -0.1}, {"tv": float("nan")}, {"rate": 0.0}, {"rate": -1.0}])
def test_hyperparameters_without_sense_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=" must "):
        inverting_gradients(**arguments)


def results_in_the_box(results: list[Reconstruction]) -> None:
    for result in results:
        assert result.x is not None
        assert torch.isfinite(result.x).all()
        assert 0 <= float(result.x.min()) <= float(result.x.max()) <= 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_objective_that_is_not_finite_is_reported_as_diverged(value: float) -> None:
    wave, known, _ = scene(clients=2)

    class broken(Distance):
        def __call__(self, seen: Update, expected: Update) -> Tensor:
            return cosine()(seen, expected) + value

    found = GradientMatching(broken()).reconstruct(wave, known, Budget(3, restarts=2), streams(0, 1))
    assert [result.status for result in found] == ["diverged"] * 2
    results_in_the_box(found)


def test_one_problem_that_diverges_leaves_the_others_alone() -> None:
    wave, known, _ = scene(clients=2)
    poisoned = Wave(1, (0, 1), wave.params, {k: t.clone() for k, t in wave.update.items()})
    poisoned.update["conv1.weight"][0, 0] = float("nan")
    clean = inverting_gradients().reconstruct(wave, known, Budget(20), streams(0, 1))
    found = inverting_gradients().reconstruct(poisoned, known, Budget(20), streams(0, 1))
    assert [result.status for result in found] == ["diverged", "converged"]
    results_in_the_box(found)
    torch.testing.assert_close(found[1].x, clean[1].x, rtol=0, atol=1e-3)


class WithDropout(nn.Module):
    """A classifier that drops out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.body, self.forget, self.head = nn.Flatten(), layer, nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forget(self.body(x)))


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.1)])
def test_dropout_in_train_mode_is_not_applicable(layer: nn.Module) -> None:
    torch.manual_seed(0)
    model = WithDropout(layer)
    wave, known, _ = scene(model=model.eval())
    assert inverting_gradients().reconstruct(wave, known, Budget(1), streams(0))[0].status == "converged"
    model.train()
    (found,) = inverting_gradients().reconstruct(wave, known, Budget(1), streams(0))
    assert (found.status, found.x, found.y) == ("not_applicable", None, None)
    assert found.reason.startswith("layer 'forget' is dropout in train mode")
    layer.p = 0.0
    assert inverting_gradients().reconstruct(wave, known, Budget(1), streams(0))[0].status == "converged"


def test_labels_that_cannot_be_restored_are_not_applicable() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, CLASSES, 8), nn.Flatten())
    wave, known, _ = scene(model=model, labels=False)
    (found,) = inverting_gradients().reconstruct(wave, known, Budget(1), streams(0))
    assert (found.status, found.reason) == (
        "not_applicable",
        "the model has no fully connected layer, which label restoration reads",
    )
    assert dlg().reconstruct(wave, known, Budget(1), streams(0))[0].status == "converged", "DLG finds labels itself"


@pytest.mark.parametrize("make", [dlg, idlg, inverting_gradients])
def test_given_labels_are_used_as_they_are(make: Callable[[], GradientMatching]) -> None:
    wave, known, batches = scene(clients=2)
    found = make().reconstruct(wave, known, Budget(2), streams(0, 1))
    for result, batch in zip(found, batches, strict=True):
        assert result.y is not None
        assert torch.equal(result.y, batch.y)


# ------------------------------------------------------------------------------------------------- what recipes add


def test_one_gradient_between_the_ends_stands_for_several_local_steps() -> None:
    wave, known, batches = scene(clients=2, n=1, links=chain(local_sgd(0.05, 4)))
    few, many = (surrogate(tv=0.001).reconstruct(wave, known, Budget(n), streams(0, 1)) for n in (1, 200))
    for batch, early, late in zip(batches, few, many, strict=True):
        assert late.objective < 0.2 * early.objective
        assert early.x is not None
        assert late.x is not None
        assert float(psnr(batch.x, late.x)) > float(psnr(batch.x, early.x)) + 3


@pytest.mark.usefixtures("double")
def test_where_slices_hold_which_label_is_not_known_restarts_try_it() -> None:
    links = chain(local_sgd(0.1, 2, batch_size=1))
    wave, known, batches = scene(clients=2, n=2, links=links, labels=False)
    assert len(set(batches[0].y.tolist())) == 2, "the scene's labels differ"
    found = idlg().reconstruct(wave, known, Budget(400, restarts=2), streams(0, 1))
    for batch, result in zip(batches, found, strict=True):
        assert result.y is not None
        assert sorted(result.y.tolist()) == sorted(batch.y.tolist())
    assert any(r.y is not None and r.y.tolist() == b.y.tolist() for r, b in zip(found, batches, strict=True))


@pytest.mark.usefixtures("double")
def test_restarts_of_a_group_are_held_together() -> None:
    wave, known, _ = scene(clients=1)
    z = torch.randn(1, 3, 2, *SHAPE, generator=torch.Generator().manual_seed(5))
    free, _ = evaluate(GradientMatching(cosine()), z, wave, known)
    held, higher = evaluate(GradientMatching(cosine(), group=0.7), z, wave, known)
    apart = z - z.mean(1, keepdim=True)
    size = 2 * SHAPE[1] * SHAPE[2] * SHAPE[0]
    torch.testing.assert_close(held - free, 0.7 * 2 * apart / size, rtol=0, atol=1e-9)
    _, plain = evaluate(GradientMatching(cosine()), z, wave, known)
    torch.testing.assert_close(higher - plain, 0.7 * apart.square().flatten(2).mean(2), rtol=0, atol=1e-9)


@pytest.mark.usefixtures("double")
def test_samples_in_a_box_average_the_objective() -> None:
    wave, known, _ = scene(clients=2)
    attack = GradientMatching(cosine(), samples=3, radius=0.2)
    assert known.labels is not None
    posed = Problems(attack, wave, known, known.labels, 1, torch.float64)
    rows = torch.arange(2)
    z = torch.randn(2, 2, *SHAPE, generator=torch.Generator().manual_seed(5))
    nearby = attack._nearby(z, [7, 7])
    assert nearby is not None
    assert nearby.shape == (3, 1, 2, *SHAPE)
    assert 0.15 < float(nearby.abs().max()) <= 0.2
    value, slopes = posed.value_and_slopes({"x": z}, rows, 1.0, nearby)
    each = [posed.value_and_slopes({"x": z + step}, rows) for step in nearby]
    torch.testing.assert_close(value, torch.stack([v for v, _ in each]).mean(0))
    torch.testing.assert_close(slopes["x"], torch.stack([s["x"] for _, s in each]).mean(0))


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("disturbed", [False, True], ids=["factored", "disturbed"])
@pytest.mark.usefixtures("double")
def test_updates_of_large_layers_are_compared_by_their_factors_to_the_same_end(
    disturbed: bool, distance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fedgauge.attacks.engine.gradients.factored.FORM_BELOW", 300
    )  # 1.weight and 3.weight, not 5.weight
    torch.manual_seed(0)
    wave, known, batches = scene(clients=3, model=mlp(SHAPE, CLASSES, (24, 20), "tanh"))
    if disturbed:
        wave.update["1.weight"][1] += 1e-9 * torch.randn(24, 64, generator=torch.Generator().manual_seed(2))
    z = torch.randn(3, 2, 2, *SHAPE, generator=torch.Generator().manual_seed(5))
    assert known.labels is not None
    posed = Problems(
        GradientMatching(DISTANCES[distance]), wave, known, known.labels.repeat_interleave(2, 0), 2, z.dtype
    )
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


class Normalised(nn.Module):
    """A layer that one pass does not know: the engine takes the general way."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.usefixtures("double")
def test_a_layer_that_one_pass_does_not_know_goes_the_general_way_to_the_same_end() -> None:
    torch.manual_seed(0)
    wave, known, batches = scene(clients=3, model=Normalised())
    z = torch.randn(3, 1, 2, *SHAPE, generator=torch.Generator().manual_seed(5))
    found, values = evaluate(GradientMatching(squared()), z, wave, known)
    for k in range(3):
        leaf = z[k, 0].clone().requires_grad_()
        value = plain_objective(
            known.model, wave.params, wave.alone(k), leaf, batches[k].y, "squared", 0.0, steps=1, clipped=False
        )
        assert float(values[k, 0]) == pytest.approx(value.item(), abs=1e-12)
        torch.testing.assert_close(found[k, 0], torch.autograd.grad(value, leaf)[0], rtol=1e-9, atol=1e-12)


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
        found = attack.reconstruct(Wave.stack(seen), known, Budget(400), streams(*range(24)))
        errors[name] = sum(
            float((f.x - b.x).square().mean()) for f, b in zip(found, batches, strict=True) if f.x is not None
        )
    assert errors["known"] < errors["cosine"]


@pytest.mark.parametrize(
    "arguments", [{"group": 0.1}, {"anneal": 0.5}, {"radius": 0.1}, {"surrogate": True}], ids=lambda a: next(iter(a))
)
def test_lbfgs_refuses_what_has_no_line_search(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lbfgs needs one smooth objective"):
        GradientMatching(cosine(), optimizer=lbfgs(), **arguments)


@pytest.mark.parametrize("arguments", [{"anneal": 0.0}, {"samples": 0}, {"group": -1.0}, {"radius": float("nan")}])
def test_engine_settings_without_sense_are_refused(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name} must "):
        GradientMatching(cosine(), **arguments)


def test_lbfgs_starts_again_where_it_ends_without_a_fit() -> None:
    wave, known, _ = scene(clients=2, n=1)
    ends = GradientMatching(squared(), (), lbfgs(plateau=0.9999), box=False)
    again = GradientMatching(squared(), (), lbfgs(plateau=0.9999, restart_above=1e-12), box=False)
    first, more = (a.reconstruct(wave, known, Budget(300), streams(0, 1)) for a in (ends, again))
    for one, two in zip(first, more, strict=True):
        assert one.iterations < 40, "ten steps, and no more"
        assert two.iterations > one.iterations, "then from a new draw, while the budget lasts"
        assert two.iterations <= 300
        assert two.objective <= one.objective


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("distance", [cosine(), squared()])
def test_the_order_of_an_updates_names_means_nothing(distance: Distance) -> None:
    wave, known, batches = scene(clients=2)
    backwards = replace(wave, update=dict(reversed(wave.update.items())))
    z = torch.stack([normalise(b.x) for b in batches])[:, None]
    attack = GradientMatching(distance)
    for seen in (wave, backwards):
        slopes, objectives = evaluate(attack, z, seen, known)
        assert float(objectives.abs().max()) < 1e-9, "the truth explains what was seen"
    elsewhere = z + 0.1
    ours, theirs = (evaluate(attack, elsewhere, seen, known) for seen in (wave, backwards))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_what_pruning_dropped_is_not_compared(
    make_federation: Callable[..., Federation], observe: Callable[..., Wave]
) -> None:
    """A guess is not held against entries that were dropped: who knows of the pruning comes nearer, on every client."""
    dropping = [{"use": "local_sgd", "rate": 0.1}, {"use": "prune", "keep": 0.02}]
    fed = make_federation(clients=4, chain=dropping)
    wave, auditor = observe(fed, (0, 1, 2, 3)), Auditor(fed)
    found = {}
    for defense in ("known", "unknown"):
        table = {"use": "inverting_gradients", "iterations": 80, "defense": defense, "labels": "given"}
        done = auditor.audit(PlannedAttack.from_table(table, "here"), wave)
        found[defense] = torch.tensor([row.value for a in done for row in a.rows if row.metric == "psnr"])
    gain = found["known"] - found["unknown"]
    assert gain.min() > 0 and gain.mean() > 2, found
