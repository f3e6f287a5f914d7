"""`python -m fedgauge.simulations.benchmarks.engine`: its speed on K problems together, and the published loop's one by one."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Stream, Wave
from fedgauge.attacks.engine.batch_limiter import BatchLimiter
from fedgauge.attacks.engine.devices import CPU
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.recipes import inverting_gradients
from fedgauge.attacks.matching.search import AdamSearch, Step
from fedgauge.client.chain import chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import convnet, detached_params, lenet, mlp, resnet, resnet20
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.simulations.benchmarks.published import invert
from fedgauge.simulations.benchmarks.reporting import RESULTS, Figure, interleaved, keep
from fedgauge.simulations.run.environment import one_thread

RATE = 0.1  # of the client's local steps
TV = 0.1
PUBLISHED = "published loop"
CIFAR_SHAPE, SMOOTH = "random 3x32x32", "smooth random"
REPETITIONS = 5
SETTINGS: Mapping[str, object] = dict(
    attack=f"inverting_gradients(tv={TV})", networks="untrained, BatchNorm in eval mode", threads=1, seed=0,
    repetitions=REPETITIONS, clock="CPU seconds, medians of interleaved repetitions",
)  # fmt: skip
COARSE = 6  # pixels of a smooth image before it is enlarged
Make = Callable[[tuple[int, int, int], int], nn.Module]


@dataclass(frozen=True)
class SpeedCase:
    """One comparison: a network, K (`size`), and the local steps that the attack unrolls."""

    name: str
    make: Make
    size: int
    target: float | None = None
    steps: int = 1
    iterations: int = 48  # enough that one-off work (the start, the dry pass) weighs as little as in use
    compiled: bool = False


CELLS: tuple[SpeedCase, ...] = (
    SpeedCase("lenet", lenet, 1, 1.5, iterations=240),
    SpeedCase("lenet", lenet, 4, 4.0, iterations=96),
    SpeedCase("lenet", lenet, 16, 8.0),
    SpeedCase("lenet", lenet, 64, 8.0, iterations=24),
    SpeedCase("lenet", lenet, 1, None, iterations=240, compiled=True),
    SpeedCase("lenet", lenet, 4, None, iterations=96, compiled=True),
    SpeedCase("lenet", lenet, 16, 12.0, compiled=True),
    SpeedCase("lenet, 5 local steps", lenet, 32, 6.0, steps=5, iterations=12),
    SpeedCase("mlp of 5.1 M", partial(mlp, hidden=(1250, 1000)), 8, 14.0, iterations=24),
    SpeedCase("convnet of width 64", convnet, 4, 1.15, iterations=6),
    SpeedCase("resnet20-4", partial(resnet20, width=4), 1, 1.0, iterations=6),
    SpeedCase("resnet20-4", partial(resnet20, width=4), 4, 1.15, iterations=6),
)


class CompiledOnce(AdamSearch):
    """Keeps the step recorded for its first wave for later runs on the same wave, so that no iteration includes recording."""

    def _step(self, problems: Problems, limiter: BatchLimiter) -> Step:
        if "first" not in vars(self):
            vars(self).update(first=problems, kept=super()._step(problems, limiter))
        kept: Step = vars(self)["kept"]
        return kept


def untrained(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a network in eval mode with the initial weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def observed(known: Knowledge, examples: Batch) -> Wave:
    """Return the updates of clients that hold one example each."""
    params = detached_params(known.model)
    updates = [known.forward(params, Batch(x[None], y[None]), None) for x, y in zip(*examples, strict=True)]
    stacked = {name: torch.stack([update[name].detach() for update in updates]) for name in params}
    return Wave(1, tuple(range(len(updates))), params, stacked)


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
        recipe = inverting_gradients(TV, compile=self.compiled)
        return replace(recipe, search=CompiledOnce(**vars(recipe.search))) if self.compiled else recipe

    def engine(self, iterations: int) -> Tensor:
        """The engine's images (K, 1, C, H, W) in [0, 1]."""
        found = self.attack.reconstruct(self.wave, self.known, Budget(iterations), self.streams)
        return torch.stack([r.x for r in found if r.x is not None])

    def published(self, iterations: int) -> Tensor:
        """The published loop's image (1, C, H, W) in [0, 1] of the first observation, from the engine's start."""
        known, y = self.known, self.known.labels
        assert y is not None
        seen = [-t / RATE for t in self.wave.alone(0).values()]
        start = torch.randn(1, *known.shape, generator=self.streams[0]("start", 0)).to(seen[0])
        box = known.mean, known.std
        return known.pixels(invert(self.model, seen, y[0], start, *box, iterations, TV, steps=self.steps, local=RATE))

    def forwards(self, repetitions: int) -> None:
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
    """Return `size` problems with images of `pixels` x `pixels` from a source; both sides know the labels."""
    coarse = COARSE if source == SMOOTH else pixels
    x = torch.rand(size, 3, coarse, coarse, generator=generator(seed, "benchmark images"))
    x = F.interpolate(x, pixels, mode="bicubic").clamp(0, 1) if source == SMOOTH else x
    y, centre, spread = torch.arange(size) % 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    shape = (3, pixels, pixels)
    model = untrained(partial(make, shape, 10), seed).to(device, torch.get_default_dtype())
    x, y = x.to(device, torch.get_default_dtype()), y.to(device)
    known = Knowledge(model, chain(local_sgd(RATE, steps)), shape, 10, 1, centre, spread, labels=y[:, None])
    streams: list[Stream] = [partial(generator, seed, "benchmark", k) for k in range(size)]
    return ImageProblem(model, observed(known, Batch(x, y)), known, streams, x[:, None], steps)


