"""What clients' own training leaves for Inverting Gradients.

`training`: optimizers, on Flower's quickstart network beside LeNet, one image an update. `proximal`: FedProx, LeNet, four images.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Reconstruction
from fedgauge.attacks.matching.recipes import inverting_gradients
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import chain
from fedgauge.client.data.images import Dataset, batch_of, cifar10
from fedgauge.client.local_training import local_training
from fedgauge.client.models.vision import lenet
from fedgauge.client.pairing import match
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.update import Batch, Transform
from fedgauge.simulations.benchmarks.observed_updates import known_of, observed, singles, untrained
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread

SEED = 0
TV = 0.1
TRAININGS: Mapping[str, tuple[local_sgd, local_sgd]] = {  # the clients', and what the attacker assumes
    "one step of SGD, momentum .9": (local_training(0.1, 1, momentum=0.9, steps=1),) * 2,
    "one epoch of Adam": (local_training(1e-3, 1, "adam", epochs=1),) * 2,
    "one epoch of Adam, taken for SGD": (local_training(1e-3, 1, "adam", epochs=1), local_sgd(1e-3)),
}


class Quickstart(nn.Module):
    """The network of Flower's PyTorch quickstart, for images (3, 32, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 10)."""
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        out: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return out


def training(progress: Progress, images: int = 16, iterations: int = 1000) -> BenchmarkReport:
    """PSNR of Inverting Gradients by network and local training, beside the mean of the other images."""
    data = cifar10()
    nets: Mapping[str, Callable[[], nn.Module]] = {"quickstart": Quickstart, "lenet": partial(lenet, data.shape, 10)}
    truth = singles(batch_of(data.x, data.y, torch.arange(images)))
    others = batch_of(data.x, data.y, torch.arange(images, images + 1000)).x.mean(0, keepdim=True)
    floor = [float(psnr(batch.x, others)) for batch in truth]
    figures = [Figure("the mean of 1,000 other images: mean PSNR", mean(floor), "dB", note=f"n = {images}")]
    with one_thread():
        for net, make in nets.items():
            model = untrained(make, SEED)
            for name, (own, assumed) in TRAININGS.items():
                found = _inverted(model, data, truth, own, assumed, iterations, "training")
                values = [float(psnr(batch.x, r.x)) for batch, r in zip(truth, found, strict=True) if r.x is not None]
                note = (
                    f"n = {len(values)}, best {max(values):.1f}, worst {min(values):.1f}" if values else found[0].reason
                )
                figures.append(Figure(f"{net}, {name}: mean PSNR", mean(values) if values else None, "dB", note=note))
                progress(len(figures) - 1, len(nets) * len(TRAININGS))
    settings = dict(
        dataset=f"{data.name}, first training images", networks="untrained, torch's initialisation", seed=SEED, tv=TV,
        images=images, iterations=iterations, batch_size=1, rates="SGD 0.1, Adam 0.001",
        knowledge="honest server, labels restored, normalisation known, and the local training unless said otherwise",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


def _inverted(
    model: nn.Module,
    data: Dataset,
    truth: Sequence[Batch],
    own: Transform,
    assumed: Transform,
    iterations: int,
    of: str,
) -> list[Reconstruction]:
    """What comes back of clients that train as `own` says, to a server that takes them to train as `assumed`."""
    known = known_of(model, chain(assumed), data, len(truth[0].y))
    wave = observed(known, truth, own(gradient(model, normalise=data.normalise)))
    streams = [partial(generator, SEED, of, k) for k in range(len(truth))]
    return inverting_gradients(TV).reconstruct(wave, known, Budget(iterations), streams)


def proximal(progress: Progress, batches: int = 8, iterations: int = 500) -> BenchmarkReport:
    """PSNR of Inverting Gradients by FedProx's weight, at equal local steps: LeNet, four images an update."""
    data, size, steps, weights = cifar10(), 4, 4, (0.0, 0.01, 0.1, 1.0)
    truth = [batch_of(data.x, data.y, torch.arange(k * size, (k + 1) * size)) for k in range(batches)]
    model = untrained(partial(lenet, data.shape, 10), SEED)
    figures: list[Figure] = []
    found: dict[float, float] = {}
    with one_thread():
        for mu in weights:
            own = local_sgd(0.1, steps, proximal_mu=mu)
            guesses = _inverted(model, data, truth, own, own, iterations, "proximal")
            values = [
                float(v)
                for batch, r in zip(truth, guesses, strict=True)
                if r.x is not None
                for v in psnr(batch.x, r.x[match(batch.x, r.x)])
            ]
            found[mu] = mean(values)
            note = f"n = {len(values)} in {batches} batches, best {max(values):.1f}, worst {min(values):.1f}"
            figures.append(
                Figure(f"{f'FedProx, mu {mu:g}' if mu else 'FedAvg'}: mean PSNR", found[mu], "dB", note=note)
            )
            progress(len(figures), len(weights))
    most = max(abs(found[mu] - found[0.0]) for mu in weights)
    figures.append(Figure("largest difference from FedAvg", most, "dB", at_most=1.0))
    settings = dict(
        dataset=f"{data.name}, first training images", network="LeNet, untrained", seed=SEED, tv=TV, batch_size=size,
        local_steps=steps, rate=0.1, iterations=iterations,
        knowledge="honest server, labels restored, normalisation and local training known",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)
