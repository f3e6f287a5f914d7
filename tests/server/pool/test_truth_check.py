"""A truth is doubted where it cannot have given the update, and not where chance may have."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedgauge.attacks.base import Observation
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.server.pool.truth_check import doubt


@pytest.mark.parametrize(("p", "doubted"), [(0.0, True), (0.5, False)])
def test_a_dropout_that_drops_nothing_hides_no_wrong_truth(
    make_federation: Callable[..., Federation], p: float, doubted: bool
) -> None:
    fed = make_federation(model={"use": "mlp", "hidden": [8]}, clients=1)
    params, buffers = fed.initial()
    right = Batch(torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2]))
    seen = Observation(1, 0, params, fed.update_fn()(params, right, generator("client", 0)), buffers)
    fed.model.add_module("idle", nn.Dropout(p).train())
    wrong = Batch(torch.zeros_like(right.x), right.y)
    assert doubt(fed, seen, {(1, 0): right}, fits=True) == ""
    assert ("does not give its update" in doubt(fed, seen, {(1, 0): wrong}, fits=True)) == doubted