def engine(cells: Sequence[SpeedCase] = CELLS, repetitions: int = REPETITIONS) -> Iterator[Figure]:
    """Milliseconds per iteration and problem, by the engine and by the published loop, for each case."""
    with one_thread():
        for cell in cells:
            yield from _compare(cell, repetitions)


def _compare(cell: SpeedCase, repetitions: int) -> Iterator[Figure]:
    name, n = f"{cell.name}, {CIFAR_SHAPE}, K = {cell.size}" + (", compiled" if cell.compiled else ""), cell.iterations
    posed = replace(problem(CIFAR_SHAPE, cell.size, make=cell.make, steps=cell.steps), compiled=cell.compiled)
    started = time.monotonic()
    posed.engine(2)  # the second step is the one that is compiled
    if cell.compiled and (lacks := vars(posed.attack.search)["first"].way.note):
        yield Figure(f"{name}: engine / {PUBLISHED}", None, "x", note=f"skipped: {lacks}")
        return
    start = f"; compiled in {time.monotonic() - started:.0f} s" if cell.compiled else ""
    works: dict[str, Callable[[], object]] = {
        "engine": partial(posed.engine, n),
        PUBLISHED: partial(posed.published, n),
        "forward": partial(posed.forwards, n),
    }
    counts = {"engine": cell.size * n, PUBLISHED: n, "forward": cell.size * n}
    seconds = interleaved(works, repetitions)
    ms = {name: 1e3 * median(spent) / counts[name] for name, spent in seconds.items()}
    ratios = [cell.size * loop / ours for ours, loop in zip(seconds["engine"], seconds[PUBLISHED], strict=True)]
    note = f"{ms['engine']:.3g} ms against {ms[PUBLISHED]:.3g}; {min(ratios):.3g} to {max(ratios):.3g} x{start}"
    yield Figure(f"{name}: engine / {PUBLISHED}", ms[PUBLISHED] / ms["engine"], "x", at_least=cell.target, note=note)
    most = 8.5 if cell.target == 1.15 else None
    yield Figure(f"{name}: cost", ms["engine"] / ms["forward"], "forwards", at_most=most)


def resnet18(shape: tuple[int, int, int], classes: int, width: int = 64) -> nn.Module:
    """ResNet-18 for large images (He et al., 2016), as torchvision has it."""
    model: Any = resnet(shape, classes, width=width)
    model.conv1 = nn.Conv2d(shape[0], width, 7, stride=2, padding=3, bias=False)
    # the network's own ReLU then changes nothing
    model.bn1 = nn.Sequential(model.bn1, nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    built: nn.Module = model
    return built


if __name__ == "__main__":
    started, figures = time.monotonic(), []
    for figure in engine():
        print(figure, flush=True)
        figures.append(figure)
    sys.exit(keep(RESULTS / "engine.json", "engine", started, figures, SETTINGS))
