"""The replay check: silent for an honest client, and a mismatch for any other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.replay import TOLERANCE, ReplayCheck, replay
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import gradient
from fedgauge.client.rng import generator
from fedgauge.client.update import Update

Make = Callable[..., Any]
SGD = {"use": "local_sgd", "rate": 0.1}
CLIP = {"use": "clip", "max_norm": 0.1}
NOISE = {"use": "gaussian", "sigma": 0.01}
NORMED = {"use": "convnet", "width": 2}

FEDERATIONS: dict[str, dict[str, Any]] = {
    "lenet": {},
    "noise": {"chain": [SGD, NOISE]},
    "each clip, steps, noise": {
        "data": {"batch_size": 3},
        "chain": [{**CLIP, "each": True}, NOISE, {**SGD, "steps": 3}, {"use": "mask", "keep": 0.5}],
    },
    "eval BatchNorm": {"model": NORMED},
    "train BatchNorm": {"model": {**NORMED, "mode": "train"}, "data": {"batch_size": 3}},
    "each clip, eval BatchNorm": {"model": NORMED, "chain": [{**CLIP, "each": True}, SGD]},
}


def seen(
    fed: Federation, client: int = 1, round: int = 2, tampered: Callable[[Update], Update] | None = None
) -> Observation:
    params, buffers = fed.initial()
    # statistics after some training are no longer 0 and 1
    buffers = {k: b + 0.3 for k, b in buffers.items()}
    update = fed.client_update(params, buffers, client, round)
    return Observation(round, client, params, tampered(update) if tampered else update, buffers)


@pytest.mark.parametrize("changes", FEDERATIONS.values(), ids=FEDERATIONS)
def test_an_honest_update_is_replayed_exactly(changes: dict[str, Any], make_federation: Make) -> None:
    observation = seen(make_federation(**changes))
    check = replay(make_federation(**changes), observation)
    assert check == ReplayCheck(2, 1, pytest.approx(1.0, abs=1e-6), 0.0, "exact to rounding")  # type: ignore[arg-type]
    assert check.ok


def test_rounding_is_no_difference(make_federation: Make) -> None:
    def rounded(update: Update) -> Update:
        return {
            k: t * (1 + 1e-6 * torch.randn(t.shape, generator=torch.Generator().manual_seed(0)))
            for k, t in update.items()
        }

    check = replay(make_federation(), seen(make_federation(), tampered=rounded))
    assert 0 < check.relative_error < 1e-5 < TOLERANCE
    assert check.ok


@pytest.mark.parametrize("factor", [0.5, 2.0, 1.001, 8.0])
def test_another_learning_rate_or_loss_scale_is_named(factor: float, make_federation: Make) -> None:
    check = replay(make_federation(), seen(make_federation(), tampered=lambda u: {k: factor * t for k, t in u.items()}))
    assert not check.ok
    assert check.cosine == pytest.approx(1.0, abs=1e-6)
    assert check.relative_error == pytest.approx(abs(1 / factor - 1), rel=1e-3)
    assert f"{factor:.6g} times" in check.verdict


def raw_pixels(fed: Federation) -> Observation:
    params, buffers = fed.initial()
    update = fed.chain(gradient(fed.model))(params, fed.batch_at(1, 2), generator(fed.protocol.seed, "client", 1, 2))
    return Observation(2, 1, params, update, buffers)


def test_what_a_client_computes_otherwise_is_a_mismatch(make_federation: Make) -> None:
    here, in_training = (
        make_federation(model={**NORMED, "mode": m}, data={"batch_size": 3}) for m in ("eval", "train")
    )
    plain = make_federation()
    for fed, observation in (
        (plain, raw_pixels(plain)),
        (make_federation(chain=[SGD, NOISE]), seen(plain)),
        (plain, seen(make_federation(chain=[{**SGD, "rate": 0.05}]))),
        (plain, seen(make_federation(seed=1))),
        (plain, seen(plain, tampered=lambda u: {k.replace("linear", "fc"): t for k, t in u.items()})),
        (here, seen(in_training)),
    ):
        check = replay(fed, observation)
        assert not check.ok and check.relative_error > 0.1
