"""`python -m fedgauge.simulations.benchmarks.gpu`: what attacks cost on a GPU, beside the published loop on the same GPU.

It needs torch and numpy alone (transformers for one measure), so that any machine with a GPU can run it: docs/gpu.md says how,
also where fedgauge is not installed. It is sized for ten minutes on an H100.
"""

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedgauge.attacks.base import Budget, Reconstruction
from fedgauge.attacks.engine.devices import CPU, Precision, compute_on, devices_of, numerics
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.attacks.learned.learning_to_invert import learning_to_invert, matched_error
from fedgauge.attacks.learned.shadow_updates import ShadowDataset, ShadowTrainer, UpdateFeatures, flat
from fedgauge.attacks.learned.trainer import Trainer, batches, perceptron, steps_per_epoch
from fedgauge.attacks.matching.compiled_step import missing
from fedgauge.attacks.modality.image_metrics import PSNR_CAP, psnr
from fedgauge.attacks.text.lamp import lamp
from fedgauge.client.models.vision import convnet, lenet
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.simulations.benchmarks.engine import (
    CIFAR_SHAPE,
    PUBLISHED,
    SMOOTH,
    ImageProblem,
    Make,
    flops,
    peak_memory,
    problem,
    replayed,
    resnet18,
    step_of,
    way,
)
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, cells, interleaved, record, sentence
from fedgauge.simulations.benchmarks.text_matching_cost import random_sentences

