"""The compiled step agrees with the plain one; what cannot be compiled runs plain, and says why."""

import gc
import shutil

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fedgauge.attacks.base import Budget, Knowledge, Wave
from fedgauge.attacks.engine.batch_limiter import BatchLimiter
from fedgauge.attacks.engine.gradient_distances import Distance, cosine, squared
from fedgauge.attacks.matching import compiled_step
from fedgauge.attacks.matching.compiled_step import CompiledStep
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.priors import total_variation
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.recipes import inverting_gradients
from fedgauge.client.chain import Chain, chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import mlp
from tests.attacks.matching import tiny_problems
from tests.attacks.matching.tiny_problems import CLASSES, SHAPE, streams

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, such as g++"
)


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_a_replayed_graph_has_the_bits_of_its_calls() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x * torch.tensor([3.0], device=x.device) + y, (x @ y.T).sin()]

    draw = torch.Generator("cuda").manual_seed(1)
    pairs = [torch.randn(2, 4, 5, device="cuda", generator=draw).unbind() for _ in range(3)]
    graph = compiled_step.replayed(make_fx(step)(*pairs[0]), pairs[0])
    for x, y in pairs:
        gc.collect()  # the recorded constant stays
        torch.full((1000,), 7.0, device="cuda")
        assert all(map(torch.equal, graph(x, y), step(x, y)))


@pytest.mark.parametrize("place", ["fedgauge.attacks.matching.compiled_step.make_fx", "torch.compile"])
def test_a_step_that_cannot_be_compiled_runs_plain(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> object:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(place, refused)
    wave, known = scene(1)
    (plain,) = inverting_gradients().reconstruct(wave, known, Budget(3), streams(1))
    (found,) = inverting_gradients(compile=True).reconstruct(wave, known, Budget(3), streams(1))
    assert plain.x is not None and found.x is not None and torch.equal(found.x, plain.x)
    assert (plain.reason, "no C++ compiler" in found.reason) == ("", True)
