"""Does speed cost quality? The papers' own settings, and attacks whose answer is known to be exact."""

from collections.abc import Callable
from functools import partial
from statistics import mean, median

import torch
from torch import nn

from fedgauge.attacks.base import Attack, Budget, Knowledge, Wave
from fedgauge.attacks.exact.analytic import analytic
from fedgauge.attacks.labels import restore
from fedgauge.attacks.matching.recipes import inverting_gradients
from fedgauge.attacks.modality.image_metrics import PSNR_CAP, label_accuracy
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.client.chain import chain
from fedgauge.client.data.images import Dataset, batch_of, cifar10, mnist5k
from fedgauge.client.local_data import has_images
from fedgauge.client.models.vision import convnet, lenet, mlp, resnet20
from fedgauge.client.rng import generator
from fedgauge.client.training import local_sgd
from fedgauge.client.update import Batch
from fedgauge.simulations.benchmarks.observed_updates import GradedImages, known_of, observed, singles, untrained
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread

RATE = 0.1
SEED = 0
TV = 0.1


def quality(
    progress: Progress, images: int = 8, iterations: int = 500, labels: int = 64, inputs: int = 16
) -> BenchmarkReport:
    """Mean PSNR of Inverting Gradients, label accuracy of iDLG, PSNR of the analytic attack; one example per update."""
    dataset = cifar10() if has_images("cifar10") else mnist5k()
    nets: dict[str, Callable[..., nn.Module]] = {
        "lenet": lenet,
        "mlp": mlp,
        "convnet(width=16)": partial(convnet, width=16),
        "resnet20": partial(resnet20),
    }
    steps = len(nets) + 2
    figures = []
    with one_thread():
        for done, (name, make) in enumerate(nets.items()):
            figures.append(_label_accuracy(name, _untrained(make, dataset), dataset, labels))
            progress(done + 1, steps)
        figures += _analytic(dataset, inputs)
        progress(steps - 1, steps)
        figures += _inverting_gradients(dataset, images, iterations)
        progress(steps, steps)
    settings = dict(
        dataset=f"{dataset.name}, first test images", networks="untrained, BatchNorm in eval mode", seed=SEED, tv=TV,
        images=images, iterations=iterations, labels=labels, inputs=inputs, batch_size=1,
        knowledge="honest server, labels restored, chain and normalisation known",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


def _inverting_gradients(dataset: Dataset, images: int, iterations: int) -> list[Figure]:
    name = f"Inverting Gradients, lenet, {iterations} iterations"
    if dataset.name != "cifar10":
        reason = "skipped: needs cifar10-train-*.npz and cifar10-test-*.npz in the local data folder (FEDGAUGE_DATA)"
        return [Figure(f"{name}: mean PSNR", None, "dB", at_least=16.5, note=reason)]
    values = _graded(inverting_gradients(TV), _untrained(lenet, dataset), dataset, images, iterations).psnr
    return [
        Figure(f"{name}: mean PSNR", mean(values), "dB", at_least=16.5, note=f"n = {images}"),
        Figure(f"{name}: worst PSNR", min(values), "dB"),
        Figure(f"{name}: best PSNR", max(values), "dB"),
    ]


def _analytic(dataset: Dataset, inputs: int) -> list[Figure]:
    graded = _graded(analytic(), _untrained(mlp, dataset), dataset, inputs, 1)
    values = graded.psnr
    exact = (
        f"n = {inputs}; capped at {PSNR_CAP:g} dB, which {sum(map(ImageModality.main.came_back_whole, values))} reach"
    )
    return [
        Figure("analytic, mlp: mean PSNR", mean(values), "dB", note=exact),
        Figure("analytic, mlp: worst PSNR", min(values), "dB", at_least=PSNR_CAP),
        Figure("analytic, mlp: median raw PSNR", median(min(v, 1e3) for v in graded.values("psnr")), "dB"),
    ]


def _label_accuracy(name: str, model: nn.Module, dataset: Dataset, labels: int) -> Figure:
    wave, known, truth = _observe(model, dataset, labels)
    right = mean(label_accuracy(batch.y, y) for batch, y in zip(truth, restore(wave, known), strict=True))
    return Figure(f"iDLG, {name}: labels right", 100 * right, "%", at_least=100.0, note=f"n = {labels}")


def _graded(attack: Attack, model: nn.Module, dataset: Dataset, images: int, iterations: int) -> GradedImages:
    """RuntimeError if an attack fails: the targets are of every image."""
    wave, known, truth = _observe(model, dataset, images)
    streams = [partial(generator, SEED, "quality", k) for k in range(images)]
    graded = GradedImages(attack.reconstruct(wave, known, Budget(iterations), streams), truth, dataset)
    if graded.lost:
        raise RuntimeError(f"{type(attack).__name__} gave no image of every client: {graded.lost}")
    return graded


def _observe(model: nn.Module, dataset: Dataset, count: int) -> tuple[Wave, Knowledge, list[Batch]]:
    """What a server observes of `count` clients with one test image each, what it knows, and the true images."""
    truth = singles(batch_of(dataset.x_test, dataset.y_test, torch.arange(count)))
    known = known_of(model, chain(local_sgd(RATE)), dataset)
    return observed(known, truth), known, truth


def _untrained(make: Callable[..., nn.Module], dataset: Dataset) -> nn.Module:
    return untrained(partial(make, dataset.shape, dataset.classes), SEED)
