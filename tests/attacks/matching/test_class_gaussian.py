"""Search under the classes' normal distributions: their covariance on paper, and what it gains."""

from typing import Any

import pytest
import torch

from fedgauge.attacks.engine.gradient_distances import Distance, kept_by_size, squared, visible
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.matching.class_gaussian import class_gaussian
from fedgauge.attacks.matching.class_normals import ClassNormals
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import PublicSource
from fedgauge.client.chain import chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.psnr import match
from fedgauge.client.update import Batch
from fedgauge.defenses.prune import prune
from fedgauge.server.store.scenario import Scenario
from tests.attacks.matching.tiny_problems import normalise, scene
from tests.attacks.refusals import check_named


@pytest.mark.parametrize("noise", [(), ({"use": "gaussian", "sigma": 0.05},)], ids=["pruned", "noisy"])
def test_it_beats_the_mean_of_the_class(noise: tuple[Any, ...]) -> None:
    local = {"use": "local_sgd", "rate": 0.1}
    chain = [*noise, local] if noise else [local, {"use": "prune", "keep": 0.05}]
    tables = {
        "rounds": 1,
        "clients": 2,
        "data": {"use": "mnist5k", "auxiliary": 200, "batch_size": 1},
        "model": {"use": "mlp", "hidden": [16]},
        "chain": chain,
    }
    source = PublicSource(Scenario.from_tables(tables).federation, count=2)

    def reached(**table: Any) -> float:
        planned = PlannedAttack.from_table({"labels": "given", **table}, "here")
        results = [r for r, _ in Auditor(source, 0).attack(planned, source.all, source.members)]
        assert all(r.status == "converged" and r.x is not None for r in results)
        pairs = zip(results, source.batches, strict=True)
        return sum(float(psnr(b.x, r.x[match(b.x, r.x)]).mean()) for r, b in pairs if r.x is not None) / 2

    found = reached(use=class_gaussian.__name__, iterations=80)
    assert found > reached(use="class_mean_image") + 1


@pytest.mark.full
def test_on_a_smooth_network_the_second_order_is_ahead() -> None:
    """A batch of four digits behind a LeNet, as in the challenge."""
    tables = {
        "rounds": 1,
        "clients": 2,
        "data": {"use": "mnist5k", "auxiliary": 500, "batch_size": 4},
        "model": {"use": "lenet"},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
    }
    source = PublicSource(Scenario.from_tables(tables).federation, count=1)

    def reached(**table: Any) -> float:
        planned = PlannedAttack.from_table({"use": "class_gaussian", "labels": "given", "iterations": 100, **table}, "")
        ((result, _),) = Auditor(source, 0).attack(planned, source.all, source.members)
        assert result.x is not None
        x = source.batches[0].x
        return float(psnr(x, result.x[match(x, result.x)]).mean())

    assert reached(second_order=True) > reached() + 3


def test_the_map_has_the_covariance_of_its_docstring() -> None:
    """On images of 3 x 4 pixels and two colours, class by class, against the sum of three matrices on paper."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, 2, 3, 4, generator=rng), torch.tensor([0] * 25 + [1] * 14 + [2])
    fitted, rows = ClassNormals(Batch(x, y), 4), x.double().flatten(1)
    means = torch.stack([rows[y == c].mean(0) if c < 3 else rows.mean(0) for c in range(4)])
    spread = rows - means[y]
    own = [spread[y == c].T @ spread[y == c] / (n - 1) for c, n in ((0, 25), (1, 14))]
    within = (25 * own[0] + 14 * own[1]) / 39  # the single example of the third class says nothing
    least = 0.01 * within.diagonal().mean()
    alike = (within / (within.diagonal() + least).sqrt() / (within.diagonal() + least).sqrt()[:, None]).view(
        2, 3, 4, 2, 3, 4
    )
    separable = torch.ones(1, 1, dtype=torch.float64)
    for letters in ("aijbij->ab", "iajibj->ab", "ijaijb->ab"):
        squares = torch.einsum(letters, alike)
        squares += 1e-3 * squares.diagonal().mean() * torch.eye(len(squares))
        separable = torch.kron(separable, squares / squares.diagonal().sqrt() / squares.diagonal().sqrt()[:, None])
    separable = 0.9 * separable + 0.1 * torch.eye(24)
    for c, n in enumerate((25, 14, 0, 0)):
        blended = n / (n + 20) * own[c] + 20 / (n + 20) * within if n else within
        deviations = (blended.diagonal() + least).sqrt()
        covariance = 0.5 * blended + 0.5 * deviations[:, None] * separable * deviations
        label = torch.tensor([[c]])
        centre = fitted(torch.zeros(1, 1, 2, 3, 4, dtype=torch.float64), label).flatten()
        units = torch.eye(24, dtype=torch.float64).view(24, 1, 2, 3, 4)
        root = fitted(units, label.expand(24, 1)).flatten(1) - centre
        torch.testing.assert_close(centre, means[c])
        torch.testing.assert_close(root.T @ root, covariance)


def test_equal_examples_have_no_covariance() -> None:
    check_named("auxiliary", lambda: ClassNormals(Batch(torch.ones(4, 1, 2, 2), torch.tensor([0, 0, 1, 1])), 2))


def test_the_engine_leaves_dropped_entries_to_a_distance_that_reads_them() -> None:
    wave, known, batches = scene(links=chain(local_sgd(0.1), prune(0.1)))
    x = normalise(batches[0].x)[None]

    def objective(distance: Distance) -> float:
        problems = Problems(Objective(distance), wave, known, known.labels, 1, torch.float32)
        return float(problems.value_and_slopes({"x": x * 3}, torch.arange(1))[0])

    assert objective(kept_by_size()) > objective(visible(squared())) / (2 * 0.01**2) > 0
    assert objective(squared()) == objective(visible(squared()))
