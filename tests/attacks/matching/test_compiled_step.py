"""The compiled step agrees with the plain one; without a compiler the attack is declined."""

import pytest
import torch

from fedgauge.attacks.base import Budget, Knowledge, Wave
from fedgauge.attacks.engine.batch_limiter import BatchLimiter
from fedgauge.attacks.engine.gradient_distances import Distance, cosine, squared
from fedgauge.attacks.matching import compiled_step
from fedgauge.attacks.matching.compiled_step import CompiledStep, missing
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import total_variation
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.recipes import inverting_gradients
from fedgauge.client.chain import Chain, chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import mlp
from tests.attacks.matching import tiny_problems
from tests.attacks.matching.tiny_problems import CLASSES, SHAPE, streams

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(missing(CPU) != "", reason=f"torch.compile needs {missing(CPU)}")


def scene(clients: int, links: Chain | None = None) -> tuple[Wave, Knowledge]:
    torch.manual_seed(0)
    return tiny_problems.scene(clients, links=links, model=mlp(SHAPE, CLASSES, (12,), "tanh"))[:2]


CASES: dict[str, tuple[Distance, Chain]] = {
    "factors of a large layer": (cosine(), chain(local_sgd(0.1))),
    "by vmap": (squared(), chain(local_sgd(0.1, 2, batch_size=1))),
}


@needs_compiler
@pytest.mark.full  # the test below stays in `make test`
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile itself uses
@pytest.mark.parametrize(
    ("case", "backend"),
    [("by vmap", "aot_eager"), ("factors of a large layer", "inductor")],  # the first: all but C++ kernels
)
def test_the_compiled_step_is_the_plain_one_for_any_problems(
    case: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgauge.attacks.engine.gradients.factored.FORM_BELOW", 300)
    distance, links = CASES[case]
    wave, known = scene(4, links)
    objective = Objective(distance, (total_variation(0.01),))
    problems = Problems(objective, wave, known, known.labels, 1, torch.float32)
    step = CompiledStep(problems, BatchLimiter(3))
    compilations: list[int] = []
    compile_it = torch.compile

    def counted(*arguments: object, **settings: object) -> object:
        compilations.append(1)
        return compile_it(*arguments, **settings, backend=backend)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "compile", counted)
    rng = torch.Generator().manual_seed(5)
    for rows in ([0, 1, 2], [0, 1, 2], [3, 1, 0], [2, 3], [1]):  # fewer are filled up
        x = torch.randn(len(rows), 2, *SHAPE, generator=rng)
        likelihood_weight = float(torch.rand((), generator=rng))
        value, slopes = step.value_and_slopes({"x": x}, torch.tensor(rows), likelihood_weight)
        expected, theirs = problems.value_and_slopes({"x": x}, torch.tensor(rows), likelihood_weight)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(slopes["x"], theirs["x"], rtol=1e-4, atol=1e-5 * float(theirs["x"].abs().max()))
    assert compilations == [1], "once for all of them"


@pytest.mark.parametrize("case", ["by vmap", pytest.param("factors of a large layer", marks=pytest.mark.full)])
def test_the_recorded_step_has_the_plain_ones_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda recorded, dynamic: recorded)  # a CUDA graph replays the same calls
    monkeypatch.setattr(compiled_step, "missing", lambda device: "")
    distance, links = CASES[case]
    wave, known = scene(2, links)
    problems = Problems(Objective(distance, (total_variation(0.01),)), wave, known, known.labels, 1, torch.float32)
    step, rows = CompiledStep(problems, BatchLimiter(2)), torch.arange(2)
    for seed in range(3):
        x = {"x": torch.randn(2, 2, *SHAPE, generator=torch.Generator().manual_seed(seed))}
        value, slopes = step.value_and_slopes(x, rows)
        expected, theirs = problems.value_and_slopes(x, rows)
        assert torch.equal(value, expected) and torch.equal(slopes["x"], theirs["x"])
    assert problems.way.note == ""


def test_a_step_that_cannot_be_recorded_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(step: object) -> object:
        raise RuntimeError("a value is read")

    monkeypatch.setattr(compiled_step, "make_fx", refused)
    monkeypatch.setattr(compiled_step, "missing", lambda device: "")
    wave, known = scene(1)
    (plain,) = inverting_gradients().reconstruct(wave, known, Budget(3), streams(1))
    (found,) = inverting_gradients(compile=True).reconstruct(wave, known, Budget(3), streams(1))
    assert plain.x is not None and found.x is not None and torch.equal(found.x, plain.x)
    assert (plain.reason, "a value is read" in found.reason) == ("", True)


def test_without_a_compiler_the_attack_is_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_step, "missing", lambda device: "a C++ compiler")
    wave, known = scene(1)
    (found,) = inverting_gradients(compile=True).reconstruct(wave, known, Budget(1), streams(0))
    assert found.status == "not_applicable" and "compile = false" in found.reason
