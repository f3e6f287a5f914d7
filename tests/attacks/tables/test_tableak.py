"""TabLeak: its relaxation gives rows that could be, its restarts vote without the truth, and small batches come back."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Wave
from fedgauge.attacks.exact.analytic import analytic
from fedgauge.attacks.exact.unmixing import spear
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.modality.rows import RowModality
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.attacks.tables.tableak import aligned, confidence, relaxed_rows, tableak
from fedgauge.client.chain import chain
from fedgauge.client.data.tables import Tabular
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.columns import Column, Columns
from fedgauge.client.rng import generator

MIXED = Columns(
    (
        Column("a", mean=1.0, std=2.0, low=0.0, high=5.0),
        Column("b", ("x", "y", "z"), shares=(0.2, 0.3, 0.5)),
        Column("c", mean=0.0, std=1.0, optional=True),
        Column("d", ("u", "v")),
    )
)


KNOWN = Knowledge(nn.Identity(), chain(local_sgd(0.1)), (MIXED.entries,), 2, 1, (), (), columns=MIXED)
NO_LABELS = torch.zeros(0)  # which rows do not depend on


def test_free_numbers_become_rows_that_could_be() -> None:
    z = 3 * torch.randn(50, MIXED.entries, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    natural = MIXED.natural(relaxed_rows().bind(KNOWN)(z, NO_LABELS))
    assert float(natural[:, 0].min()) > 0 and float(natural[:, 0].max()) < 5
    for group in (slice(1, 4), slice(6, 8)):
        assert torch.allclose(natural[:, group], MIXED.natural(z)[:, group].softmax(1))
    assert bool(((natural[:, 5] > 0) & (natural[:, 5] < 1)).all())
    free = relaxed_rows(softmax=False).bind(KNOWN)(z, NO_LABELS)
    assert torch.allclose(free[:, 1:4], z[:, 1:4])


def test_restarts_are_put_into_one_order_and_never_across_labels() -> None:
    cells = torch.tensor([[0.0, 0, 0, 0], [2.0, 1, 0, 1], [4.0, 2, 0, 1]], dtype=torch.float64)
    to, labels = MIXED.rows(cells), torch.tensor([0, 0, 1])
    orders = torch.tensor([[1, 0, 2], [0, 1, 2]])
    found = aligned(MIXED, to[orders], labels[orders], to, labels)
    assert torch.equal(found, to.expand(2, -1, -1))
    # the third row resembles the first one's restart, but has another label
    swapped = torch.stack([to[[2, 1, 0]]])
    assert torch.equal(aligned(MIXED, swapped, labels[None], to, labels)[0][2], to[0])


def test_confidence_is_entropy_and_spread() -> None:
    same = MIXED.rows(torch.tensor([[1.0, 0, 0.5, 1]], dtype=torch.float64)).expand(4, 1, -1)
    assert torch.allclose(confidence(MIXED, same), torch.ones(1, 4), atol=1e-5)
    split = torch.stack([MIXED.rows(torch.tensor([[1.0 + 2 * i, i, 0.5, i]], dtype=torch.float64)) for i in (0, 1)])
    sure = confidence(MIXED, split)[0].tolist()
    assert sure == pytest.approx(
        [1 / (1 + 1 / 2), 1 - torch.tensor(2.0).log().item() / torch.tensor(3.0).log().item(), 1, 0], abs=1e-4
    )


def audited(fed: Federation, wave: Wave, attack: Any, budget: Budget, **known: Any) -> list[Reconstruction]:
    knowledge = replace(Auditor(FederationSource(fed)).knowledge(PlannedAttack("x", {"use": "analytic"})), **known)
    streams = [partial(generator, "rows", k) for k in range(len(wave))]
    found: list[Reconstruction] = attack.reconstruct(wave, knowledge, budget, streams)
    return found


def share_right(fed: Federation, found: Reconstruction, client: int) -> float:
    data = fed.shards.dataset
    assert isinstance(data, Tabular) and found.x is not None
    modality, truth = RowModality(data), fed.shards.batch_at(client, 1).x
    cells = next(m for m in modality.metrics(data.x) if m.name == "cells")
    return float(cells(truth, found.x[modality.pairing(truth, found.x)]).mean())


def rows_of(make: Callable[..., Federation], size: int, **model: Any) -> Federation:
    data = {"use": "census", "batch_size": size, "auxiliary": 100, "partition": "iid"}
    return make(data=data, model=model or {"use": "mlp", "hidden": [48, 48]}, clients=2)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_small_batches_come_back(size: int, make_federation: Any, observe: Any) -> None:
    fed = rows_of(make_federation, size)
    wave = observe(fed, (0, 1))
    results = audited(fed, wave, tableak(), Budget(300, 6))
    for client, found in enumerate(results):
        assert found.status == "converged" and found.confidence is not None
        assert found.confidence.shape == (size, 10) and float(found.confidence.min()) >= 0
        assert share_right(fed, found, client) >= 90


def test_pooling_reads_the_objective_and_the_restarts_alone(make_federation: Any, observe: Any) -> None:
    fed = rows_of(make_federation, 4)
    wave = observe(fed, (0,))
    given = {"labels": fed.shards.batch_at(0, 1).y.sort().values[None]}
    pooled, best = (audited(fed, wave, tableak(pool=p), Budget(150, 6), **given)[0] for p in (True, False))
    assert pooled.objective == best.objective
    assert share_right(fed, pooled, 0) > 70
    # the truth is not read: the same from other data
    other = replace(fed.shards.dataset, x=fed.shards.dataset.x.flip(0))
    again = audited(fed.having(replace(fed.shards, dataset=other)), wave, tableak(), Budget(150, 6), **given)[0]
    assert pooled.x is not None and again.x is not None and torch.equal(pooled.x, again.x)


@pytest.mark.parametrize(
    "model",
    [
        {"use": "embedding_mlp"},
        pytest.param(
            {"use": "ft_transformer", "blocks": 1, "dimension": 16, "heads": 2, "hidden": 16}, marks=pytest.mark.full
        ),
    ],
)
def test_embedded_rows_come_back_too(model: dict[str, Any], make_federation: Any, observe: Any) -> None:
    fed = rows_of(make_federation, 1, **model)
    (found,) = audited(fed, observe(fed, (0,)), tableak(), Budget(100, 2))
    assert found.status == "converged", found.reason
    assert share_right(fed, found, 0) >= 70


@pytest.mark.parametrize(("size", "attack"), [(1, analytic()), (4, spear())])
def test_exact_attacks_prove_rows_behind_a_fully_connected_layer(
    size: int, attack: Any, make_federation: Any, observe: Any
) -> None:
    fed = rows_of(make_federation, size, use="mlp", hidden=[100, 100])
    (found,) = audited(fed, observe(fed, (0,)), attack, Budget(200))
    assert found.status == "converged" and not found.reason
    assert share_right(fed, found, 0) == 100
    assert found.x is not None and found.y is not None
    truth = fed.shards.batch_at(0, 1)
    assert sorted(found.y.tolist()) == sorted(truth.y.tolist())


def test_it_refuses_values_that_are_not_rows(make_federation: Any, observe: Any) -> None:
    fed = make_federation(model={"use": "mlp", "hidden": [8]})
    (found,) = audited(fed, observe(fed, (0,)), tableak(), Budget(2))
    assert found.status == "not_applicable" and "no columns" in found.reason
