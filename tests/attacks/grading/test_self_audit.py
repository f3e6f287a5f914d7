"""A client's own audit: what it reports to the guard, and when it refuses to report."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedgauge.attacks.grading.self_audit import invert_own
from fedgauge.client.deployment.deployed_client import UpdatePolicy
from fedgauge.client.deployment.owner_file import GuardPolicy

Make = Callable[..., Any]
MLP = {"use": "mlp", "hidden": [16]}


def test_a_self_audit_without_result_raises(make_federation: Make, observe: Make) -> None:
    """The weights are the server's choice: weights that make the attack diverge must not open the guard."""
    fed = make_federation(model=MLP)
    wave = observe(fed, (0,))
    update = {k: t[0] for k, t in wave.update.items()}
    own = invert_own("inverting_gradients", iterations=2)
    assert own.leak(fed, wave.params, wave.buffers, update, {}, fed.batch_at(0, wave.round)) > 0
    broken = {k: torch.full_like(t, 1e38) for k, t in wave.params.items()}
    with pytest.raises(ValueError, match="finite|result"):
        own.leak(fed, broken, wave.buffers, update, {}, fed.batch_at(0, wave.round))


def test_a_client_audits_its_own_text(make_federation: Make) -> None:
    """Its guard withholds what has leaked, and lets go what has not: it does not withhold every update."""
    pytest.importorskip("transformers", reason="the extra [text] is not installed")
    words = {"use": "phrases", "batch_size": 1, "auxiliary": 50}
    fed = make_federation(data=words, model={"use": "tiny_bert", "width": 64, "heads": 2})
    params, buffers = fed.initial()
    batch, own = fed.batch_at(0, 1), invert_own("tag", iterations=2)
    update = fed.client_update(params, buffers, 0, 1)
    leak, policy = own.leak(fed, params, buffers, update, {}, batch), own.policy(fed, GuardPolicy())
    assert 0 <= leak <= 100 and policy == UpdatePolicy(None, 50.0, "%", True)
    assert own.policy(fed, GuardPolicy(threshold=120.0)).threshold == 100.0
    read_off = invert_own("dager").leak(fed, params, buffers, update, {}, batch)
    objection = policy.objection(update, lambda: read_off)
    assert objection == "its audit reconstructs an example at 100.0 %"
