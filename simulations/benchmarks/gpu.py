"""`python -m fedgauge.simulations.benchmarks.gpu`: cost of attacks on a GPU, compared with the published loop on the same GPU.

It needs only torch and numpy (one measure safetensors, one torchvision), so it runs on any machine with a GPU; see docs/gpu.md.
"""

import argparse
import gc
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedgauge.attacks.base import Budget
from fedgauge.attacks.engine.devices import CPU, Precision, compute_on, described, devices_of, driver
from fedgauge.attacks.learned.learning_to_invert import learning_to_invert
from fedgauge.attacks.modality.image_metrics import PSNR_CAP, psnr
from fedgauge.client.models.libraries import torchvision
from fedgauge.client.models.vision import convnet, lenet
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.simulations.benchmarks.engine import (
    CIFAR_SHAPE,
    PUBLISHED,
    SMOOTH,
    Make,
    problem,
    resnet18,
)
from fedgauge.simulations.benchmarks.reporting import Figure, interleaved, keep

PEAK = 67.0  # TFLOP/s of an H100 and an H200 in float32, without tensor cores
FORWARDS = 8  # by which an iteration's work is counted: forward, backward, and both derived once more
FULL_SCHEDULE = 24_000  # iterations of one image
EPOCHS = 200
GRAPH = "CUDA graph"


@dataclass(frozen=True)
class Sizes:
    """Size of each measure.

    Args:
        lenet, convnet, resnet, psnr: problems, and iterations of each.
        libraries: torchvision's networks by name, each with problems.
        channels: of the first layer of ConvNet and ResNet-18.
        pixels: side of the images of ResNet-18 and torchvision's networks.
        single: iterations on a single image.
        auxiliary, hidden, epochs: examples, units and timed epochs of learning to invert.
    """

    lenet: tuple[int, int] = (1024, 240)
    convnet: tuple[int, int] = (64, 24)
    resnet: tuple[int, int] = (16, 24)
    psnr: tuple[int, int] = (64, 300)
    libraries: tuple[tuple[str, int], ...] = (("vit_b_16", 8), ("resnet50", 16), ("mobilenet_v3_large", 16))
    channels: int = 64
    pixels: int = 224
    single: int = 100
    auxiliary: int = 50_000
    hidden: int = 3000
    epochs: int = 2
    repetitions: int = 3


FULL = Sizes()
QUICK = Sizes(
    lenet=(4, 2), convnet=(2, 1), resnet=(2, 1), psnr=(2, 4), libraries=(("mobilenet_v3_small", 1),), channels=4, pixels=32,
    single=1, repetitions=1, auxiliary=300, hidden=16, epochs=1,
)  # fmt: skip


