"""How much faster the engine advances K problems together than the published loop advances them one by one."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedgauge.attacks.base import Budget, Knowledge, Stream, Wave
from fedgauge.attacks.engine.batch_limiter import BatchLimiter
from fedgauge.attacks.engine.devices import CPU
from fedgauge.attacks.engine.scheduler import Variables
from fedgauge.attacks.matching.compiled_step import missing
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.recipes import inverting_gradients
from fedgauge.attacks.matching.search import AdamSearch, Step
from fedgauge.attacks.modality.image_metrics import PSNR_CAP, psnr
from fedgauge.client.chain import chain
from fedgauge.client.data.images import mnist5k
from fedgauge.client.models.vision import convnet, lenet, mlp, resnet, resnet20
from fedgauge.client.rng import generator
from fedgauge.client.training import local_sgd
from fedgauge.client.update import Batch
from fedgauge.simulations.benchmarks.published import invert
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, interleaved, one_thread
from fedgauge.simulations.benchmarks.updates import observed, singles, untrained

RATE = 0.1  # of the client's local steps
TV = 0.1
PUBLISHED, LEAN = "published loop", "published loop without parameter gradients"
CIFAR_SHAPE, DIGITS, SMOOTH = "random 3x32x32", "mnist5k 1x28x28", "smooth random"
COARSE = 6  # pixels of a smooth image before it is enlarged
Make = Callable[[tuple[int, int, int], int], nn.Module]


@dataclass(frozen=True)
class SpeedCase:
    """One comparison: a network, a source of images, K (`size`), and the local steps that the attack unrolls."""

    name: str
    make: Make
    size: int
    target: float | None = None
    source: str = CIFAR_SHAPE
    steps: int = 1
    iterations: int = 48  # enough that one-off work (the start, the dry pass) weighs as little as in use
    compiled: bool = False


CELLS: tuple[SpeedCase, ...] = (
    SpeedCase("lenet", lenet, 1, 1.3, iterations=240),
    SpeedCase("lenet", lenet, 8, iterations=96),
    SpeedCase("lenet", lenet, 64, 8.0),
    SpeedCase("lenet", lenet, 1, None, iterations=240, compiled=True),
    SpeedCase("lenet", lenet, 8, None, iterations=96, compiled=True),
    SpeedCase("lenet", lenet, 64, 12.0, compiled=True),
    SpeedCase("lenet", lenet, 1, None, DIGITS, iterations=240),
    SpeedCase("lenet", lenet, 64, 8.0, DIGITS),
    SpeedCase("lenet, 5 local steps", lenet, 32, 6.0, steps=5, iterations=24),
    SpeedCase("mlp of 5.1 M", partial(mlp, hidden=(1250, 1000)), 1, None, iterations=24),
    SpeedCase("mlp of 5.1 M", partial(mlp, hidden=(1250, 1000)), 8, 14.0, iterations=24),
    SpeedCase("convnet of width 64", convnet, 1, None, iterations=12),
    SpeedCase("convnet of width 64", convnet, 4, 1.15, iterations=12),
    SpeedCase("resnet20-4", partial(resnet20, width=4), 1, None, iterations=12),
    SpeedCase("resnet20-4", partial(resnet20, width=4), 4, 1.15, iterations=12),
)


class CompiledOnce(AdamSearch):
    """Keeps the step compiled for its first wave for later runs on the same wave, so that no iteration includes compiling."""

    def _step(self, problems: Problems, limiter: BatchLimiter) -> Step:
        if "_kept" not in vars(self):
            object.__setattr__(self, "_kept", super()._step(problems, limiter))
        kept: Step = vars(self)["_kept"]
        return kept


@dataclass(frozen=True, eq=False)
class ImageProblem:
    """K observations of an untrained network, one image each, with what an attack needs, and the true images."""

    model: nn.Module
    wave: Wave
    known: Knowledge
    streams: list[Stream]
    truth: Tensor  # (K, 1, C, H, W)
    steps: int
    compiled: bool = False

    @cached_property
    def attack(self) -> GradientMatching:
        """The timed attack."""
        recipe = inverting_gradients(TV, compile=self.compiled)
        return replace(recipe, search=CompiledOnce(**vars(recipe.search))) if self.compiled else recipe

    def engine(self, iterations: int) -> Tensor:
        """The engine's images (K, 1, C, H, W) in [0, 1]."""
        found = self.attack.reconstruct(self.wave, self.known, Budget(iterations), self.streams)
        if refused := [r.reason for r in found if r.x is None]:
            raise RuntimeError(f"the attack gave no image: {refused[0]}")
        return torch.stack([r.x for r in found if r.x is not None])

    def published(self, iterations: int, lean: bool = False) -> Tensor:
        """The published loop's image (1, C, H, W) in [0, 1] of the first observation, from the engine's start."""
        known, y = self.known, self.known.labels
        assert y is not None
        seen = [-t / RATE for t in self.wave.alone(0).values()]
        start = torch.randn(1, *known.shape, generator=self.streams[0]("start", 0)).to(seen[0])
        z = invert(
            self.model,
            seen,
            y[0],
            start,
            known.mean,
            known.std,
            iterations,
            TV,
            lean=lean,
            steps=self.steps,
            local=RATE,
        )
        return known.pixels(z)

    def forwards(self, repetitions: int) -> None:
        """The network's plain forward passes over the K images."""
        with torch.no_grad():
            for _ in range(repetitions):
                self.model(self.known.normalise(self.truth.flatten(0, 1)))


