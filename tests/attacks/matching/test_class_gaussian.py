"""The mean of several searches under the classes' Gaussian: in one order, within the budget, nearer than one of them."""

from typing import Any

import pytest
import torch

from fedgauge.attacks.base import Reconstruction
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.matching.class_gaussian import _mean, class_gaussian
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import PublicSource
from fedgauge.client.psnr import match
from fedgauge.server.store.scenario import Scenario


def test_searches_are_brought_into_one_order() -> None:
    x = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    results = [Reconstruction(own, None, o, 5, 0.5, "converged") for own, o in ((x, 0.1), (x[[2, 0, 1]], 0.2))]
    mean = _mean(results)
    assert mean.x is not None and torch.allclose(mean.x, x)
    assert (mean.iterations, mean.seconds, mean.objective) == (10, 1.0, 0.1)
    lost = Reconstruction(None, None, 1.0, 1, 0.0, "diverged", "lost")
    assert _mean([results[0], lost]) is lost


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

    assert reached(second_order=True, searches=1, share=1e-3) > reached() + 3