@dataclass(frozen=True)
class GpuBenchmark:
    """The measures; each yields figures."""

    device: torch.device
    sizes: Sizes = FULL

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds until the device has finished some work."""

        def wait() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        wait()
        started = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - started

    def _medians(self, works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        spent = interleaved(works, self.sizes.repetitions, self.seconds)
        return {name: median(seconds) for name, seconds in spent.items()}

    def lenet(self) -> Iterator[Figure]:
        """Inverting Gradients on many LeNets, and on one."""
        for size, least in ((self.sizes.lenet[0], 800.0), (1, 15.0)):
            yield from self._compared("LeNet at 32 x 32", lenet, size, self.sizes.lenet[1], least=least)

    def convnet(self) -> Iterator[Figure]:
        """Inverting Gradients on the wide ConvNet."""
        make = partial(convnet, width=self.sizes.channels)
        yield from self._compared(
            f"ConvNet {self.sizes.channels} at 32 x 32", make, *self.sizes.convnet, rooflines=True
        )

    def resnet(self) -> Iterator[Figure]:
        """Inverting Gradients on ResNet-18, and the full schedule of one image."""
        pixels, n, make = self.sizes.pixels, self.sizes.single, partial(resnet18, width=self.sizes.channels)
        name = f"ResNet-18 at {pixels} x {pixels}"
        yield from self._compared(name, make, *self.sizes.resnet, pixels=pixels, least=15.0, rooflines=True)
        single = problem(CIFAR_SHAPE, 1, make=make, pixels=pixels, device=self.device)
        single = replace(single, compiled=self.device.type == "cuda")
        single.engine(2)
        ms = 1e3 * self.seconds(lambda: single.engine(n)) / n
        note = f"{ms:.3g} ms an iteration, the mean of {n}" + f"; {GRAPH}" * single.compiled
        title = f"{name}, one image: {FULL_SCHEDULE:,} iterations"
        yield Figure(title, ms / 6e4 * FULL_SCHEDULE, "min", at_most=8.0, note=note)

    def libraries(self) -> Iterator[Figure]:
        """Inverting Gradients on torchvision's networks as they are."""
        pixels, n = self.sizes.pixels, self.sizes.resnet[1]
        for network, size in self.sizes.libraries:
            name = f"{network} at {pixels} x {pixels}"
            try:
                make = partial(torchvision, name=network)
                yield from self._compared(name, make, size, n, pixels=pixels, least=10.0, rooflines=True)
            except ValueError as error:  # torchvision is missing
                yield Figure(name, None, "x", note=f"skipped: {error}")

    def _compared(
        self, name: str, make: Make, size: int, n: int, pixels: int = 32, least: float = 5.0, rooflines: bool = False
    ) -> Iterator[Figure]:
        """The engine's speed against the loop's in n iterations, and its share of the device's peak."""
        posed, name = problem(CIFAR_SHAPE, size, make=make, pixels=pixels, device=self.device), f"{name}, K = {size}"
        works, lacks = {"engine": partial(posed.engine, n), PUBLISHED: partial(posed.published, n)}, ""
        if self.device.type == "cuda":
            graph = replace(posed, compiled=True)
            apart = float((graph.engine(n) - posed.engine(n)).abs().max())
            note = vars(graph.attack.search)["first"].way.note
            yield Figure(f"{name}: {GRAPH} - engine", apart, "largest difference of pixels", at_most=0.0, note=note)
            works[GRAPH] = partial(graph.engine, n)
        try:
            works[PUBLISHED]()
        except RuntimeError as error:
            if "derivative" not in str(error):  # of an operator, which the engine replaces
                raise
            del works[PUBLISHED]
            lacks = str(error)
        spent = self._medians(works)
        loop = 1e3 * spent.pop(PUBLISHED) / n if PUBLISHED in spent else None
        with FlopCounterMode(display=False) as counter:
            posed.forwards(1)
        forward = counter.get_total_flops()
        for work, seconds in spent.items():
            ours = 1e3 * seconds / n / size
            against = f"against {loop:.3g}; {n} iterations" if loop else f"the {PUBLISHED} fails: {lacks}"
            note, ratio = f"{ours:.3g} ms a problem-iteration, {against}", loop / ours if loop else None
            yield Figure(f"{name}: {work} / {PUBLISHED}", ratio, "x", at_least=least, note=note)
            if rooflines:
                note = f"{forward / size / 1e9:.3g} GFLOP a forward pass, {ours * size:.3g} ms an iteration"
                title = f"{name}, {work}: share of the float32 roofline, {FORWARDS} forwards an iteration"
                share = FORWARDS * forward * 1e-10 / PEAK / seconds * n
                yield Figure(title, share, "%", at_least=30.0, note=note)

    def psnr(self) -> Iterator[Figure]:
        """Inverting Gradients with the same seeds on the CPU and on the device."""
        here, there = self._psnr(CPU), self._psnr(self.device)
        middle = median(abs(a - b) for a, b in zip(here, there, strict=True))
        note = (
            f"means {mean(there):.2f} against {mean(here):.2f} dB on the CPU, IEEE; {self._images()}; median difference"
        )
        gap, title = abs(mean(there) - mean(here)), "LeNet: PSNR on the GPU against the CPU"
        yield Figure(title, gap, "dB", at_most=0.3, note=f"{note} of an image {middle:.2g} dB")

    def _images(self) -> str:
        return f"n = {self.sizes.psnr[0]}, {self.sizes.psnr[1]} iterations, {SMOOTH} images"

    def _psnr(self, device: torch.device, precision: Precision = "ieee") -> list[float]:
        compute_on(device, precision)
        posed = problem(SMOOTH, self.sizes.psnr[0], device=device)
        found = psnr(posed.truth[:, 0].cpu(), posed.engine(self.sizes.psnr[1])[:, 0].cpu())
        return [min(v, PSNR_CAP) for v in found.tolist()]

    def tf32(self) -> Iterator[Figure]:
        """Speed and PSNR with TF32 and with IEEE products; speed without deterministic algorithms."""
        size, n = self.sizes.convnet
        name = f"ConvNet {self.sizes.channels} at 32 x 32, K = {size}"
        posed = problem(CIFAR_SHAPE, size, make=partial(convnet, width=self.sizes.channels), device=self.device)

        def run(precision: Precision, deterministic: bool) -> None:
            compute_on(self.device, precision, deterministic)
            posed.engine(n)

        settings: Mapping[str, tuple[Precision, bool]] = {
            "IEEE": ("ieee", True), "TF32": ("tf32", True), "any algorithm": ("ieee", False),
        }  # fmt: skip
        spent = self._medians({name: partial(run, *setting) for name, setting in settings.items()})
        ieee, tf32 = (mean(self._psnr(self.device, p)) for p in ("ieee", "tf32"))
        yield Figure(f"{name}: TF32 / IEEE", spent["IEEE"] / spent["TF32"], "x")
        note = f"means {tf32:.2f} against {ieee:.2f} dB; {self._images()}"
        yield Figure("LeNet: PSNR with TF32 - with IEEE", tf32 - ieee, "dB", note=note)
        ratio = spent["IEEE"] / spent["any algorithm"]
        yield Figure(f"{name}: without / with deterministic algorithms", ratio, "x")

    def learning(self) -> Iterator[Figure]:
        """Learning To Invert on LeNet: the shadow updates, and epochs of training."""
        sizes, count = self.sizes, self.sizes.auxiliary
        title = f"Learning To Invert, LeNet, {count:,} auxiliary images: {EPOCHS} epochs"
        if importlib.util.find_spec("safetensors") is None:  # of the tensor cache
            yield Figure(title, None, "min", at_most=15.0, note="skipped: needs the package safetensors")
            return
        posed, rng = problem(CIFAR_SHAPE, 1, device=self.device), generator("gpu", "auxiliary")
        x, y = torch.rand(count, 3, 32, 32, generator=rng), torch.randint(10, (count,), generator=rng)
        known = replace(posed.known, auxiliary=Batch(x.to(self.device), y.to(self.device)))
        attack = learning_to_invert(hidden=sizes.hidden)
        steps = math.ceil(0.9 * count / attack.batch)
        budgets = [Budget(n) for n in (1, steps, (1 + sizes.epochs) * steps)]
        run = partial(attack.reconstruct, posed.wave, known, streams=[partial(generator, 0, "gpu", 0)])
        begun, one, several = (self.seconds(partial(run, budget=budget)) for budget in budgets)
        each = (several - one) / sizes.epochs
        note = f"{begun:.1f} s until the first step, and {each:.3g} s an epoch of {steps} steps, the mean of {sizes.epochs}"
        yield Figure(title, (begun + EPOCHS * each) / 60, "min", at_most=15.0, note=f"{note}; hidden {sizes.hidden}")


