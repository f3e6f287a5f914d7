"""Who advances together: finished problems leave, waiting ones take their places, and none of them notices."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Wave
from fedgauge.attacks.engine.batch_limiter import BatchLimiter
from fedgauge.attacks.engine.distances import cosine
from fedgauge.attacks.engine.scheduler import CHECK_EVERY, Deadline, OptimizerState, advance
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import total_variation
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.recipes import CUTS, inverting_gradients
from fedgauge.attacks.matching.search import AdamSearch
from tests.attacks.matching import tiny_problems
from tests.attacks.matching.tiny_problems import streams

NEVER = Deadline(0.0, None)


def optimizer_state(count: int) -> OptimizerState:
    return OptimizerState.at({"x": torch.zeros(count, 1)})


# ---------------------------------------------------------------------------------------------------------- by itself


def test_a_free_place_goes_to_the_next_problem() -> None:
    state, seen, ends = optimizer_state(5), [], {0: 20, 1: 100, 2: 5, 3: 100, 4: 100}

    def stretch(part: OptimizerState, rows: Tensor, length: int) -> int:
        seen.append(rows.tolist())
        left = torch.tensor([ends[k] for k in rows.tolist()]) - part.spent
        part.finite.copy_(left > length)  # a problem is lost once it has gone so far
        part.variables["x"] += length
        return length

    interrupted = advance(state, torch.arange(5)[:, None], 40, BatchLimiter(2), NEVER, stretch)
    assert not interrupted.any()
    # 16 iterations to a look, and 8 to the end of 40; then to the nearest look or end of the two
    assert seen == [[0, 1], [0, 1], [1, 2], [2, 3], *[[3, 4]] * 4, [4]]
    assert state.spent.tolist() == [32, 40, 16, 40, 40]
    assert state.variables["x"].flatten().tolist() == [32, 40, 16, 40, 40]


def test_a_unit_stays_until_all_its_problems_end() -> None:
    state, seen = optimizer_state(4), []

    def stretch(part: OptimizerState, rows: Tensor, length: int) -> int:
        seen.append(rows.tolist())
        part.finite.copy_(torch.tensor([k not in (0, 2, 3) for k in rows.tolist()]))
        return length

    advance(state, torch.arange(4).view(2, 2), 2 * CHECK_EVERY, BatchLimiter(2), NEVER, stretch)
    assert seen == [[0, 1, 2, 3], [0, 1]]


def test_an_out_of_memory_stretch_is_repeated_with_fewer_problems() -> None:
    state, limiter, seen = optimizer_state(4), BatchLimiter(4), []

    def stretch(part: OptimizerState, rows: Tensor, length: int) -> int:
        part.variables["x"] += length
        part.finite.fill_(True)
        seen.append(rows.tolist())
        if len(rows) > 2 and len(seen) == 2:
            raise MemoryError("in the second stretch")
        return length

    advance(state, torch.arange(4)[:, None], 2 * CHECK_EVERY, limiter, NEVER, stretch)
    assert seen == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1], [2, 3]]
    assert state.variables["x"].flatten().tolist() == [2 * CHECK_EVERY] * 4, (
        "the stretch that failed left nothing behind"
    )


class Until(Deadline):
    """Over after so many questions."""

    def __init__(self, questions: int) -> None:
        super().__init__(0.0, None)
        self.left = questions

    def over(self) -> bool:
        self.left -= 1
        return self.left < 0


def until(clock: Deadline) -> Callable[[OptimizerState, Tensor, int], int]:
    """A stretch of steps that the clock may end."""

    def stretch(part: OptimizerState, rows: Tensor, length: int) -> int:
        for done in range(length):
            if clock.over():
                return done
            part.finite.fill_(True)
        return length

    return stretch


@pytest.mark.parametrize(
    ("questions", "spent", "interrupted"),
    [(0, [0, 0, 0], [True, True, True]), (18, [16, 0, 0], [False, True, True]), (1, [0, 0, 0], [True] * 3)],
)
def test_the_deadline_interrupts_unfinished_problems(questions: int, spent: list[int], interrupted: list[bool]) -> None:
    state, clock = optimizer_state(3), Until(questions)
    stretch = until(clock)
    assert (
        advance(state, torch.arange(3)[:, None], CHECK_EVERY, BatchLimiter(1), clock, stretch).tolist() == interrupted
    )
    assert state.spent.tolist() == spent


# -------------------------------------------------------------------------------------------------------- in the engine


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
    "annealed, decaying, sampled": GradientMatching(
        Objective(cosine(), (total_variation(0.01),)),
        AdamSearch(0.1, decay=0.99, anneal=0.1, samples=2, radius=0.05),
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.usefixtures("double")
def test_results_do_not_depend_on_the_problems_of_the_same_pass(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wave, known = scene(6, lost=(1,))
    monkeypatch.setattr(GradientMatching, "_batch_limiter", lambda *_: BatchLimiter(2))
    budget, order = Budget(40), [4, 1, 0, 5, 3, 2]
    alone = {k: run(ATTACKS[attack], wave, known, [k], budget)[0] for k in range(6)}
    assert alone[1].status == "diverged"
    # the first check ends problem 1, so that another one joins problem 0 in the middle
    assert [found.iterations for found in alone.values()] == [40, CHECK_EVERY, 40, 40, 40, 40]
    for k, found in enumerate(run(ATTACKS[attack], wave, known, range(6), budget)):
        if k != 1:
            same(found, alone[k])
    for place, found in zip(order, run(ATTACKS[attack], wave, known, order, budget), strict=True):
        if place != 1:
            same(found, alone[place])


def test_a_finished_problem_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    wave, known = scene(3, lost=(0, 2))
    widths: list[int] = []
    evaluate = Problems.value_and_slopes

    def watched(self: Problems, variables: dict[str, Tensor], rows: Tensor, *others: Any) -> Any:
        widths.append(len(rows))
        return evaluate(self, variables, rows, *others)

    monkeypatch.setattr(Problems, "value_and_slopes", watched)
    monkeypatch.setattr(GradientMatching, "_batch_limiter", lambda *_: BatchLimiter(3))
    found = run(inverting_gradients(), wave, known, range(3), Budget(40))
    assert [f.status for f in found] == ["diverged", "converged", "diverged"]
    assert [f.iterations for f in found] == [CHECK_EVERY, 40, CHECK_EVERY]
    assert widths == [3] * CHECK_EVERY + [1] * (40 - CHECK_EVERY) + [3]  # at last their objectives
