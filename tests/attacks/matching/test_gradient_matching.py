"""Gradient matching: the published loop from start to end, and what the engine promises."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Stream, Wave
from fedgauge.attacks.engine.gradient_distances import Distance, cosine, squared
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.recipes import CUTS, dlg, idlg, inverting_gradients, surrogate
from fedgauge.attacks.matching.search import AdamSearch, LBFGSSearch
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.update import Batch, Params, Update, UpdateFn
from tests.attacks.matching.tiny_problems import CLASSES, MEAN, SHAPE, STD, plain_objective, scene, streams


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
        ("dlg", GradientMatching(Objective(squared(), labels="optimised"), AdamSearch(cuts=CUTS, box=False)), 0.0),
        ("idlg", GradientMatching(Objective(squared()), AdamSearch(cuts=CUTS, box=False)), 0.0),
    ],
    ids=["inverting_gradients", "dlg by Adam", "idlg by Adam"],
)
@pytest.mark.usefixtures("double")
def test_matching_is_the_published_loop_from_start_to_end(recipe: str, attack: GradientMatching, tv: float) -> None:
    wave, known, batches = scene(labels=recipe != "dlg")
    (found,) = attack.reconstruct(wave, known, Budget(64), streams(0))
    x, y, objective = plain_attack(wave, known, recipe, 64, streams(0)[0], batches[0].y, tv)
    assert found.x is not None and found.y is not None
    assert float((found.x - x).abs().max()) < 1e-9
    assert torch.equal(found.y, y)
    assert found.objective == pytest.approx(objective, rel=1e-9)
    assert (found.status, found.reason, found.iterations) == ("converged", "", 64)


@pytest.mark.parametrize(
    ("attack", "local", "iterations", "gain"),
    [
        pytest.param(inverting_gradients(), local_sgd(0.1), 150, 3, marks=pytest.mark.full),
        (dlg(), local_sgd(0.1), 300, 1),
        pytest.param(idlg(), local_sgd(0.1), 150, 3, marks=pytest.mark.full),
        (surrogate(tv=0.001), local_sgd(0.05, 4), 100, 3),
    ],
    ids=["inverting_gradients", "dlg", "idlg", "surrogate"],
)
def test_the_objective_falls_and_the_image_comes_nearer(
    attack: GradientMatching, local: local_sgd, iterations: int, gain: float
) -> None:
    wave, known, batches = scene(clients=2, n=1, links=chain(local), labels=False)
    few, many = (attack.reconstruct(wave, known, Budget(n), streams(0, 1)) for n in (1, iterations))
    for batch, early, late in zip(batches, few, many, strict=True):
        assert late.objective < 0.2 * early.objective
        assert early.x is not None and late.x is not None
        assert float(psnr(batch.x, late.x)) > float(psnr(batch.x, early.x)) + gain


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


def test_the_time_limit_ends_an_attack_with_a_result() -> None:
    wave, known, _ = scene(clients=2)
    found = inverting_gradients().reconstruct(wave, known, Budget(10**9, seconds=0.2), streams(0, 1))
    for result in found:
        assert result.status == "out_of_budget"
        assert result.iterations < 10**9
        assert f"{result.iterations} of 1000000000 " in result.reason and "0.2 s" in result.reason
        assert result.x is not None
        assert torch.isfinite(result.x).all()


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

    found = GradientMatching(Objective(broken())).reconstruct(wave, known, Budget(3, restarts=2), streams(0, 1))
    assert [result.status for result in found] == ["diverged"] * 2
    results_in_the_box(found)


def test_dropout_in_train_mode_is_not_applicable() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, CLASSES))
    wave, known, _ = scene(model=model.eval())
    assert inverting_gradients().reconstruct(wave, known, Budget(1), streams(0))[0].status == "converged"
    model.train()
    (found,) = inverting_gradients().reconstruct(wave, known, Budget(1), streams(0))
    assert (found.status, found.x, found.y) == ("not_applicable", None, None)
    assert "'1' (Dropout)" in found.reason


@pytest.mark.parametrize("make", [dlg, inverting_gradients])
def test_labels_that_no_layer_restores_are_optimised(make: Callable[[], GradientMatching]) -> None:
    model = nn.Sequential(nn.Conv2d(1, CLASSES, 8), nn.Flatten())
    wave, known, _ = scene(model=model, labels=False)
    (found,) = make().reconstruct(wave, known, Budget(1), streams(0))
    assert found.status == "converged" and found.y is not None


@pytest.mark.parametrize("make", [dlg, idlg, inverting_gradients])
def test_given_labels_are_used_as_they_are(make: Callable[[], GradientMatching]) -> None:
    wave, known, batches = scene(clients=2)
    found = make().reconstruct(wave, known, Budget(2), streams(0, 1))
    for result, batch in zip(found, batches, strict=True):
        assert result.y is not None
        assert torch.equal(result.y, batch.y)


@pytest.mark.usefixtures("double")
def test_restarts_try_the_assignments_of_labels_to_slices() -> None:
    links = chain(local_sgd(0.1, 2, batch_size=1))
    wave, known, batches = scene(clients=2, n=2, links=links, labels=False)
    assert len(set(batches[0].y.tolist())) == 2, "the scene's labels differ"
    found = idlg().reconstruct(wave, known, Budget(100, restarts=2), streams(0, 1))
    for batch, result in zip(batches, found, strict=True):
        assert result.y is not None
        assert sorted(result.y.tolist()) == sorted(batch.y.tolist())
    assert any(r.y is not None and r.y.tolist() == b.y.tolist() for r, b in zip(found, batches, strict=True))


def test_lbfgs_also_optimises_the_surrogates_point() -> None:
    wave, known, _ = scene(clients=2, n=1, links=chain(local_sgd(0.1, 3)))
    attack = replace(surrogate(), search=LBFGSSearch())
    few, many = (attack.reconstruct(wave, known, Budget(n), streams(0, 1)) for n in (1, 60))
    for early, late in zip(few, many, strict=True):
        assert late.status == "converged" and late.objective < 0.5 * early.objective
