"""`python -m tests.zoo.measure`: the zoo's networks tried, attacked, declined, wrong and unhandled, and what an iteration costs.

The figures are kept with the benchmarks' (simulations/benchmarks/results/zoo.json). Wrong: the engine's objective or slopes
differ from plain autograd's in float64.
"""

import fedgauge.client  # isort: skip  # mends torchvision before anything can import it

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Observation, Wave
from fedgauge.attacks.engine.gradient_distances import cosine
from fedgauge.attacks.matching.objective import Objective
from fedgauge.attacks.matching.problems import Problems
from fedgauge.client.chain import chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params
from fedgauge.simulations.benchmarks.reporting import RESULTS, Figure, interleaved, keep
from fedgauge.simulations.run.environment import one_thread
from tests.zoo import text
from tests.zoo.networks import CLASSES, Network, networks

assert fedgauge.client  # the import is the point
RATE, EXAMPLES, ITERATIONS, REPETITIONS = 0.1, 1, 4, 5
TOGETHER = (1, 4)  # problems
EQUAL = 1e-9
PROCESSES = 2


SETTINGS: Mapping[str, object] = dict(
    attack="cosine distance, one local step, one example", iterations=ITERATIONS, repetitions=REPETITIONS, threads=1,
    clock="CPU seconds, medians of interleaved repetitions, float32; networks of the full suite only are not timed",
    compared="objective and slopes with plain autograd in float64, relative 1e-9", processes=PROCESSES,
    seeds="weights 0, examples 1, updates 2",
)  # fmt: skip


def zoo() -> list[Mapping[str, object]]:
    """Every network of the zoo."""
    rows: list[Mapping[str, object]] = []
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = list(networks().values())
        with ProcessPoolExecutor(PROCESSES, get_context("spawn"), _start) as pool:
            rows += pool.map(_row_of, [n.name for n in chosen])
        rows += text.rows()
    return rows


def figures_of(rows: Sequence[Mapping[str, object]]) -> list[Figure]:
    """The counts of rows, and the extremes of their costs."""
    outcomes = Counter(str(row["outcome"]) for row in rows)
    costs = {(k, str(row["network"])): row[f"cost at {k}"] for row in rows for k in TOGETHER if f"cost at {k}" in row}
    figures = [
        Figure("families tried", len({row["family"] for row in rows}), ""),
        Figure("networks tried", len(rows), ""),
        Figure("attacked", outcomes["attacked"], ""),
        Figure("declined with a sentence", outcomes["declined"], ""),
        Figure("wrong", outcomes["wrong"], "", at_most=0),
        Figure("unhandled", outcomes["unhandled"], "", at_most=0),
    ]
    for k in TOGETHER:
        own = {name: float(str(cost)) for (many, name), cost in costs.items() if many == k}
        worst = max(own, key=lambda name: own[name])
        middle = Figure(f"an iteration / the plain loop's, K = {k}, median", median(own.values()), "x")
        figures += [middle, Figure(f"the same, K = {k}, worst", own[worst], "x", at_most=1.1, note=worst)]
    return figures


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _row_of(name: str) -> Mapping[str, object]:
    return _row(networks()[name])


def _row(network: Network) -> Mapping[str, object]:
    row: dict[str, object] = {"network": network.name, "family": network.family}
    try:
        with _double():
            problems, x = posed(network, 2)
            same = _agrees(problems, network, x)
        row |= {
            "outcome": "attacked" if same else "wrong",
            "route": problems.way.route,
            "composed": problems.way.composed,
        }
        # what an iteration of the large ones costs is their kernels'; some odd ones fail in the published loop itself
        if network.quick and network.family != "odd":
            row |= {f"cost at {k}": _cost(network, k) for k in TOGETHER}
    except ValueError as error:
        row |= {"outcome": "declined", "reason": str(error)}
    except Exception as error:  # counted, and shown with its words
        row |= {"outcome": "unhandled", "reason": f"{type(error).__name__}: {error}"}
    return row


