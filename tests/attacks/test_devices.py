"""Attacks on a device beside the CPU: every tensor that they make is where the wave is, and the results are the CPU's."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedgauge.attacks.base import Observation, Wave
from fedgauge.attacks.engine.devices import CPU
from fedgauge.attacks.grading.audit import Auditor, AuditResult
from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.modality.sentences import TEXT_ATTACKS
from fedgauge.attacks.plan import ATTACK, PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.components import build
from fedgauge.client.models.vision import lenet
from fedgauge.client.rng import generator
from fedgauge.simulations.benchmarks.engine import CIFAR_SHAPE, problem
from tests import separate_device as separate
from tests.attacks.test_attack_contract import ATTACKS, FEW, LITTLE
from tests.attacks.text.test_text_contract import SMALL, TASKS
from tests.separate_device import DEVICE, SeparateTensor, separate_device

Make = Callable[..., Any]
TEXT = [entry.name for entry in ATTACK.entries() if entry.group == TEXT_ATTACKS]
SGD = {"use": "local_sgd", "rate": 0.1}
MLP = {"use": "mlp", "hidden": [16]}
LENET = {"model": {"use": "lenet"}, "data": FEW}
FEDERATIONS: Mapping[str, Mapping[str, Any]] = {
    "fully connected": {"model": MLP, "data": FEW},
    "convolutions": LENET,
    "batch norm": {"model": {"use": "convnet", "width": 1, "mode": "train"}, "data": {**FEW, "batch_size": 2}},
    "noise": {
        **LENET,
        "chain": [{"use": "clip", "max_norm": 1.0, "each": True}, SGD, {"use": "gaussian", "sigma": 0.01}],
    },
    "local steps": {**LENET, "chain": [{"use": "local_sgd", "rate": 0.1, "steps": 2}, {"use": "top_k", "keep": 0.5}]},
    "soteria": {"model": MLP, "data": FEW, "chain": [{"use": "soteria", "rate": 0.5}, SGD]},
}


def test_the_device_refuses_to_mix() -> None:
    with separate_device() as device:
        there, here = torch.ones(3, device=device), torch.ones(3)
        assert there.device == DEVICE and (there + 1).tolist() == [2.0] * 3 and float(there.sum()) == 3
        for wrong in (
            lambda: there + here,
            lambda: torch.rand(3, device=device, generator=torch.Generator()),
            lambda: here[there.long()],
            lambda: there.copy_(here) @ here,
        ):
            with pytest.raises(RuntimeError):
                wrong()
        with pytest.raises(TypeError):
            there.numpy()
        assert torch.equal(there.cpu() + here, 2 * here)


def planned(name: str, **more: Any) -> PlannedAttack:
    table = {"use": name, **{**LITTLE, **SMALL}.get(name, {}), "iterations": 2, "name": name, **more}
    return PlannedAttack.from_table(table, "[[attack]]")


def audited(make: Make, tables: Mapping[str, Any], plan: PlannedAttack, there: bool) -> list[AuditResult]:
    """What an auditor finds in the updates of two clients, on the CPU or beside it."""
    fed = make(clients=2, **tables)
    wave = FederationSource(fed).wave(range(2))
    if not there:
        return Auditor(FederationSource(fed)).audit(plan, wave)
    with separate_device() as device:
        return Auditor(FederationSource(fed), device=device).audit(plan, wave)


def same(expected: list[AuditResult], found: list[AuditResult]) -> None:
    for one, other in zip(expected, found, strict=True):
        first, then = one.reconstruction, other.reconstruction
        assert (first.status, first.reason, first.iterations) == (then.status, then.reason, then.iterations)
        assert then.objective == pytest.approx(first.objective, rel=1e-5, nan_ok=True)
        for a, b in ((first.x, then.x), (first.y, then.y)):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert type(b) is torch.Tensor and torch.allclose(a.float(), b.float(), atol=1e-4)
        assert [(row.metric, row.example) for row in one.rows] == [(row.metric, row.example) for row in other.rows]
        assert (one.memory is None) == (other.memory is None)
        assert all(t.device == CPU for t in (other.memory or {}).values())


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_finds_on_a_device_what_it_finds_on_the_cpu(name: str, make_federation: Make) -> None:
    plan, tables = planned(name), FEDERATIONS["fully connected"]
    expected, found = (audited(make_federation, tables, plan, there) for there in (False, True))
    same(expected, found)
    assert any(one.reconstruction.status != "not_applicable" for one in found)


KINDS = [kind for kind in FEDERATIONS if kind != "fully connected"]
OTHERS = ("bayes", "feedback_blending", "several_rounds", "surrogate", "ridge_inversion")


@pytest.mark.parametrize(
    ("name", "kind"),  # all kinds with one attack, and each other attack with one of them
    [
        *(
            pytest.param("inverting_gradients", kind, marks=[pytest.mark.full] if kind == "soteria" else [])
            for kind in KINDS
        ),
        *(pytest.param(*pair, marks=pytest.mark.full) for pair in zip(OTHERS, KINDS, strict=True)),
    ],
)
def test_networks_and_defenses_are_on_the_device_too(name: str, kind: str, make_federation: Make) -> None:
    plan = planned(name)
    expected, found = (audited(make_federation, FEDERATIONS[kind], plan, there) for there in (False, True))
    same(expected, found)


@pytest.mark.parametrize("task", ["classification", pytest.param("next_token", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] if n == "tag" else []) for n in TEXT])
def test_sentences_are_found_on_a_device_too(name: str, task: str, make_federation: Make) -> None:
    data = {"use": "phrases", "length": 8, "task": task, "auxiliary": 40}
    plan = planned(name)
    expected, found = (audited(make_federation, {"data": data, **TASKS[task]}, plan, there) for there in (False, True))
    same(expected, found)


FISHED: Mapping[str, Mapping[str, Any]] = {
    "lone_example": {"use": "class_fishing"},
    "lone_target": {"use": "dead_layer"},
    "separated": {"use": "separate_models", "count": 2},
}


@pytest.mark.parametrize("name", FISHED)
def test_what_a_malicious_server_isolated_is_inverted_on_a_device_too(name: str, make_federation: Make) -> None:
    tables: dict[str, Any] = {"model": MLP, "data": {**FEW, "batch_size": 2}, "clients": 2}
    if name == "lone_target":
        tables |= {"clients": 3, "secure_sum": {"group": 3}}
    server_attack = build(FISHED[name], "server_attack", SERVER_ATTACK)
    if server_attack.architecture is not None:
        tables["model"] = {**MLP, "architectures": [server_attack.architecture]}
    fed = make_federation(**tables)
    params, buffers = fed.initial()
    sent = server_attack.craft(params, public_knowledge(fed), generator("craft"))
    crafted = params if name == "lone_target" else sent  # which the target got, as honest weights
    wave = Wave.stack([Observation(1, 0, crafted, fed.client_update(crafted, buffers, 0, 1), buffers)])
    plan = planned(name, attack={"use": "inverting_gradients"})
    expected = Auditor(FederationSource(fed)).audit(plan, wave)
    with separate_device() as device:
        same(expected, Auditor(FederationSource(fed), device=device).audit(plan, wave))
    assert expected[0].reconstruction.x is not None


def test_more_problems_cost_a_device_no_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU waits for calls: a call for each problem left one idle for 96 % of the time."""
    calls: list[Any] = []
    run = separate._run
    monkeypatch.setattr(separate, "_run", lambda func, *rest: calls.append(func) or run(func, *rest))

    def count(size: int) -> int:
        with separate_device() as device:
            posed = problem(CIFAR_SHAPE, size, make=lenet, device=device)
            problems = Problems(posed.attack.objective, posed.wave, posed.known, posed.known.labels, 1, torch.float32)
            x = torch.randn(posed.truth.shape, generator=generator("gpu", "guess")).to(posed.truth)
            variables, rows = {"x": x}, torch.arange(len(posed.wave))
            problems.value_and_slopes(variables, rows)  # the first one checks the model
            calls.clear()
            problems.value_and_slopes(variables, rows)
            return len(calls)

    assert count(64) == count(16) > 0


@pytest.mark.parametrize("kind", ["noise", pytest.param("batch norm", marks=pytest.mark.full)])
def test_a_step_neither_copies_from_the_host_nor_waits_for_it(
    kind: str, make_federation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no CUDA graph can replay it."""
    crossing: list[Any] = []
    steps: list[int] = []
    run, differentiated = separate._run, Problems.differentiated

    def stepped(*arguments: Any) -> Any:
        crossing.clear()
        found = differentiated(*arguments)
        steps.append(len(crossing))
        return found

    def watched(func: Any, args: Any, kwargs: Any) -> Any:
        result = run(func, args, kwargs)
        there = [isinstance(t, SeparateTensor) for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) and any(there) != all(there)
        if copies or (func is torch.ops.aten._local_scalar_dense.default and any(there)):
            crossing.append(func)
        return result

    monkeypatch.setattr(separate, "_run", watched)
    monkeypatch.setattr(Problems, "differentiated", stepped)
    audited(make_federation, FEDERATIONS[kind], planned("inverting_gradients"), there=True)
    assert len(steps) > 2 and steps[-1] == 0, "the first step may fill caches"
