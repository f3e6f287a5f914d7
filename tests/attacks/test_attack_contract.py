"""What every attack on images promises: found by the registry, so a new one is held to it at once."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import (
    Attack,
    Budget,
    Knowledge,
    Observation,
    Reconstruction,
    StatefulAttack,
    Stream,
    Wave,
)
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.modality.images import IMAGE_ATTACKS
from fedgauge.attacks.plan import ATTACK, PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import build
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.server.store.tape import read_tensors, write_tensors
from tests.tensors import identical

Make = Callable[..., Any]

# what makes an attack small enough for seconds
LITTLE: Mapping[str, Mapping[str, Any]] = {
    "gi_gip": {"latent": 8, "width": 4, "training": 5},
    "gifd": {"latent": 8, "width": 4, "training": 5},
    "learning_to_invert": {"hidden": 16, "batch": 32},
    "ridge_inversion": {"buckets": 64},
}
# of rows and text: tests/attacks/tables, tests/attacks/text; patch_embedding reads no fully connected network: tests/attacks/exact
ELSEWHERE = {"patch_embedding", "random_words", "mode_row", "random_row"}
ATTACKS: dict[str, Callable[[], Attack]] = {
    entry.name: partial(build, {"use": entry.name, **LITTLE.get(entry.name, {})}, "here", ATTACK)
    for entry in ATTACK.entries()
    if entry.group in (IMAGE_ATTACKS, "fedgauge.baselines") and entry.name not in ELSEWHERE
}
STATUSES = {"converged", "out_of_budget", "diverged", "not_applicable"}
FEW = {
    "auxiliary": 64
}  # images that a learned attack learns from: what is promised does not depend on how much it learns
every = pytest.mark.parametrize("name", ATTACKS)
with_memory = pytest.mark.parametrize("name", [n for n, make in ATTACKS.items() if isinstance(make(), StatefulAttack)])
SEARCHES = (
    *("bayes", "dlg", "federated_averaging", "grad_inversion", "idlg", "inverting_gradients", "surrogate"),
    "partial_matching",
    *("feedback_blending", "leave_layer_out", "precode_joint"),
)


@pytest.fixture(scope="module")
def seen(make_federation: Make) -> tuple[Federation, Wave, Knowledge]:
    """Three clients of an MLP federation, B = 1, which every attack can work on."""
    fed = make_federation(clients=3, model={"use": "mlp", "hidden": [16]}, data=FEW)
    wave = FederationSource(fed).wave(range(3))
    return fed, wave, Auditor(FederationSource(fed)).knowledge(PlannedAttack("x", {"use": "analytic"}))


def streams(n: int) -> list[Stream]:
    return [partial(generator, "contract", k) for k in range(n)]


def run(name: str, wave: Wave, known: Knowledge, budget: Budget | None = None) -> list[Reconstruction]:
    return ATTACKS[name]().reconstruct(wave, known, budget or Budget(4, restarts=2), streams(len(wave)))


def well_shaped(results: list[Reconstruction], wave: Wave, known: Knowledge) -> None:
    assert len(results) == len(wave)
    for found in results:
        assert found.status in STATUSES
        assert found.reason or found.status == "converged"
        assert found.seconds >= 0
        assert found.x is not None or found.status in {"not_applicable", "diverged"}
        if found.x is not None:
            assert found.x.shape == (known.batch_size, *known.shape)
        if found.y is not None:
            assert found.y.shape == (known.batch_size,)
            assert found.y.dtype == torch.int64
            assert 0 <= int(found.y.min()) <= int(found.y.max()) < known.classes


def well_formed(results: list[Reconstruction], wave: Wave, known: Knowledge) -> None:
    well_shaped(results, wave, known)
    for x in (found.x for found in results if found.x is not None):
        assert x.dtype == torch.float32
        assert torch.isfinite(x).all()
        assert 0 <= float(x.min()) <= float(x.max()) <= 1
        assert not x.requires_grad


@every
def test_an_attack_is_a_frozen_value(name: str) -> None:
    attack = ATTACKS[name]()
    assert dataclasses.is_dataclass(attack)
    assert attack == ATTACKS[name]()
    with pytest.raises(dataclasses.FrozenInstanceError):
        attack.anything = 1  # type: ignore[attr-defined]
    above = type(attack).__mro__[1:]
    between = above[: above.index(Attack)]
    assert all(inspect.isabstract(kind) for kind in between), "no attack extends another, but for frames that are none"


@every
def test_equal_streams_give_equal_answers_and_nothing_is_written_to(
    name: str, seen: tuple[Federation, Wave, Knowledge]
) -> None:
    """One answer for each observation; the model and the global generator stay as they were."""
    fed, wave, known = seen
    everything: list[Tensor] = [*wave.params.values(), *wave.update.values(), *fed.model.state_dict().values()]
    kept, state = [t.clone() for t in everything], torch.get_rng_state()
    first, again = run(name, wave, known), run(name, wave, known)
    well_formed(first, wave, known)
    status = "out_of_budget" if name == "feature_separation" else "converged"  # few iterations do not find its images
    assert [found.status for found in first] == [status] * 3
    for a, b in zip(first, again, strict=True):
        assert a.x is not None and b.x is not None
        assert torch.equal(a.x, b.x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(everything, kept, strict=True))
    assert all(p.grad is None for p in fed.model.parameters())


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda t: t * factor


GARBAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "huge": scaled(1e30),
    "tiny": scaled(1e-30),
    "largest": lambda t: torch.full_like(t, 3e38),
    "noise": lambda t: torch.randn(t.shape, generator=torch.Generator().manual_seed(0)),
    "nan": lambda t: torch.full_like(t, float("nan")),
    "inf": lambda t: torch.full_like(t, float("inf")),
    "one nan": lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 0, torch.nan, t),
}

# some attacks decline a batch before they look at its update
SPOILT = [*((name, 1) for name in GARBAGE), ("largest", 2), ("one nan", 2)]


@pytest.mark.product
@every
@pytest.mark.parametrize("garbage", SPOILT, ids=str)
def test_garbage_gives_a_status_never_an_exception(
    name: str, garbage: tuple[str, int], seen: tuple[Federation, Wave, Knowledge]
) -> None:
    _, wave, known = seen
    kind, batch_size = garbage
    spoilt = dataclasses.replace(wave, update={k: GARBAGE[kind](t) for k, t in wave.update.items()})
    known = dataclasses.replace(known, batch_size=batch_size)
    well_formed(run(name, spoilt, known), spoilt, known)


@every
def test_an_attack_ends_when_its_seconds_are_over(name: str, seen: tuple[Federation, Wave, Knowledge]) -> None:
    _, wave, known = seen
    well_formed(run(name, wave, known, Budget(10**9, seconds=0.05)), wave, known)


SGD = {"use": "local_sgd", "rate": 0.1}
MASK = {"use": "mask", "keep": 0.5, "seed": 1}
NOISE = {"use": "gaussian", "sigma": 0.1}
SMALL = {"use": "mlp", "hidden": [16]}
CLIENTS: dict[str, dict[str, Any]] = {
    "batch of three": {"model": {"use": "lenet"}, "data": {"batch_size": 3}},
    "train-mode BatchNorm": {
        "model": {"use": "convnet", "width": 1, "mode": "train"},
        "data": {"batch_size": 2},
    },
    "group": {"model": {"use": "convnet", "width": 1, "norm": "group"}},
    "local steps": {"chain": [{**SGD, "steps": 2, "batch_size": 1}], "data": {"batch_size": 2}},
    "each clip": {"model": SMALL, "chain": [{"use": "clip", "max_norm": 0.1, "each": True}, SGD]},
    "each mask": {"model": SMALL, "chain": [{**MASK, "each": True}, SGD]},
    "mask": {"model": SMALL, "chain": [SGD, MASK]},
    "sign": {"model": SMALL, "chain": [SGD, {"use": "sign"}, NOISE]},
    "prune": {"model": SMALL, "chain": [{"use": "prune", "keep": 0.01}, SGD, NOISE]},
}


@pytest.mark.product
@every
@pytest.mark.parametrize("changes", CLIENTS.values(), ids=CLIENTS)
def test_an_attack_meets_every_kind_of_client(
    name: str, changes: dict[str, Any], make_federation: Make, observe: Make
) -> None:
    fed = make_federation(**{**changes, "data": {**FEW, **changes.get("data", {})}})
    wave = observe(fed, clients=(0, 1))
    known = Auditor(FederationSource(fed)).knowledge(PlannedAttack("x", {"use": "analytic"}))
    results = run(name, wave, known, Budget(2))
    well_formed(results, wave, known)
    if name in (*SEARCHES, "mean_image", "random_image"):
        assert {found.status for found in results} == {"converged"}


# --------------------------------------------------------------------------------------------------------- with memory


def remembering(name: str) -> StatefulAttack:
    attack = ATTACKS[name]()
    assert isinstance(attack, StatefulAttack)
    return attack


@with_memory
def test_memory_goes_to_disk_and_back_and_is_not_written_to(
    name: str, seen: tuple[Federation, Wave, Knowledge], tmp_path: Path
) -> None:
    """Three rounds, as a pool lives through them: what is remembered is a file in between."""
    _, wave, known = seen
    attack = remembering(name)
    kept = stored = [{} for _ in wave.clients]
    for round in range(3):
        before = [{k: t.clone() for k, t in memory.items()} for memory in kept]
        found, after = attack.advance(wave, known, Budget(4), streams(3), kept)
        again, same = attack.advance(wave, known, Budget(4), streams(3), stored)
        well_formed(found, wave, known)
        assert all(map(identical, kept, before))
        assert all(map(identical, after, same))
        assert [a.objective for a in found] == [b.objective for b in again]
        for k, memory in enumerate(after):
            write_tensors(tmp_path / f"{round}-{k}", memory)
        kept, stored = after, [read_tensors(tmp_path / f"{round}-{k}") for k in range(3)]


@with_memory
def test_a_new_client_is_attacked_without_memory(name: str, seen: tuple[Federation, Wave, Knowledge]) -> None:
    _, wave, known = seen
    attack = remembering(name)
    begun, _ = attack.advance(wave, known, Budget(4), streams(3), [{} for _ in wave.clients])
    for a, b in zip(begun, attack.reconstruct(wave, known, Budget(4), streams(3)), strict=True):
        assert a.x is not None and b.x is not None
        assert torch.equal(a.x, b.x)


def test_an_attack_gets_no_truth() -> None:
    fields = {f.name for kind in (Observation, Wave, Knowledge) for f in dataclasses.fields(kind)}
    assert fields == {
        *("round", "client", "clients", "params", "update", "buffers", "model", "chain", "shape", "classes"),
        *("batch_size", "mean", "std", "labels", "label_kind", "auxiliary", "loss", "lengths", "columns", "plain"),
        *(
            "correction",
            "returned",
        ),  # from the server's own weights and the client's earlier updates; what it sent back
        *("low", "high"),  # the range of the auxiliary examples
    }
    for name in ATTACKS:
        asked = inspect.signature(ATTACKS[name]().reconstruct).parameters
        assert list(asked) == ["wave", "known", "budget", "streams"]
        if isinstance(attack := ATTACKS[name](), StatefulAttack):
            assert list(inspect.signature(attack.advance).parameters) == [*asked, "memories"]
