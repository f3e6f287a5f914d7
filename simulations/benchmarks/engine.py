"""How much faster the engine advances K problems together than the published loop advances one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from attacks.base import Budget, Knowledge, Observation, Stream, Wave
from attacks.matching import inverting_gradients
from client.data import mnist5k
from client.models import detached_params, lenet
from client.rng import generator
from client.update import Batch, chain, local_sgd
from simulations.benchmarks.figures import Figure, Progress, Report, interleaved, one_thread
from simulations.benchmarks.published import invert

RATE = 0.1  # of the client's one local step
TV = 0.1
TARGET = 6.0
PUBLISHED, LEAN = "published loop", "published loop without parameter gradients"
CIFAR_SHAPE, DIGITS = "random 3x32x32", "mnist5k 1x28x28"


@dataclass(frozen=True, eq=False)
class Problem:
    """K observations of an untrained LeNet, one image each, and what an attack on them needs."""

    model: nn.Module
    wave: Wave
    known: Knowledge
    streams: list[Stream]

    def engine(self, iterations: int) -> Tensor:
        """The engine's images (K, 1, C, H, W) in [0, 1]."""
        found = inverting_gradients(TV).reconstruct(self.wave, self.known, Budget(iterations), self.streams)
        return torch.stack([r.x for r in found if r.x is not None])

    def published(self, iterations: int, lean: bool = False) -> Tensor:
        """The published loop's image (1, C, H, W) in [0, 1] of the first observation, from the engine's start."""
        known, y = self.known, self.known.labels
        assert y is not None
        seen = [-t / RATE for t in self.wave.alone(0).values()]
        start = torch.randn(1, *known.shape, generator=self.streams[0]("start", 0)).to(seen[0].dtype)
        z = invert(self.model, seen, y[0], start, known.mean, known.std, iterations, TV, lean=lean)
        mean, std = (torch.tensor(v).to(z)[:, None, None] for v in (known.mean, known.std))
        return z * std + mean


def problem(source: str, size: int, seed: int = 0) -> Problem:
    """The first `size` problems of a source of images, labels given to both sides."""
    if source == DIGITS:
        dataset = mnist5k()
        x, y, mean, std = dataset.x[:size] / 255, dataset.y[:size], dataset.mean, dataset.std
    else:  # a speed does not depend on what the images show
        x = torch.rand(size, 3, 32, 32, generator=generator(seed, "benchmark images"))
        y, mean, std = torch.arange(size) % 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    shape = (x.shape[1], x.shape[2], x.shape[3])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = lenet(shape, 10).to(torch.get_default_dtype()).eval()
    x = x.to(torch.get_default_dtype())
    params = detached_params(model)
    known = Knowledge(model, chain(local_sgd(RATE)), shape, 10, 1, mean, std, labels=y[:, None])
    seen = [Observation(1, k, params, known.forward(params, Batch(x[[k]], y[[k]]), None)) for k in range(size)]
    return Problem(model, Wave.stack(seen), known, [partial(generator, seed, "benchmark", k) for k in range(size)])


def engine(
    progress: Progress,
    sizes: Sequence[int] = (1, 8, 16, 64),
    iterations: int = 24,
    repetitions: int = 7,
    sources: Sequence[str] = (CIFAR_SHAPE, DIGITS),
) -> Report:
    """Problem-iterations per CPU second, of the published loop and of the engine at each size."""
    works: dict[str, Callable[[], object]] = {}
    counts: dict[str, int] = {}
    for source in sources:
        for name in (PUBLISHED, LEAN):
            works[f"{source}: {name}"] = partial(problem(source, 1).published, 2 * iterations, name == LEAN)
            counts[f"{source}: {name}"] = 2 * iterations
        for size in sizes:
            works[f"{source}: engine, K = {size}"] = partial(problem(source, size).engine, iterations)
            counts[f"{source}: engine, K = {size}"] = size * iterations
    with one_thread():
        seconds = interleaved(works, repetitions, progress)
    speed = {name: counts[name] / median(spent) for name, spent in seconds.items()}
    figures = [Figure(name, value, "problem-iterations per CPU second") for name, value in speed.items()]
    for source in sources:
        base, lean = speed[f"{source}: {PUBLISHED}"], speed[f"{source}: {LEAN}"]
        for size in sizes:
            ours = speed[f"{source}: engine, K = {size}"]
            target = TARGET if size == 64 else None
            name, note = f"{source}: engine / {PUBLISHED}, K = {size}", f"{ours / lean:.2f} x the {LEAN}"
            figures.append(Figure(name, ours / base, "x", at_least=target, note=note))
    settings = dict(
        model="lenet, untrained", attack=f"inverting_gradients(tv={TV})", threads=1, seed=0, sizes=list(sizes),
        iterations=iterations, repetitions=repetitions, clock="CPU seconds, medians of interleaved repetitions",
    )  # fmt: skip
    return Report(tuple(figures), settings)