def problem(
    source: str,
    size: int,
    seed: int = 0,
    make: Make = lenet,
    steps: int = 1,
    pixels: int = 32,
    device: torch.device = CPU,
) -> ImageProblem:
    """The first `size` problems of a source of images; both sides get the labels.

    Args:
        pixels: side of an image, unless they are digits.
    """
    if source == DIGITS:
        dataset = mnist5k()
        x, y, centre, spread = dataset.x[:size] / 255, dataset.y[:size], dataset.mean, dataset.std
    else:  # a speed does not depend on what the images show
        coarse = COARSE if source == SMOOTH else pixels
        x = torch.rand(size, 3, coarse, coarse, generator=generator(seed, "benchmark images"))
        x = F.interpolate(x, pixels, mode="bicubic").clamp(0, 1) if source == SMOOTH else x
        y, centre, spread = torch.arange(size) % 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    shape = (x.shape[1], x.shape[2], x.shape[3])
    model = untrained(partial(make, shape, 10), seed).to(device, torch.get_default_dtype())
    x, y = x.to(device, torch.get_default_dtype()), y.to(device)
    known = Knowledge(model, chain(local_sgd(RATE, steps)), shape, 10, 1, centre, spread, labels=y[:, None])
    streams: list[Stream] = [partial(generator, seed, "benchmark", k) for k in range(size)]
    return ImageProblem(model, observed(known, singles(Batch(x, y))), known, streams, x[:, None], steps)


def engine(progress: Progress, cells: Sequence[SpeedCase] = CELLS, repetitions: int = 3) -> BenchmarkReport:
    """Milliseconds per iteration and problem, by the engine and by the published loop, for each case."""
    rows: list[dict[str, object]] = []
    figures: list[Figure] = []
    with one_thread():
        for done, cell in enumerate(cells):
            lacks = missing(torch.device("cpu")) if cell.compiled else ""
            if lacks:
                figures.append(
                    Figure(f"{_named(cell)}: engine / {PUBLISHED}", None, "x", note=f"skipped: needs {lacks}")
                )
            else:
                row, found = _compare(cell, repetitions)
                rows.append(row)
                figures += found
            progress(done + 1, len(cells))
    settings = dict(
        attack=f"inverting_gradients(tv={TV})", networks="untrained, BatchNorm in eval mode", threads=1, seed=0,
        repetitions=repetitions, clock="CPU seconds, medians of interleaved repetitions",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings, tuple(rows))


