"""What a test of membership costs: CPU seconds for a thousand candidates against one update."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from fedgauge.attacks.base import Knowledge, Observation, Wave
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.likelihood import RestOfBatch
from fedgauge.attacks.membership.scores import SCORES, Scoring
from fedgauge.client.chain import Chain
from fedgauge.client.models.vision import detached_params, lenet, resnet20
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.update import Batch
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, cpu_seconds, one_thread

SHAPE, CLASSES, SIZE = (3, 32, 32), 10, 8
CANDIDATES, PUBLIC, SMALL = 1000, 250, 20  # SMALL: scored once before, unmeasured
MOST: Mapping[str, float] = {"lenet": 5.0, "resnet20": 60.0}  # CPU seconds of the matched filter
METHODS = ("matched_filter", "likelihood_ratio")


def cost(progress: Progress) -> BenchmarkReport:
    """CPU seconds by network and score."""
    figures = []
    with one_thread():
        for name, most in MOST.items():
            for score in METHODS:
                work = partial(_scored, name, score)
                work(SMALL)
                seconds = cpu_seconds(partial(work, CANDIDATES))
                aim = most if score == METHODS[0] else None
                figures.append(Figure(f"{name}: {CANDIDATES:,} candidates, {score}", seconds, "CPU s", at_most=aim))
                progress(len(figures), len(MOST) * len(METHODS))
    settings = dict(
        data=f"random images of {SHAPE}, {CLASSES} classes; one update of a batch of {SIZE}, one step",
        networks="untrained; BatchNorm in eval mode",
        likelihood_ratio=f"with the rest of the batch from {PUBLIC} public images, whose gradients count, too",
        threads=1,
        seed=0,
    )
    return BenchmarkReport(tuple(figures), settings)


def _scored(name: str, score: str, count: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = (lenet(SHAPE, CLASSES) if name == "lenet" else resnet20(SHAPE, CLASSES)).eval()
    chain = Chain((local_sgd(rate=0.1),))
    known = Knowledge(model, chain, SHAPE, CLASSES, SIZE, (0.5,) * 3, (0.25,) * 3)
    members, candidates, public = (
        _images(part, n) for part, n in (("members", SIZE), ("others", count), ("public", PUBLIC))
    )
    params = detached_params(model)
    update = chain(gradient(model, known.loss, normalise=known.normalise))(params, members, None)
    wave = Wave.stack([Observation(1, 0, params, update)])
    rest = None
    if score == "likelihood_ratio":
        rest = RestOfBatch.of_population(CandidateGradients(known, params, public))
    found = SCORES[score](Scoring(CandidateGradients(known, params, candidates), wave, rest))
    assert found.shape == (1, count) and bool(found.isfinite().all())


def _images(part: str, count: int) -> Batch:
    rng = generator("cost of membership", part)
    return Batch(torch.rand(count, *SHAPE, generator=rng), torch.randint(CLASSES, (count,), generator=rng))
