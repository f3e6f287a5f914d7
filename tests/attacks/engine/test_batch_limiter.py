"""How many problems advance together: from free memory ahead of time, and from what fails after all."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Budget
from fedgauge.attacks.engine import batch_limiter
from fedgauge.attacks.engine.batch_limiter import BatchLimiter, host_memory, largest_batch, peak_bytes
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.recipes import grad_inversion, idlg, inverting_gradients
from tests.attacks.matching.tiny_problems import scene, streams

CPU = torch.device("cpu")


def test_the_peak_of_a_piece_of_work_by_hand() -> None:
    x = torch.zeros(1000)
    assert peak_bytes(lambda: (x + 1) + 2, CPU) == 2 * 4000, "two sums of a thousand numbers; x was there before"
    assert peak_bytes(lambda: x.view(10, 100).t(), CPU) == 0, "views hold nothing of their own"
    assert peak_bytes(lambda: [x + 1 for _ in range(5)], CPU) == 5 * 4000

    def one_by_one() -> None:
        for _ in range(5):
            x + 1

    assert peak_bytes(one_by_one, CPU) == 4000, "each is dropped before the next is made"


def test_the_peak_counts_what_the_graph_keeps_alive() -> None:
    def twice_exponential() -> None:
        a = torch.zeros(1000, requires_grad=True)
        b = a.exp()
        c = b.exp()
        del b
        torch.autograd.grad(c.sum(), a)

    # a, its two exponentials, the derivative by each; the sum and its derivative are single numbers
    assert peak_bytes(twice_exponential, CPU) == 5 * 4000 + 2 * 4


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  8000 kB\n"}, 8000 * 1024),
        (
            {
                "proc/meminfo": "MemAvailable: 8000 kB\n",
                "sys/fs/cgroup/memory.max": "5000000\n",
                "sys/fs/cgroup/memory.current": "2000000\n",
                "sys/fs/cgroup/memory.stat": "anon 7\ninactive_file 300000\n",
            },
            3_300_000,
        ),
    ],
    ids=["no report", "system", "container"],
)
def test_free_memory_is_within_all_limits(files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_memory(tmp_path) == expected


@pytest.mark.parametrize(
    ("available", "held", "expected"), [(16000, 0, 4), (16000, 4000, 2), (80, 0, 1), (10**9, 0, 50)]
)
def test_as_many_fit_as_half_the_free_memory_holds(
    available: int, held: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_limiter, "free_bytes", lambda device: available)
    seen: list[int] = []

    def work(count: int) -> Tensor:
        seen.append(count)
        return torch.zeros(count, 250) + 1  # 2,000 bytes for each problem: the zeros, and the sum

    found = largest_batch(work, 50, CPU, held)
    assert seen == [2], "one dry pass"
    assert found == expected


def test_one_problem_is_tried_if_two_do_not_fit() -> None:
    def work(count: int) -> None:
        raise MemoryError("already two are too many")

    assert largest_batch(work, 50, CPU) == 1


def test_the_count_stays_halved() -> None:
    places, tried = BatchLimiter(8), []

    def work(items: Tensor) -> list[int]:
        tried.append(len(items))
        if len(items) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return items.tolist()

    found = places.each(work, torch.arange(7))
    assert [k for part in found for k in part] == list(range(7))
    assert (tried, places.count) == ([7, 3, 3, 1], 3)
    places.each(work, torch.arange(4))
    assert tried[4:] == [3, 1], "what was learned is kept"


# -------------------------------------------------------------------------------------------------------- in the engine


def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many problems are evaluated together, at each evaluation from now on."""
    seen: list[int] = []
    evaluate = Problems.value_and_slopes

    def watched(self: Problems, variables: dict[str, Tensor], rows: Tensor, *others: object) -> object:
        seen.append(len(rows))
        return evaluate(self, variables, rows, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Problems, "value_and_slopes", watched)
    return seen


@pytest.mark.parametrize(
    ("attack", "restarts", "places"),
    [(inverting_gradients(), 1, 2), (idlg(), 1, 2), (grad_inversion(), 2, 4)],
    ids=["adam", "lbfgs", "a group's restarts stay together"],
)
@pytest.mark.usefixtures("double")
def test_results_do_not_depend_on_the_memory_limit(
    attack: GradientMatching, restarts: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wave, known, _ = scene(5, 1)
    together = attack.reconstruct(wave, known, Budget(8, restarts), streams(*range(5)))
    two: list[int] = []

    def measured(work: Callable[[], object], device: torch.device) -> int:
        two.append(peak_bytes(work, device))
        return two[-1]

    monkeypatch.setattr(batch_limiter, "peak_bytes", measured)
    attack.reconstruct(wave, known, Budget(1, restarts), streams(*range(5)))
    held = attack.search.state_per_variable * 5 * restarts * 64 * 8
    monkeypatch.setattr(batch_limiter, "free_bytes", lambda device: int((1.05 * two[0] + held) / batch_limiter.SHARE))
    seen = widths(monkeypatch)
    apart = attack.reconstruct(wave, known, Budget(8, restarts), streams(*range(5)))
    assert max(seen) == places, "the dry pass, and every evaluation"
    for one, other in zip(together, apart, strict=True):
        assert one.x is not None and other.x is not None
        torch.testing.assert_close(one.x, other.x, rtol=0, atol=1e-7)
        assert (one.status, one.iterations) == (other.status, other.iterations)
