"""Counting labels by a rule that is learned from shadow updates: exact where it can be, and never from a private update."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgauge.attacks import label_rule as rules
from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.attacks.label_restoration import auto, restore
from fedgauge.attacks.label_rule import likeliest_counts
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Update

STEP = {"use": "local_sgd", "rate": 0.1}
CHAINS = {
    "sign of each": [{"use": "sign", "each": True}, STEP],
    "noise": [{"use": "gaussian", "sigma": 0.1}, STEP],
    "bare": [STEP],
}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@lru_cache
def observed(chain: str, clients: int = 16) -> tuple[Wave, Knowledge, Tensor]:
    """The updates of batches of four digits through a LeNet, what the server knows, and the true labels, sorted."""
    data = {"use": "mnist5k", "batch_size": 4, "auxiliary": 200}
    tables = {"rounds": 1, "clients": clients, "data": data, "model": {"use": "lenet"}, "chain": CHAINS[chain]}
    fed = Federation(Protocol.from_tables(tables))
    params, buffers = fed.initial()
    updates = [fed.client_update(params, buffers, c, 1) for c in range(clients)]
    seen = Wave(1, tuple(range(clients)), params, {k: torch.stack([u[k] for u in updates]) for k in params})
    return seen, public_knowledge(fed), torch.stack([fed.batch_at(c, 1).y.sort().values for c in range(clients)])


def by_formula(seen: Wave, known: Knowledge) -> Tensor:
    return torch.stack([auto(seen.alone(k), seen.params, known) for k in range(len(seen))])


def test_the_likeliest_counts_are_those_of_trying_all() -> None:
    value = torch.randn(5, 3, 5, dtype=torch.float64, generator=generator(0))
    ways = [k for k in product(range(5), repeat=3) if sum(k) == 4]
    for one, found in zip(value, likeliest_counts(value), strict=True):
        best = max(ways, key=lambda k: float(sum(one[c, n] for c, n in enumerate(k))))
        assert tuple(found.tolist()) == best


def test_signs_of_single_examples_behind_sigmoids_give_every_label_away() -> None:
    # features are positive, so an example's signs in the rows of the classifier are +1 for its class and -1 for the others
    seen, known, truth = observed("sign of each")
    assert bool((restore(seen, known) == truth).all())
    assert (by_formula(seen, known) == truth).all(1).double().mean() < 0.6


def test_a_rule_counts_more_labels_than_the_formulas() -> None:
    seen, known, truth = observed("noise")
    learned = float((restore(seen, known) == truth).all(1).double().mean())
    assert learned >= 0.7
    assert learned >= 0.3 + float((by_formula(seen, known) == truth).all(1).double().mean())


def test_the_rule_reads_no_private_update(own_cache: Path) -> None:
    seen, known, _ = observed("noise")
    together = restore(seen, known)
    for k in (0, 9):
        assert torch.equal(restore(seen.of([k]), known)[0], together[k])
    assert len(list(own_cache.rglob("labels-*.safetensors"))) == 1, "learned once, for all updates of the weights"


def test_an_update_without_information_has_the_labels_of_the_formulas() -> None:
    seen, known, truth = observed("sign of each")
    update = {k: t.clone() for k, t in seen.update.items()}
    for k, harm in enumerate((torch.nan, torch.inf, 0.0)):
        for t in update.values():
            t[k] = harm
    harmed = replace(seen, update=update)
    found = restore(harmed, known)
    assert torch.equal(found[:3], by_formula(harmed.of(range(3)), known))
    assert torch.equal(found[3:], truth[3:])


def test_formulas_do_where_nothing_changes_the_gradient_or_there_are_no_images(own_cache: Path) -> None:
    seen, known, _ = observed("bare", 3)
    assert torch.equal(restore(seen, known), by_formula(seen, known))
    seen, known, _ = observed("noise")
    seen = seen.of([0, 1])
    assert known.auxiliary is not None
    for few in (None, Batch(known.auxiliary.x[:4], known.auxiliary.y[:4])):
        poor = replace(known, auxiliary=few)
        assert torch.equal(restore(seen, poor), by_formula(seen, poor))
    assert not list(own_cache.rglob("labels-*.safetensors"))


def test_few_images_are_not_simulated_again_and_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial before training has 64 images, and behind a slow defense each simulated update of four takes seconds."""
    seen, known, _ = observed("noise")
    assert known.auxiliary is not None
    simulated: list[int] = []
    really = Simulator.updates

    def counted(self: Simulator, x: Tensor, *rest: Any) -> Iterator[Update]:
        simulated.append(len(x))
        return really(self, x, *rest)

    monkeypatch.setattr(Simulator, "updates", counted)
    restore(seen.of([0]), replace(known, auxiliary=Batch(known.auxiliary.x[:64], known.auxiliary.y[:64])))
    assert sum(simulated) <= 2 * 64 / 4


def test_a_wide_classifiers_rule_is_that_of_the_normal_equations() -> None:
    rng = generator(0)
    x, wanted = (torch.randn(size, dtype=torch.float64, generator=rng) for size in ((12, 30), (12,)))
    gram = x.T @ x
    unit = gram.diagonal().mean() * torch.eye(30, dtype=torch.float64)
    for ridge, found in zip(rules.RIDGES, rules._by_ridge(x, wanted), strict=True):
        assert torch.allclose(found, torch.linalg.solve(gram + ridge * unit, x.T @ wanted), rtol=1e-6, atol=1e-9)


def test_a_models_width_takes_no_memory_by_its_square() -> None:
    """A matrix of 300,000 x 300,000 would take 720 GB; a classifier whose rows alone would take gigabytes has no rule."""
    found = rules._by_ridge(torch.ones(4, 300_000, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    assert all(weights.shape == (300_000,) for weights in found)
    seen, known, _ = observed("noise")
    wide = torch.zeros(1).expand(100, 10**6)
    assert rules.label_rule(known, seen.params, lambda update: wide, lambda update: wide) is None
