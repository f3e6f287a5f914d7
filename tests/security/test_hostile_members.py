"""One client's accepted update against the tests of membership of its wave: the others are told as without it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.attacks.base import Wave
from fedgauge.attacks.grading.audit import NOT_FINITE, Auditor, AuditResult
from fedgauge.attacks.grading.scores import ScoreRecord
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.components import allowing
from fedgauge.client.federation import Federation

Make = Callable[..., Any]
SGD = {"use": "local_sgd", "rate": 0.1}
HOSTILE = 3
OTHERS = [0, 1, 2]
MEASURED = ("membership", "held_membership")  # of each update by itself


def planned(use: str = "membership", **table: Any) -> PlannedAttack:
    return PlannedAttack.from_table({"use": use, "strangers": 100, "held": 5, **table}, "here")


def times(wave: Wave, factor: float) -> Wave:
    """The wave with the hostile client's update multiplied."""
    update = {k: t.clone() for k, t in wave.update.items()}
    for t in update.values():
        t[HOSTILE] *= factor
    return replace(wave, update=update)


def values(results: list[AuditResult], clients: list[int] = OTHERS) -> dict[tuple[int, str, int], float | None]:
    def of_update(row: ScoreRecord) -> bool:
        return row.metric.startswith(MEASURED)

    return {
        (one.client, row.metric, row.example): row.value
        for one in results
        for row in one.rows
        if one.client in clients and of_update(row)
    }


def areas(results: list[AuditResult], clients: list[int] = OTHERS) -> list[float]:
    found = values(results, clients)
    each = [[v for k, v in found.items() if k[:2] == (c, "membership") and v is not None] for c in clients]
    return [sum(own) / len(own) for own in each]


@pytest.fixture
def fed(make_federation: Make) -> Federation:
    made: Federation = make_federation(clients=4, model={"use": "mlp", "hidden": [8]}, data={"auxiliary": 400})
    return made


@pytest.mark.parametrize(
    "score",
    ["likelihood_ratio", "matched_filter", "cosine", "gradient_difference", "fedmia", "fedmia_loss", "loss_change"],
)
@pytest.mark.parametrize("factor", [math.inf, 1e38])
def test_only_the_client_whose_update_is_the_cause_has_no_scores(
    fed: Federation, observe: Make, score: str, factor: float
) -> None:
    wave = times(observe(fed, (0, 1, 2, HOSTILE)), factor)
    found, without = (Auditor(fed).audit(planned(score=score), w) for w in (wave, wave.of(OTHERS)))
    assert [one.reconstruction.status for one in found[:HOSTILE]] == ["converged"] * 3, found[0].reconstruction.reason
    assert values(found) == pytest.approx(values(without), abs=1e-9)
    hostile = found[HOSTILE]
    if hostile.reconstruction.status != "converged":
        assert hostile.reconstruction.reason == NOT_FINITE
        assert [(row.client, row.value, row.status) for row in hostile.rows] == [(HOSTILE, None, "not_applicable")]
    if factor == math.inf or score == "loss_change":
        assert hostile.reconstruction.status == "not_applicable"


def test_over_rounds_the_others_are_remembered_and_the_hostile_ones_memory_stays(
    fed: Federation, observe: Make
) -> None:
    attack, auditor = planned("membership_over_rounds", score="loss_change"), Auditor(fed)
    first = auditor.audit(attack, observe(fed, (0, 1, 2, HOSTILE)))
    memories = {one.client: one.memory for one in first if one.memory is not None}
    wave = times(observe(fed, (0, 1, 2, HOSTILE), round=2), 1e38)
    found, without = (auditor.audit(attack, w, memories=memories) for w in (wave, wave.of(OTHERS)))
    assert values(found) == pytest.approx(values(without), abs=1e-9) and values(found)
    assert [one.memory is None for one in found] == [False, False, False, True], "a job without one leaves the last"


def test_a_network_that_raises_over_one_update_takes_no_other_clients_scores(
    make_federation: Make, observe: Make
) -> None:
    with allowing(["strict_parts"], [Path(__file__).parent]):
        fed = make_federation(clients=4, model={"use": "strict_parts:net"}, data={"auxiliary": 400})
        wave = times(observe(fed, (0, 1, 2, HOSTILE)), 1e38)
        found, without = (Auditor(fed).audit(planned(score="loss_change"), w) for w in (wave, wave.of(OTHERS)))
    assert values(found) == pytest.approx(values(without), abs=1e-9)
    assert [one.reconstruction.status for one in found] == [*["converged"] * 3, "not_applicable"]


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-18])
@pytest.mark.parametrize("size", [1, 2])
def test_an_update_of_zeros_ends_no_test_of_the_client_that_shares_its_wave(
    make_federation: Make, observe: Make, size: int, factor: float
) -> None:
    """Of two updates the lower median is the hostile one's; of one example nothing else in the batch varies."""
    fed = make_federation(clients=4, model={"use": "mlp", "hidden": [8]}, data={"auxiliary": 400, "batch_size": size})
    whole = observe(fed, (0, HOSTILE))
    update = {k: torch.stack([t[0], t[1] * factor]) for k, t in whole.update.items()}
    found = Auditor(fed).audit(planned(), replace(whole, update=update))
    alone = Auditor(fed).audit(planned(), whole.of([0]))
    assert [one.reconstruction.status for one in found] == ["converged"] * 2
    assert areas(found, [0]) == pytest.approx(areas(alone, [0]), abs=0.1)


def test_weights_at_which_no_gradient_is_finite_give_no_likelihood(fed: Federation, observe: Make) -> None:
    wave = observe(fed, (0, 1))
    spoiled = replace(wave, params={k: torch.full_like(t, 3e38) for k, t in wave.params.items()})
    found = Auditor(fed).audit(planned(score="likelihood_ratio"), spoiled)
    assert {one.reconstruction.status for one in found} == {"not_applicable"}
    assert "gradients are not finite" in found[0].reconstruction.reason


@pytest.mark.parametrize(
    "chain",
    [
        [SGD],
        [{**SGD, "steps": 5}],
        [{"use": "local_sgd", "rate": 0.3, "steps": 20}],
        [SGD, {"use": "quantize", "bits": 4}],
        [SGD, {"use": "percentile_privacy"}],
    ],
    ids=["one step", "steps", "many steps", "quantized", "filtered"],
)
def test_a_large_update_bends_no_other_clients_likelihood_ratio(
    make_federation: Make, observe: Make, chain: list[dict[str, Any]]
) -> None:
    """What the updates show of noise and of local steps is that of the usual ones."""
    fed = make_federation(
        clients=4, chain=chain, model={"use": "mlp", "hidden": [8]}, data={"auxiliary": 400, "batch_size": 8}
    )
    wave, auditor = observe(fed, (0, 1, 2, HOSTILE)), Auditor(fed)
    without = areas(auditor.audit(planned(), wave.of(OTHERS)))
    for factor in (10, 100, 900):
        assert areas(auditor.audit(planned(), times(wave, factor))) == pytest.approx(without, abs=0.01), factor