MEASURES: Mapping[str, Callable[[GpuBenchmark], Iterable[Figure]]] = {
    name: getattr(GpuBenchmark, name)
    for name in ("lenet", "convnet", "resnet", "libraries", "psnr", "tf32", "learning")
}


def measure(name: str, benchmark: GpuBenchmark, targets: bool) -> list[Figure]:
    """A measure's figures.

    Args:
        targets: whether figures are held to their targets, which are those of full sizes on a GPU.
    """
    compute_on(benchmark.device)
    found = MEASURES[name](benchmark)
    return [f if targets else replace(f, at_least=None, at_most=None) for f in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m fedgauge.simulations.benchmarks.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MEASURES)}; default: all")
    parser.add_argument("--device", default="cuda:0", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to find errors; nothing is held to a target")
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu.json"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    names = options.names or list(MEASURES)
    if unknown := [n for n in names if n not in MEASURES]:
        parser.error(f"there is no measure {unknown[0]!r}; there are {', '.join(MEASURES)}")
    try:
        device = devices_of([options.device])[0]
    except ValueError as error:
        parser.error(f"{error} (here: --device cpu --quick)")
    benchmark = GpuBenchmark(device, QUICK if options.quick else FULL)
    started, figures = time.monotonic(), list[Figure]()
    settings = dict(
        device=described(device, str(device)), torch=torch.__version__, driver=driver(),
        peak=f"{PEAK:g} TFLOP/s", seed=0, sizes=asdict(benchmark.sizes),
        clock="seconds until the device has finished, medians of interleaved repetitions",
    )  # fmt: skip
    missed = 0
    for name in names:
        found = measure(name, benchmark, targets=device.type == "cuda" and not options.quick)
        print(name, *found, sep="\n", flush=True)
        figures += found
        gc.collect()  # the next measure begins with all memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
        # after each measure, so that a machine that is taken away leaves what it has measured
        missed = keep(options.output, "gpu", started, figures, settings)
    print(f"written to {options.output}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
