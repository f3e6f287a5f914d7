"""Traces: snapshots on the way to a reconstruction, which change nothing about it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Stream, Trace, Wave
from fedgauge.attacks.engine.distances import squared
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.recipes import bayes, dlg, grad_inversion, idlg, inverting_gradients, surrogate
from fedgauge.attacks.matching.search import LBFGSSearch
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from tests.attacks.matching import tiny_problems
from tests.attacks.matching.tiny_problems import streams

Make = Callable[..., Any]
RECIPES: dict[str, GradientMatching] = {
    "inverting_gradients": inverting_gradients(),
    "bayes, annealed": bayes(anneal=0.01),
    "grad_inversion, grouped": grad_inversion(),
    "surrogate": surrogate(),
    "dlg": dlg(),
    "idlg": idlg(),
}
every = pytest.mark.parametrize("recipe", RECIPES)


def scene(clients: int = 2, n: int = 2) -> tuple[Wave, Knowledge]:
    return tiny_problems.scene(clients, n)[:2]


def trace_of(found: Reconstruction) -> Trace:
    assert found.trace is not None
    t, kept = len(found.trace.iteration), found.trace
    assert found.x is not None
    assert (kept.iteration.dtype, kept.objective.dtype, kept.x.dtype) == (torch.int64, torch.float64, torch.uint8)
    assert (kept.iteration.shape, kept.objective.shape, kept.x.shape) == ((t,), (t,), (t, *found.x.shape))
    assert (kept.iteration.diff() > 0).all()
    return kept


def ends_in(trace: Trace, found: Reconstruction) -> None:
    """The last snapshot is the reconstruction, up to eight bits."""
    assert found.x is not None
    torch.testing.assert_close(trace.x[-1], (found.x * 255).round().to(torch.uint8), rtol=0, atol=1)
    assert float(trace.objective[-1]) == found.objective


@every
def test_a_trace_changes_no_bit_of_the_result(recipe: str) -> None:
    wave, known = scene()
    attack, budget = RECIPES[recipe], Budget(20, restarts=2)
    plain = attack.reconstruct(wave, known, budget, streams(0, 1))
    for without, found in zip(plain, attack.traced(5).reconstruct(wave, known, budget, streams(0, 1)), strict=True):
        assert without.trace is None
        assert without.x is not None and found.x is not None and without.y is not None and found.y is not None
        assert torch.equal(without.x, found.x)
        assert torch.equal(without.y, found.y)
        names = ("objective", "iterations", "status", "reason")
        assert [getattr(without, name) for name in names] == [getattr(found, name) for name in names]
        ends_in(trace_of(found), found)


@pytest.mark.parametrize(
    ("snapshots", "iterations", "expected"),
    [(2, 9, [0, 9]), (4, 9, [0, 3, 6, 9]), (5, 10, [0, 2, 5, 8, 10]), (12, 3, [0, 1, 2, 3]), (10**9, 1, [0, 1])],
)
def test_snapshots_are_evenly_spaced_from_the_first_to_the_last(
    snapshots: int, iterations: int, expected: list[int]
) -> None:
    wave, known = scene(clients=1)
    (found,) = inverting_gradients().traced(snapshots).reconstruct(wave, known, Budget(iterations), streams(0))
    assert trace_of(found).iteration.tolist() == expected


def test_a_snapshot_is_the_result_of_a_smaller_budget() -> None:
    wave, known = scene()
    attack = GradientMatching(Objective(squared()))  # no schedule, which would depend on the budget
    whole = attack.traced(4).reconstruct(wave, known, Budget(12), streams(0, 1))
    for place, iterations in ((1, 4), (2, 8)):
        for less, found in zip(attack.reconstruct(wave, known, Budget(iterations), streams(0, 1)), whole, strict=True):
            trace = trace_of(found)
            assert int(trace.iteration[place]) == iterations
            ends_in(Trace(*(t[: place + 1] for t in (trace.iteration, trace.objective, trace.x))), less)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("attack", [inverting_gradients(), idlg()], ids=["adam", "lbfgs"])
def test_the_result_and_its_trace_are_of_the_restart_with_the_lowest_objective(attack: GradientMatching) -> None:
    wave, known = scene()
    restarts = 4

    def only(stream: Stream, restart: int) -> Stream:
        return lambda purpose, _: stream(purpose, restart)

    together = attack.traced(4).reconstruct(wave, known, Budget(12, restarts), streams(0, 1))
    single = [
        attack.traced(4).reconstruct(wave, known, Budget(12), [only(s, r) for s in streams(0, 1)])
        for r in range(restarts)
    ]
    for k, found in enumerate(together):
        best = min((results[k] for results in single), key=lambda result: result.objective)
        torch.testing.assert_close(found.x, best.x, rtol=0, atol=1e-6)
        ours, theirs = trace_of(found), trace_of(best)
        assert ours.iteration.tolist() == theirs.iteration.tolist()
        torch.testing.assert_close(ours.objective, theirs.objective, rtol=1e-3, atol=1e-6)
        assert float((ours.x[0] == theirs.x[0]).double().mean()) > 0.999, "the starts distinguish the restarts"
        others = [trace_of(results[k]) for results in single if results[k] is not best]
        assert all(float((ours.x[0] == other.x[0]).double().mean()) < 0.7 for other in others)


def test_a_restart_of_lbfgs_is_shown_once_it_is_lower() -> None:
    wave, known = scene(n=1)
    attack = GradientMatching(Objective(squared()), LBFGSSearch(plateau=0.9999, restart_above=1e-12))
    for found in attack.traced(30).reconstruct(wave, known, Budget(300), streams(0, 1)):
        trace = trace_of(found)
        assert 30 < int(trace.iteration[-1]) == found.iterations <= 300, "it ended and began again"
        assert float(trace.objective.diff().max()) <= 0
        ends_in(trace, found)


@pytest.mark.parametrize("snapshots", [1, -2])
def test_fewer_than_two_snapshots_are_no_trace(snapshots: int) -> None:
    with pytest.raises(ValueError, match="trace"):
        inverting_gradients().traced(snapshots)


def test_every_snapshot_is_in_the_truths_order(make_federation: Make, observe: Make) -> None:
    fed = make_federation(data={"batch_size": 2}, clients=6)
    table = {"use": "inverting_gradients", "iterations": 25, "trace": 4}
    plan = PlannedAttack.from_table(table, "here")
    auditor, wave = Auditor(FederationSource(fed)), observe(fed, tuple(range(6)))
    known = auditor.knowledge(plan)
    unpaired = plan.build().reconstruct(wave, known, plan.budget, [auditor.stream(plan, 1, c) for c in range(6)])
    moved = 0
    for raw, audited in zip(unpaired, auditor.audit(plan, wave), strict=True):
        found = audited.reconstruction
        ends_in(trace_of(found), found)
        assert raw.x is not None and found.x is not None
        order = [next(i for i in range(2) if torch.equal(raw.x[i], image)) for image in found.x]
        moved += order != [0, 1]
        assert torch.equal(trace_of(found).x, trace_of(raw).x[:, order])
    assert 0 < moved < 6, "some batches were found in another order than the truth's"