@contextmanager
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def posed(network: Network, k: int, normal: bool = False) -> tuple[Problems, Tensor]:
    """Problems of a new network with made-up updates, and images, perhaps normalised; ValueError if it is declined."""
    model = network.build()
    lazy = any(nn.parameter.is_lazy(p) for p in model.parameters())
    params = dict(model.named_parameters()) if lazy else detached_params(model)
    x, y = network.examples(k, EXAMPLES + network.train)  # a batch norm in train mode takes no single example
    mean, std = ((v,) * network.shape[0] if normal else () for v in (0.4, 0.3))
    known = Knowledge(model, chain(local_sgd(RATE)), network.shape, CLASSES, x.shape[1], mean, std, labels=y)
    rng = torch.Generator().manual_seed(2)
    seen = {name: torch.zeros(1) if lazy else torch.randn(p.shape, generator=rng) for name, p in params.items()}
    wave = Wave.stack([Observation(1, c, params, {n: (c + 1) * t for n, t in seen.items()}) for c in range(k)])
    return Problems(Objective(cosine()), wave, known, y, 1, torch.get_default_dtype()), known.normalise(x)


def plain_objective(problems: Problems, c: int, model: nn.Module, x: Tensor) -> Tensor:
    """The c-th problem's objective, by plain autograd of a model itself."""
    assert problems.labels is not None
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = F.cross_entropy(model(x.clone()), problems.labels[c])
    found = torch.autograd.grad(loss, list(params.values()), create_graph=True, materialize_grads=True)
    pairs = [(-RATE * g, problems.update[name][c]) for name, g in zip(params, found, strict=True)]
    inner, ours, theirs = (
        torch.stack([(a * b).sum() for a, b in both]).sum()
        for both in (pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])
    )
    return 1 - inner / (ours * theirs).sqrt()


def plain(problems: Problems, models: Sequence[nn.Module], x: Tensor, by_all: bool) -> tuple[Tensor, Tensor]:
    """Objectives and slopes, one problem after the other, as the published loops compute them.

    Args:
        models: one a problem.
        by_all: the slopes by the parameters come with those by the images (`backward`), as in the published loops.
    """
    values, slopes = [], []
    with problems.way():
        for c, model in enumerate(models):
            leaf = x[c].clone().requires_grad_()
            value = plain_objective(problems, c, model, leaf)
            if by_all:
                model.zero_grad()
                value.backward()
                assert leaf.grad is not None
                slopes.append(leaf.grad)
            else:
                slopes.append(torch.autograd.grad(value, leaf, materialize_grads=True)[0])
            values.append(value.detach())
    return torch.stack(values), torch.stack(slopes)


def _agrees(problems: Problems, network: Network, x: Tensor) -> bool:
    value, slopes = problems.value_and_slopes({"x": x}, torch.arange(problems.count))
    # a network of its own for every pass, since some layers keep a state
    expected, by_x = plain(problems, [network.build() for _ in x], x, by_all=False)
    gap = (slopes["x"] - by_x).abs().max() / by_x.abs().max()
    return bool((value - expected).abs().max() <= EQUAL) and bool(gap <= EQUAL)


def _cost(network: Network, k: int) -> float:
    """CPU seconds of an iteration over the plain loop's."""
    problems, x = posed(network, k)
    models, everyone = [network.build()] * k, torch.arange(k)
    repeated: Callable[[Callable[[], object]], None] = _repeated
    works: dict[str, Callable[[], object]] = {
        "engine": partial(repeated, lambda: problems.value_and_slopes({"x": x}, everyone)),
        "plain": partial(repeated, lambda: plain(problems, models, x, by_all=True)),
    }
    seconds = interleaved(works, REPETITIONS)
    return median(seconds["engine"]) / median(seconds["plain"])


def _repeated(work: Callable[[], object]) -> None:
    for _ in range(ITERATIONS):
        work()


if __name__ == "__main__":
    started, rows = time.monotonic(), zoo()
    figures = figures_of(rows)
    print(*figures, sep="\n")
    sys.exit(keep(RESULTS / "zoo.json", "zoo", started, figures, SETTINGS, rows))