ENGINE = "engine"
PEAK = 67.0  # TFLOP/s of an H100 and an H200 in float32, without tensor cores
FORWARDS = 8  # by which an iteration's work is counted: forward, backward, and both derived once more
WAVE = 10.0  # seconds of the wave with which transfers are compared
FULL_SCHEDULE = 24_000  # iterations of one image
EPOCHS, TEXT_STEPS = 200, 2000


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    Args:
        lenet, convnet, resnet, psnr: problems, and iterations of each.
        channels: of the first layer of ConvNet and ResNet-18.
        pixels: side of ResNet-18's images; alone: iterations of one of them.
        auxiliary, hidden, epochs: examples, units and timed epochs of learning to invert.
        layers, width, heads, vocabulary: of BERT; sentences, length, draws, steps: of LAMP, of which steps are timed.
        compiled: whether steps are compiled, too, which takes long.
    """

    lenet: tuple[int, int] = (1024, 240)
    convnet: tuple[int, int] = (64, 24)
    resnet: tuple[int, int] = (16, 24)
    psnr: tuple[int, int] = (64, 300)
    channels: int = 64
    pixels: int = 224
    alone: int = 100
    auxiliary: int = 50_000
    hidden: int = 3000
    epochs: int = 2
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 30_522
    sentences: int = 16
    length: int = 32
    draws: int = 500
    steps: int = 20
    repetitions: int = 3
    compiled: bool = True


FULL = Sizes()
QUICK = Sizes(
    lenet=(4, 2), convnet=(2, 1), resnet=(2, 1), psnr=(2, 4), channels=4, pixels=32, alone=1, repetitions=1, compiled=False,
    auxiliary=300, hidden=16, epochs=1, layers=1, width=32, heads=2, vocabulary=100, sentences=2, length=8, draws=2, steps=2,
)  # fmt: skip


@dataclass(frozen=True)
class GpuBenchmark:
    """The measures, each of which gives figures.

    Args:
        peak: TFLOP/s of the device in float32.
    """

    device: torch.device
    sizes: Sizes = FULL
    peak: float = PEAK

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds until the device has finished some work."""
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    @property
    def wide(self) -> tuple[str, Make]:
        """The ConvNet of Inverting Gradients, with its name."""
        return f"ConvNet {self.sizes.channels} at 32 x 32", partial(convnet, width=self.sizes.channels)

    @property
    def deep(self) -> tuple[str, Make]:
        """ResNet-18, with its name."""
        name = f"ResNet-18 at {self.sizes.pixels} x {self.sizes.pixels}"
        return name, partial(resnet18, width=self.sizes.channels)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _medians(self, works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        spent = interleaved(works, self.sizes.repetitions, lambda done, total: None, self.seconds)
        return {name: median(seconds) for name, seconds in spent.items()}

    # ------------------------------------------------------------------------------------------------------- matching

    def lenet(self) -> list[Figure]:
        """Inverting Gradients on many LeNets."""
        return self._compared("LeNet at 32 x 32", lenet, *self.sizes.lenet, least=100.0)[1]

    def convnet(self) -> list[Figure]:
        """Inverting Gradients on the wide ConvNet."""
        posed, found, seconds = self._compared(*self.wide, *self.sizes.convnet, least=5.0)
        return [*found, *self._rooflines(self.wide[0], posed, seconds)]

    def resnet(self) -> list[Figure]:
        """Inverting Gradients on ResNet-18, and the full schedule of one image."""
        (name, make), pixels, n = self.deep, self.sizes.pixels, self.sizes.alone
        posed, found, seconds = self._compared(name, make, *self.sizes.resnet, least=5.0, pixels=pixels)
        found += self._rooflines(name, posed, seconds)
        single = problem(CIFAR_SHAPE, 1, make=make, pixels=pixels, device=self.device)
        single.engine(2)
        ms = 1e3 * self.seconds(lambda: single.engine(n)) / n
        note = f"{ms:.3g} ms an iteration, the mean of {n}"
        minutes = ms / 6e4 * FULL_SCHEDULE
        return [
            *found,
            Figure(f"{name}, one image: {FULL_SCHEDULE:,} iterations", minutes, "min", at_most=10.0, note=note),
        ]

    def _compared(
        self, name: str, make: Make, size: int, iterations: int, least: float, pixels: int = 32
    ) -> tuple[ImageProblem, list[Figure], float]:
        """The problems, the engine's speed against the loop's, and the seconds of one of its iterations."""
        posed = problem(CIFAR_SHAPE, size, make=make, pixels=pixels, device=self.device)
        spent = self._medians(
            {ENGINE: partial(posed.engine, iterations), PUBLISHED: partial(posed.published, iterations)}
        )
        ours, loop = (1e3 * spent[k] / iterations / n for k, n in ((ENGINE, size), (PUBLISHED, 1)))
        note = f"{ours:.3g} ms a problem-iteration against {loop:.3g}; {iterations} iterations, differentiated by {way(posed)}"
        title = f"{name}, K = {size}: {ENGINE} / {PUBLISHED}"
        return posed, [Figure(title, loop / ours, "x", at_least=least, note=note)], spent[ENGINE] / iterations

    def _rooflines(self, name: str, posed: ImageProblem, seconds: float) -> list[Figure]:
        forward = flops(lambda: posed.forwards(1))
        problems, variables, rows = step_of(posed)
        problems.value_and_slopes(variables, rows)  # the first one checks the model
        counted = flops(lambda: problems.value_and_slopes(variables, rows))
        title, rate = f"{name}, K = {len(rows)}: share of the float32 roofline", 1e12 * self.peak * seconds
        gigas = f"{forward / len(rows) / 1e9:.3g} GFLOP a forward pass, {1e3 * seconds:.3g} ms an iteration"
        return [
            Figure(
                f"{title}, {FORWARDS} forwards an iteration", 100 * FORWARDS * forward / rate, "%", 30.0, note=gigas
            ),
            Figure(
                f"{title}, as counted", 100 * counted / rate, "%", note=f"{counted / forward:.3g} forwards an iteration"
            ),
        ]

    def steps(self) -> list[Figure]:
        """A step of gradient matching on LeNet in each form in which it can run."""
        sizes = (1, self.sizes.lenet[0])
        return [f for size in sizes for f in self._forms("LeNet at 32 x 32", lenet, size, 32)]

    def deep_steps(self) -> list[Figure]:
        """The same on ResNet-18, whose compilation takes minutes."""
        return list(self._forms(*self.deep, 1, self.sizes.pixels))

    def _forms(self, network: str, make_network: Make, size: int, pixels: int) -> Iterator[Figure]:
        posed = problem(CIFAR_SHAPE, size, make=make_network, pixels=pixels, device=self.device)
        problems, variables, rows = step_of(posed)
        problems.value_and_slopes(variables, rows)
        observed, labels = problems.chosen(rows)

        def eager(x: Tensor) -> Tensor:
            return problems.differentiated({"x": x}, observed, labels, 1.0, None)[1]["x"]

        x, made, base = variables["x"], dict[str, Callable[[Tensor], Tensor]](), 0.0
        makers: Mapping[str, Callable[[], Callable[[Tensor], Tensor]]] = {
            "eager": lambda: eager,
            "recorded": lambda: make_fx(eager)(x),
            "recorded, CUDA graph": lambda: replayed(made["recorded"], x),
            "compiled": lambda: torch.compile(made["recorded"], dynamic=False),
            "compiled, CUDA graph": lambda: replayed(made["compiled"], x),
        }
        expected = eager(x)
        for form, make in makers.items():
            name = f"{network}, K = {size}: a step, {form}"
            if reason := self._lacking(form):
                yield Figure(name, None, "ms", note=f"skipped: {reason}")
                continue
            try:
                started = time.perf_counter()
                with torch.no_grad():
                    made[form] = step = make()
                    gap = float((step(x) - expected).norm() / expected.norm())
                    ready = time.perf_counter() - started
                    ms = 1e3 * median(self.seconds(partial(step, x)) for _ in range(3 * self.sizes.steps))
            except Exception as error:  # which forms work here is what is measured
                yield Figure(name, None, "ms", note=f"does not run: {sentence(error)}")
                continue
            base = base or ms
            note = f"{base / ms:.3g} times as fast as eager; relative gap {gap:.1e}; ready after {ready:.1f} s"
            yield Figure(name, ms, "ms", note=note)

    def _lacking(self, form: str) -> str:
        if "CUDA graph" in form and self.device.type != "cuda":
            return "needs a GPU"
        if "compiled" in form:
            return missing(self.device) and f"needs {missing(self.device)}" if self.sizes.compiled else "--quick"
        return ""

    # ------------------------------------------------------------------------------------------------------- numerics

    def psnr(self) -> list[Figure]:
        """Inverting Gradients with the same seeds on the CPU and on the device."""
        here, there = self._psnr(CPU), self._psnr(self.device)
        size, iterations = self.sizes.psnr
        middle = median(abs(a - b) for a, b in zip(here, there, strict=True))
        note = (
            f"means {mean(there):.2f} against {mean(here):.2f} dB on the CPU; n = {size}, {iterations} iterations, {SMOOTH} "
            f"images, IEEE; median difference of an image {middle:.2g} dB"
        )
        return [
            Figure(
                "LeNet: PSNR on the GPU against the CPU", abs(mean(there) - mean(here)), "dB", at_most=0.3, note=note
            )
        ]

    def _psnr(self, device: torch.device, precision: Precision = "ieee") -> list[float]:
        compute_on(device, precision)
        posed = problem(SMOOTH, self.sizes.psnr[0], device=device)
        found = psnr(posed.truth[:, 0].cpu(), posed.engine(self.sizes.psnr[1])[:, 0].cpu())
        return [min(v, PSNR_CAP) for v in found.tolist()]

    def tf32(self) -> list[Figure]:
        """What TF32 gains and costs, and what deterministic algorithms cost."""
        (network, make), size = self.wide, self.sizes.convnet[0]
        posed = problem(CIFAR_SHAPE, size, make=make, device=self.device)

        def run(precision: Precision, deterministic: bool) -> None:
            compute_on(self.device, precision, deterministic)
            posed.engine(self.sizes.convnet[1])

        settings: Mapping[str, tuple[Precision, bool]] = {
            "IEEE": ("ieee", True), "TF32": ("tf32", True), "any algorithm": ("ieee", False),
        }  # fmt: skip
        spent = self._medians({name: partial(run, *setting) for name, setting in settings.items()})
        ieee, tf32 = (mean(self._psnr(self.device, p)) for p in ("ieee", "tf32"))
        rounded = f"means {tf32:.2f} against {ieee:.2f} dB; n = {self.sizes.psnr[0]}, {self.sizes.psnr[1]} iterations"
        return [
            Figure(f"{network}, K = {size}: TF32 / IEEE", spent["IEEE"] / spent["TF32"], "x"),
            Figure("LeNet: PSNR with TF32 - with IEEE", tf32 - ieee, "dB", note=rounded),
            Figure(
                f"{network}, K = {size}: without / with deterministic algorithms",
                spent["IEEE"] / spent["any algorithm"],
                "x",
            ),
        ]

    # ---------------------------------------------------------------------------------------------- learned, text, moves

    def learning(self) -> list[Figure]:
        """Learning To Invert on LeNet: the shadow updates, and epochs of training."""
        sizes, posed = self.sizes, problem(CIFAR_SHAPE, 1, device=self.device)
        rng, count = generator("gpu", "auxiliary"), sizes.auxiliary
        x, y = torch.rand(count, 3, 32, 32, generator=rng), torch.randint(10, (count,), generator=rng)
        known = replace(posed.known, labels=None, auxiliary=Batch(x.to(self.device), y.to(self.device)))
        attack = learning_to_invert(hidden=sizes.hidden)
        shadow = ShadowTrainer(known, posed.wave.params, UpdateFeatures(False, attack.buckets, attack.signed))
        rows = torch.empty(count, shadow.entries, device=self.device)

        def simulate() -> None:
            done = 0
            images, labels = (t[:, None] for t in shadow.auxiliary)
            for updates in Simulator(known, shadow.params).updates(images, labels, rng):
                made = flat(updates)
                rows[done : done + len(made)] = made
                done += len(made)

        simulated, held = self.seconds(simulate), count // 10
        groups = torch.arange(count)[:, None]
        train = ShadowDataset(rows[held:], groups[held:], shadow.auxiliary.y[held:, None])
        widths = [rows.shape[1], *[attack.hidden] * (attack.layers - 1), x[0].numel()]
        network = perceptron(widths, torch.nn.Sigmoid()).to(self.device)

        def loss(rows: Tensor, truth: Tensor) -> Tensor:
            return matched_error(network(rows), truth)

        trainer = Trainer(network, attack.rate, attack.patience, 10**9, loss)
        steps = steps_per_epoch(train, attack.batch)
        drawn = batches(shadow, train, 0.0, attack.batch, "gpu")

        def epoch() -> None:
            for _ in range(steps):
                some, groups = next(drawn)
                trainer.train_step(some, shadow.auxiliary.x[groups].flatten(2))
            truth = shadow.auxiliary.x[:held, None].flatten(2)
            with torch.no_grad():
                trainer.record_error(float(loss(rows[:held], truth)))

        each = [self.seconds(epoch) for _ in range(1 + sizes.epochs)][1:]
        minutes = (simulated + EPOCHS * median(each)) / 60
        note = (
            f"{simulated:.1f} s of simulated updates, and {median(each):.3g} s an epoch of {steps} steps, the median of "
            f"{sizes.epochs}; hidden {sizes.hidden}; writing the cache is left out"
        )
        title = f"Learning To Invert, LeNet, {count:,} auxiliary images: {EPOCHS} epochs"
        return [Figure(title, minutes, "min", at_most=15.0, note=note)]

    def text(self) -> list[Figure]:
        """LAMP on a network of BERT-base's shape, without the language model's score."""
        sizes = self.sizes
        name = f"LAMP on BERT-base, T = {sizes.length}, {TEXT_STEPS:,} steps: a sentence in a wave of {sizes.sentences}"
        if importlib.util.find_spec("transformers") is None:
            return [Figure(name, None, "s", at_most=60.0, note="skipped: needs the package transformers")]
        attack = lamp(lm_weight=0.0, draws=1, orders=1, discrete="none")
        start = replace(attack, draws=sizes.draws, orders=sizes.draws)
        moving = replace(attack, discrete="alternating", period=sizes.steps + 1)
        form = sizes.layers, sizes.width, sizes.heads
        wave, known = random_sentences(sizes.sentences, sizes.length, sizes.vocabulary, form, self.device)
        streams = [partial(generator, 0, "gpu", k) for k in range(sizes.sentences)]

        def run(attack: Any, steps: int) -> float:
            found: list[Reconstruction] = []
            spent = self.seconds(lambda: found.extend(attack.reconstruct(wave, known, Budget(steps), streams)))
            if refused := [r.reason for r in found if r.x is None]:
                raise RuntimeError(refused[0])
            return spent

        run(moving, sizes.steps + 1)
        begun, one, several = run(start, 1), run(attack, 1), run(attack, sizes.steps + 1)
        moved = max(0.0, run(moving, sizes.steps + 1) - several)
        step, moves = (several - one) / sizes.steps, TEXT_STEPS // lamp().period
        note = (
            f"extrapolated: the start {begun:.3g} s, a step {1e3 * step:.3g} ms (mean of {sizes.steps}), the moves of words "
            f"{moves} times {moved:.3g} s; random weights, frozen word embeddings, no language model's score"
        )
        return [
            Figure(
                name, (begun + (TEXT_STEPS - 1) * step + moves * moved) / sizes.sentences, "s", at_most=60.0, note=note
            )
        ]

    def transfers(self) -> list[Figure]:
        """What it takes to move a wave of ResNet-18, auxiliary images and the results."""
        sizes = self.sizes
        posed = problem(CIFAR_SHAPE, sizes.resnet[0], make=self.deep[1], pixels=sizes.pixels, device=self.device)
        wave = posed.wave.to(CPU)
        auxiliary = Batch(torch.rand(sizes.auxiliary, 3, 32, 32), torch.zeros(sizes.auxiliary, dtype=torch.int64))
        known = replace(posed.known.to(CPU), auxiliary=auxiliary)
        result = Reconstruction(posed.truth[0], None, 0.0, 1, 0.0, "converged")

        def move() -> None:
            wave.to(self.device)
            known.to(self.device)
            for _ in wave.clients:
                result.to(CPU)

        spent = self._medians({"move": move})["move"]
        tensors = [*wave.params.values(), *wave.update.values(), auxiliary.x]
        gigabytes = sum(t.numel() * t.element_size() for t in tensors) / 1e9
        note = f"{spent:.3g} s for {gigabytes:.2f} GB there and {len(wave)} images back; Ray's queue is not in it"
        title = f"ResNet-18, K = {len(wave)}, {sizes.auxiliary:,} auxiliary images: transfers of a wave of {WAVE:g} s"
        return [Figure(title, 100 * spent / WAVE, "%", at_most=5.0, note=note)]


MEASURES: Mapping[str, Callable[[GpuBenchmark], list[Figure]]] = {
    "lenet": GpuBenchmark.lenet,
    "convnet": GpuBenchmark.convnet,
    "resnet": GpuBenchmark.resnet,
    "psnr": GpuBenchmark.psnr,
    "tf32": GpuBenchmark.tf32,
    "learning": GpuBenchmark.learning,
    "transfers": GpuBenchmark.transfers,
    "text": GpuBenchmark.text,
    "steps": GpuBenchmark.steps,
    "deep-steps": GpuBenchmark.deep_steps,
}


class FailedMeasure(Figure):
    """A measure that raised an error, which is no figure."""


def measure(name: str, benchmark: GpuBenchmark, targets: bool) -> list[Figure]:
    """A measure's figures; one without a value says why.

    Args:
        targets: whether figures are held to their targets, which are those of full sizes on a GPU.
    """
    for deterministic in (True, False):
        compute_on(benchmark.device, deterministic=deterministic)
        try:
            found = MEASURES[name](benchmark)
        except Exception as error:  # the other measures still run: such a machine may not be had again
            if deterministic and "deterministic" in str(error):
                continue
            return [FailedMeasure(name, None, "", note=f"failed: {sentence(error)}")]
        break
    odd = [f.value is not None and not math.isfinite(f.value) for f in found]
    found = [replace(f, value=None, note=f"not finite; {f.note}") if o else f for f, o in zip(found, odd, strict=True)]
    if not deterministic:
        found = [replace(f, note=f"{f.note}; an operator has no deterministic algorithm") for f in found]
    return found if targets else [replace(f, at_least=None, at_most=None) for f in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep; returns 1 if a target is missed or a measure failed."""
    parser = argparse.ArgumentParser(prog="python -m fedgauge.simulations.benchmarks.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MEASURES)}; default: all")
    parser.add_argument("--device", default="cuda:0", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to find errors; nothing is held to a target")
    parser.add_argument(
        "--peak", type=float, default=PEAK, help="the device's TFLOP/s in float32; default: %(default)s"
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="after which no measure begins; default: %(default)s"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu.json"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    names = options.names or list(MEASURES)
    if unknown := [n for n in names if n not in MEASURES]:
        parser.error(f"there is no measure {unknown[0]!r}; there are {', '.join(MEASURES)}")
    if not options.peak > 0:
        parser.error(f"--peak must be above 0, got {options.peak:g}")
    try:
        device = devices_of([options.device])[0]
        options.output.open("a").close()  # it should not fail after minutes
    except ValueError as error:
        parser.error(f"{error} (here: --device cpu --quick)")
    except OSError as error:
        parser.error(f"{options.output} cannot be written ({error.strerror}): name another file by -o")
    benchmark = GpuBenchmark(device, QUICK if options.quick else FULL, options.peak)
    targets = device.type == "cuda" and not options.quick
    started, figures, rows = time.monotonic(), list[Figure](), list[dict[str, object]]()
    settings = dict(
        asdict(numerics(device)), peak=f"{options.peak:g} TFLOP/s", seed=0, sizes=asdict(benchmark.sizes),
        clock="seconds until the device has finished, medians of interleaved repetitions",
    )  # fmt: skip
    for name in names:
        begun = time.monotonic()
        if begun - started > 60 * options.minutes:
            found = [Figure(name, None, "", note=f"skipped: the {options.minutes:g} minutes were over (--minutes)")]
        else:
            found = measure(name, benchmark, targets)
        figures += found
        rows.append({"measure": name, "seconds": round(time.monotonic() - begun, 1), "peak_gb": peak_memory(device)})
        # after each measure, so that a machine that is taken away leaves what it has measured
        result = record("gpu", BenchmarkReport(tuple(figures), settings, tuple(rows)), time.monotonic() - started)
        options.output.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
        shown = ["  ".join(filter(None, cells(f))) for f in result["figures"][-len(found) :]]
        print(f"{name} ({rows[-1]['seconds']} s)", *shown, sep="\n", flush=True)
    print(f"written to {options.output}")
    return int(any(f.met is False or isinstance(f, FailedMeasure) for f in figures))


if __name__ == "__main__":
    sys.exit(main())