def _compare(cell: SpeedCase, repetitions: int) -> tuple[dict[str, object], list[Figure]]:
    posed = replace(problem(cell.source, cell.size, make=cell.make, steps=cell.steps), compiled=cell.compiled)
    n, started = cell.iterations, time.monotonic()
    posed.engine(2)  # the second step is the one that is compiled
    first = time.monotonic() - started
    works: dict[str, Callable[[], object]] = {
        "engine": partial(posed.engine, n),
        PUBLISHED: partial(posed.published, n),
        LEAN: partial(posed.published, n, True),
        "forward": partial(posed.forwards, n),
    }
    seconds = interleaved(works, repetitions, lambda done, total: None)
    counts = {"engine": cell.size * n, PUBLISHED: n, LEAN: n, "forward": cell.size * n}
    ms = {name: 1e3 * median(spent) / counts[name] for name, spent in seconds.items()}
    quality = psnr(posed.truth[:, 0], posed.engine(n)[:, 0])
    row = dict(
        recipe="inverting_gradients", network=f"{cell.name}, {cell.source}", k=cell.size, compiled=cell.compiled,
        ratio=ms[PUBLISHED] / ms["engine"], ms=ms["engine"], psnr=mean(min(v, PSNR_CAP) for v in quality.tolist()),
        published_ms=ms[PUBLISHED], lean_ratio=ms[LEAN] / ms["engine"], forwards=ms["engine"] / ms["forward"],
        iterations=n,
    )  # fmt: skip
    name = _named(cell)
    note = f"{ms['engine']:.3g} ms against {ms[PUBLISHED]:.3g}; {row['lean_ratio']:.2f} x the {LEAN}"
    if cell.compiled:
        note += f"; compiled in {first:.0f} s"
    wide = cell.target == 1.15
    return row, [
        Figure(f"{name}: engine / {PUBLISHED}", ms[PUBLISHED] / ms["engine"], "x", at_least=cell.target, note=note),
        Figure(f"{name}: cost", ms["engine"] / ms["forward"], "forwards", at_most=8.5 if wide else None),
    ]


def _named(cell: SpeedCase) -> str:
    return f"{cell.name}, {cell.source}, K = {cell.size}" + (", compiled" if cell.compiled else "")


# ------------------------------------------------------------------------------------- one step, for the measures of a GPU


def resnet18(shape: tuple[int, int, int], classes: int, width: int = 64) -> nn.Module:
    """ResNet-18 for large images (He et al., 2016), as torchvision has it."""
    model: Any = resnet(shape, classes, width=width)
    model.conv1 = nn.Conv2d(shape[0], width, 7, stride=2, padding=3, bias=False)
    model.bn1 = nn.Sequential(
        model.bn1, nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )  # the network's own ReLU then changes nothing
    built: nn.Module = model
    return built


def step_of(posed: ImageProblem) -> tuple[Problems, Variables, Tensor]:
    """All problems with a first guess at each, as the attack's own step takes them."""
    problems = Problems(
        posed.attack.objective, posed.wave, posed.known, posed.known.labels, 1, torch.get_default_dtype()
    )
    x = torch.randn(posed.truth.shape, generator=generator("gpu", "guess")).to(posed.truth)
    return problems, {"x": x}, torch.arange(len(posed.wave))


def way(posed: ImageProblem) -> str:
    """How the attack differentiates the network."""
    problems, variables, rows = step_of(posed)
    problems.value_and_slopes({"x": variables["x"][:2]}, rows[:2])
    return problems.way.route


def flops(work: Callable[[], object]) -> int:
    """Floating-point operations of matrix products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def replayed(step: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    """A step captured as a CUDA graph for one x."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what is allocated or chosen once must not be captured
        for _ in range(3):
            step(x)
    torch.cuda.current_stream().wait_stream(aside)
    graph, held = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        found = step(held)

    def replay(x: Tensor) -> Tensor:
        held.copy_(x)
        graph.replay()
        return found

    return replay


def peak_memory(device: torch.device) -> float | None:
    """Gigabytes held at most since the last call, all of which is given back; None on the CPU."""
    gc.collect()
    if device.type != "cuda":
        return None
    most = torch.cuda.max_memory_allocated(device) / 1e9
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return round(most, 2)
