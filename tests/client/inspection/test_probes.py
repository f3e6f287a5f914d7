"""Detectors that try weights on examples: single examples that own a gradient, dead layers, the loss."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.client.inspection.policy import inspect
from fedgauge.client.inspection.probes import PROBE, probe_examples
from fedgauge.client.inspection.results import LARGEST, THRESHOLDS
from fedgauge.client.inspection.weights import FEWEST
from fedgauge.client.models.vision import detached_params
from fedgauge.client.training import gradient
from fedgauge.client.update import Batch, Params
from tests.client.inspection.probing import CLASSES, alarmed, examples, network, probes, score, with_
from tests.conftest import MakeFederation


def test_a_bias_is_held_against_what_the_layer_is_fed() -> None:
    """Inputs of root mean square 2 and a row of norm 3 make about 6: a bias of 600 is a hundred times that."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 9))
    params = {"1.weight": torch.full((9, 16), 0.75), "1.bias": torch.zeros(9)}
    params["1.bias"][4] = -600.0
    probe = Batch(torch.full((1, 1, 4, 4), 2.0), torch.zeros(1, dtype=torch.int64))
    found = inspect(probes(model, probe), params, None)
    assert score(found, "extreme biases") == pytest.approx(100)
    assert "its bias 4 is 100 times" in found.reasons


def test_a_dead_layer_is_found_by_any_client() -> None:
    params = detached_params(network(hidden=(40, 30)))
    model = network(hidden=(40, 30))
    altered = with_(params, p3_bias=torch.full((30,), -100.0))
    found = alarmed(inspect(probes(model), altered, None))
    assert {"dead layer", "extreme biases"} <= found.keys()
    assert found["dead layer"].score == pytest.approx(math.log10(LARGEST))


def test_dead_units_are_counted() -> None:
    params = detached_params(network())
    bias = params["1.bias"].clone()
    bias[:38] = -30.0
    found = inspect(probes(), with_(params, p1_bias=bias), None)
    assert score(found, "dead units") == pytest.approx(38 / 40)


def per_example_norms(model: nn.Module, params: Params, batch: Batch, name: str) -> Tensor:
    compute = gradient(model)
    each = [compute(params, Batch(x[None], y[None]), None)[name].norm() for x, y in zip(*batch, strict=True)]
    return torch.stack(each).double()


def test_domination_is_the_published_ratio() -> None:
    """D-SNR of a layer: the largest example's gradient norm over the root of the others' squares, one by one in a loop."""
    model, probe = network(), examples(9)
    params = detached_params(model)
    loud = Batch(probe.x.clone(), probe.y)
    loud.x[3] *= 1e4
    norms = per_example_norms(model, params, loud, "1.weight").square()
    expected = math.sqrt(float(norms.max() / (norms.sum() - norms.max())))
    found = alarmed(inspect(probes(model, loud), params, None))["dominated"]
    assert expected > THRESHOLDS["dominated"]
    assert found.score >= expected * (1 - 1e-5), "it is the worst layer's"
    assert "one example's gradient is" in found.description


@pytest.mark.parametrize("size", [1e15, 1e22, 1e30])
def test_domination_is_seen_however_large_the_gradient(size: float) -> None:
    """Squares of 1e22 are no single-precision numbers; a gradient that is none is worse than any."""
    model, probe = network(), examples(9)
    probe.x[3] *= size
    found = alarmed(inspect(probes(model, probe), detached_params(model), None))["dominated"]
    assert found.score == LARGEST


@pytest.mark.parametrize("n", [1, FEWEST - 1])
def test_of_few_examples_it_is_not_said_who_dominates(n: int) -> None:
    found = inspect(probes(probe=examples(n)), detached_params(network()), None)
    silent = {"dominated", "vanished", "isolated units"}
    assert silent.isdisjoint(f.detector for f in found.results)
    assert found.suspicion < 1


def test_one_class_fished_out_leaves_the_others_without_a_gradient() -> None:
    """The classifier's other rows are zero and its logit far below: whoever is not of class 2 has no gradient in front of it."""
    params = detached_params(network())
    keep = torch.arange(CLASSES) == 2
    altered = with_(
        params,
        p3_weight=torch.where(keep[:, None], params["3.weight"], 0.0),
        p3_bias=torch.where(keep, -40.0, 0.0),
    )
    found = alarmed(inspect(probes(), altered, params))
    assert found["vanished"].score == pytest.approx(26 / 32), "6 of 32 examples are of class 2"
    assert {"dependent rows", "vanished", "jump"} <= found.keys()


def test_units_that_learn_from_one_example_each_are_isolated() -> None:
    """A layer with one row for each example, on for it alone."""
    probe = Batch(torch.eye(16).reshape(16, 1, 4, 4), torch.arange(16) % CLASSES)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    torch.manual_seed(0)
    params = {**detached_params(model), "1.weight": torch.eye(16), "1.bias": torch.full((16,), -0.5)}
    found = alarmed(inspect(probes(model, probe), params, None))["isolated units"]
    assert found.score == 1


def test_a_loss_that_leaps_is_reported_in_numbers() -> None:
    params = detached_params(network())
    altered = with_(params, p3_weight=1e3 * params["3.weight"])
    model = network()
    here, then = (
        F.cross_entropy(torch.func.functional_call(model, p, (examples().x,)), examples().y) for p in (altered, params)
    )
    found = alarmed(inspect(probes(), altered, params))["loss"]
    assert found.score == pytest.approx(math.log(here / then), rel=1e-4)


def test_memory_is_bounded_by_chunks_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    params = detached_params(network())
    whole = inspect(probes(), params, params)
    monkeypatch.setattr("fedgauge.client.inspection.probes.MOST_FLOATS", 3 * sum(t.numel() for t in params.values()))
    for a, b in zip(whole.results, inspect(probes(), params, params).results, strict=True):
        assert (a.detector, a.layer) == (b.detector, b.layer)
        assert a.score == pytest.approx(b.score, rel=1e-4, abs=1e-7)


def test_a_probe_is_the_rounds_batch_and_more_of_the_clients_own(make_federation: MakeFederation) -> None:
    shards = make_federation(data={"use": "mnist5k", "batch_size": 1}).shards
    rows = shards.rows_at(1, 3)
    probe = probe_examples(shards, 1, rows)
    assert probe.x.shape == (PROBE, 1, 28, 28)
    assert torch.equal(probe.x[:1], shards.batch_at(1, 3).x)
    mine = {bytes(x.numpy().tobytes()) for x in shards.dataset.x[shards.indices[1]].float().div(255)}
    assert len({bytes(x.numpy().tobytes()) for x in probe.x} & mine) == PROBE
    few = replace(shards, indices=(shards.indices[0], shards.indices[1][:5]))
    assert len(probe_examples(few, 1, few.indices[1][:1]).y) == 5
    assert len(probe_examples(shards, 1, shards.indices[1][:50]).y) == PROBE
