"""Freezing, and the other free knobs of a scenario: what they do to the update that leaves a client."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedgauge.client.federation import Federation
from fedgauge.client.models.vision import detached_params
from fedgauge.client.update import Update
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
    ("layers", "zeros"),
    [
        (["0"], {"0.weight", "0.bias"}),
        (["1"], {"1.0.weight", "1.0.bias"}),
        (["2.bias"], {"2.bias"}),
        (["0.weight", "1.0"], {"0.weight", "1.0.weight", "1.0.bias"}),
    ],
)
def test_named_layers_are_zero_and_the_others_unchanged(layers: list[str], zeros: set[str]) -> None:
    update = {k: torch.rand(p.shape) + 1 for k, p in detached_params(MODEL).items()}
    found = freeze(MODEL, layers).apply(update, None)
    for name, t in found.items():
        assert torch.equal(t, torch.zeros_like(t) if name in zeros else update[name])


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
