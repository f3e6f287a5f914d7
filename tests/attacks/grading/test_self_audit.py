"""A client's own audit: what it reports to the guard, and when it refuses to report."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedgauge.attacks.grading.self_audit import invert_own

Make = Callable[..., Any]
MLP = {"use": "mlp", "hidden": [16]}


def test_a_clients_own_audit_that_ends_without_images_says_nothing_rather_than_safe(
    make_federation: Make, observe: Make
) -> None:
    """The weights are the server's choice: weights that make the attack diverge must not open the guard."""
    fed = make_federation(model=MLP)
    wave = observe(fed, (0,))
    update = {k: t[0] for k, t in wave.update.items()}
    own = invert_own("inverting_gradients", iterations=2)
    assert own.leak(fed, wave.params, wave.buffers, update, fed.batch_at(0, wave.round)) > 0
    broken = {k: torch.full_like(t, 1e38) for k, t in wave.params.items()}
    with pytest.raises(ValueError, match="not finite|no images|overflow"):
        own.leak(fed, broken, wave.buffers, update, fed.batch_at(0, wave.round))
