"""Adam's search of many problems: one that is lost changes none of the others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Wave
from fedgauge.attacks.engine.batch_limiter import BatchLimiter
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.engine.gradient_distances import cosine
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import total_variation
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.recipes import CUTS, inverting_gradients
from fedgauge.attacks.matching.search import AdamSearch
from tests.attacks.matching import tiny_problems
from tests.attacks.matching.tiny_problems import streams


def scene(clients: int, lost: Sequence[int] = ()) -> tuple[Wave, Knowledge]:
    wave, known, _ = tiny_problems.scene(clients, 1)
    for k in lost:
        wave.update["conv1.weight"][k, 0, 0] = torch.nan
    return wave, known


def run(
    attack: GradientMatching, wave: Wave, known: Knowledge, order: Sequence[int], budget: Budget
) -> list[Reconstruction]:
    """Some observations of the wave, in an order."""
    assert known.labels is not None
    some = replace(known, labels=known.labels[list(order)])
    return attack.reconstruct(wave.of(order), some, budget, streams(*order))


def same(one: Reconstruction, other: Reconstruction) -> None:
    assert (one.status, one.iterations) == (other.status, other.iterations)
    assert one.x is not None and other.x is not None
    torch.testing.assert_close(one.x, other.x, rtol=0, atol=1e-7)
    assert one.objective == pytest.approx(other.objective, rel=1e-7)


ATTACKS = {
    "cuts": GradientMatching(
        Objective(cosine(), (total_variation(0.01),)),
        AdamSearch(0.1, True, CUTS),
    ),
    "annealed, decaying": GradientMatching(
        Objective(cosine(), (total_variation(0.01),)),
        AdamSearch(0.1, decay=0.99, anneal=0.1),
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.usefixtures("double")
def test_results_do_not_depend_on_the_problems_of_the_same_pass(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wave, known = scene(4, lost=(1,))
    monkeypatch.setattr(GradientMatching, "_batch_limiter", lambda *_: BatchLimiter(2))
    budget, order = Budget(20), [3, 1, 0, 2]
    alone = {k: run(ATTACKS[attack], wave, known, [k], budget)[0] for k in range(4)}
    assert alone[1].status == "diverged"
    for k, found in enumerate(run(ATTACKS[attack], wave, known, range(4), budget)):
        if k != 1:
            same(found, alone[k])
    for place, found in zip(order, run(ATTACKS[attack], wave, known, order, budget), strict=True):
        if place != 1:
            same(found, alone[place])


def test_the_rate_falls_at_its_cuts_or_a_little_in_each_iteration() -> None:
    assert [AdamSearch(0.1, cuts=(0.5, 0.75)).rate_at(i, 8) for i in (3, 4, 7)] == pytest.approx([0.1, 0.01, 0.001])
    assert AdamSearch(0.2, decay=0.9).rate_at(2, 8) == pytest.approx(0.2 * 0.81)


class Until(Deadline):
    """Over after so many questions."""

    def __init__(self, questions: int) -> None:
        super().__init__()
        self.left = questions

    def over(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(("questions", "spent"), [(0, [0, 0, 0]), (7, [7, 0, 0]), (14, [10, 4, 0])])
def test_the_deadline_interrupts_unfinished_problems(
    questions: int, spent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wave, known = scene(3)
    clock = Until(questions)
    monkeypatch.setattr("fedgauge.attacks.matching.gradient_matching.Deadline", lambda *_: clock)
    monkeypatch.setattr(GradientMatching, "_batch_limiter", lambda *_: BatchLimiter(1))
    found = run(inverting_gradients(), wave, known, range(3), Budget(10))
    assert [f.iterations for f in found] == spent
    assert [f.status == "out_of_budget" for f in found] == [n < 10 for n in spent]


def test_problems_that_exhaust_memory_start_again_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    wave, known = scene(4)
    limiter, widths = BatchLimiter(4), list[int]()
    expected = run(inverting_gradients(), wave, known, range(4), Budget(6))
    evaluate = Problems.value_and_slopes

    def crowded(self: Problems, variables: dict[str, Tensor], rows: Tensor, *others: Any) -> Any:
        widths.append(len(rows))
        if len(rows) > 2 and len(widths) == 3:
            raise MemoryError("in the third iteration")
        return evaluate(self, variables, rows, *others)

    monkeypatch.setattr(Problems, "value_and_slopes", crowded)
    monkeypatch.setattr(GradientMatching, "_batch_limiter", lambda *_: limiter)
    found = run(inverting_gradients(), wave, known, range(4), Budget(6))
    assert widths == [4] * 3 + [2] * 14
    for one, other in zip(found, expected, strict=True):
        assert one.x is not None and other.x is not None
        torch.testing.assert_close(one.x, other.x, rtol=0, atol=1e-4)
