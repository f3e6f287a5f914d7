"""Freezing, and the other free knobs of a scenario: what they do to the update that leaves a client."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedgauge.client.components import SpecError
from fedgauge.client.federation import Federation
from fedgauge.client.models.vision import detached_params
from fedgauge.client.transforms import UpdateDistribution
from fedgauge.client.update import Update, norm
from fedgauge.defenses.freeze import freeze

Make = Callable[..., Federation]
SGD = {"use": "local_sgd", "rate": 0.1}
MLP = {"use": "mlp", "hidden": [8, 6]}
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))


def frozen(*layers: str) -> dict[str, Any]:
    return {"use": "freeze", "layers": list(layers)}


def update_of(fed: Federation, round: int = 1) -> Update:
    params, buffers = fed.initial()
    return fed.client_update(params, buffers, 0, round)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["3"], r"the model has no layer '3' with parameters \(it has: 0, 1, 1.0, 2\)"),
        (["1.1"], "the model has no layer '1.1' with parameters"),
        (["0.weigh"], "the model has no layer '0.weigh'"),
        ([], "layers is empty"),
        (["0", "1", "2"], "layers names all of the model's parameters: nothing would be trained"),
    ],
)
def test_layers_without_sense_are_refused(layers: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        freeze(MODEL, layers)


def test_a_scenario_is_refused_with_its_table(make_federation: Make) -> None:
    with pytest.raises(SpecError, match=r"\[\[chain\]\] #1: the model has no layer 'fc9' with parameters \(it has: "):
        make_federation(chain=[frozen("fc9"), SGD]).check()


@pytest.mark.parametrize(
    ("layers", "zeros"),
    [
        (["0"], {"0.weight", "0.bias"}),
        (["1"], {"1.0.weight", "1.0.bias"}),
        (["2.bias"], {"2.bias"}),
        (["0.weight", "1.0"], {"0.weight", "1.0.weight", "1.0.bias"}),
    ],
)
def test_what_is_named_is_zero_and_the_rest_as_it_was(layers: list[str], zeros: set[str]) -> None:
    update = {k: torch.rand(p.shape) + 1 for k, p in detached_params(MODEL).items()}
    found = freeze(MODEL, layers).apply(update, None)
    for name, t in found.items():
        assert torch.equal(t, torch.zeros_like(t) if name in zeros else update[name])


def test_noise_over_zeros_and_zeros_over_noise_keep_their_distribution() -> None:
    link = freeze(MODEL, ["0"])
    for known in (
        UpdateDistribution(),
        UpdateDistribution(sigma=0.1),
        UpdateDistribution(scale=1.0, sparse=True),
        UpdateDistribution(signed=True),
    ):
        assert link.update_distribution(known) == known


def test_a_layer_frozen_before_training_stays_in_every_local_step(make_federation: Make) -> None:
    """Frozen before, its weights stand still while the others learn; frozen after, they move unseen, so the others differ."""
    steps = {**SGD, "steps": 3, "rate": 0.5}
    plain, before, after = (
        make_federation(model=MLP, chain=chain, data={"batch_size": 4})
        for chain in ([steps], [frozen("1"), steps], [steps, frozen("1")])
    )
    whole, still, unseen = update_of(plain), update_of(before), update_of(after)
    names = {name for name in whole if name.startswith("1.")}
    assert names
    for update in (still, unseen):
        assert all(update[name].count_nonzero() == 0 for name in names)
    others = whole.keys() - names
    assert all(torch.equal(unseen[name], whole[name]) for name in others)
    assert any(not torch.equal(still[name], whole[name]) for name in others)


def test_frozen_layers_do_not_move_in_a_federations_training(make_federation: Make) -> None:
    fed = make_federation(model=MLP, chain=[frozen("1"), SGD])
    params, buffers = fed.initial()
    moved = {k: p + fed.client_update(params, buffers, 0, 1)[k] for k, p in params.items()}
    assert {k for k in params if torch.equal(moved[k], params[k])} >= {"1.weight", "1.bias"}
    assert not torch.equal(moved["5.weight"], params["5.weight"])


# ---------------------------------------------------------------------------------------------- the other free knobs


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_batch_is_as_large_as_the_scenario_says_and_the_update_its_mean(size: int, make_federation: Make) -> None:
    fed = make_federation(model=MLP, data={"batch_size": size})
    params, _ = fed.initial()
    batch = fed.batch_at(0, 1)
    assert len(batch.x) == len(batch.y) == size
    one_by_one = [
        fed.chain(fed.gradient)(params, type(batch)(x[None], y[None]), None) for x, y in zip(*batch, strict=True)
    ]
    for name, t in update_of(fed).items():
        torch.testing.assert_close(t, torch.stack([u[name] for u in one_by_one]).mean(0), rtol=1e-4, atol=1e-7)


def test_local_steps_are_so_many_steps_of_gradient_descent(make_federation: Make) -> None:
    fed = make_federation(model=MLP, chain=[{**SGD, "steps": 4}], data={"batch_size": 4})
    params, _ = fed.initial()
    at = dict(params)
    for _ in range(4):
        g = fed.gradient(at, fed.batch_at(0, 1), None)
        at = {k: p - 0.1 * g[k] for k, p in at.items()}
    update = update_of(fed)
    difference = norm({k: update[k] - (at[k] - params[k]) for k in params})
    assert float(difference / norm(update)) < 1e-5
