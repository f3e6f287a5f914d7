"""What clients' own training leaves for Inverting Gradients.

`training`: optimizers, on Flower's quickstart network beside LeNet, one image an update. `proximal`: FedProx and SCAFFOLD,
LeNet, four images. `modes`: architecture by BatchNorm's mode, and by what the server knows of a batch's statistics.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Observation, Reconstruction, Wave
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.recipes import inverting_gradients
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.attacks.threat_model import as_known, waves_known_alike
from fedgauge.client.chain import chain
from fedgauge.client.data.images import Dataset, batch_of, cifar10
from fedgauge.client.local_training import local_training, pull_in, scaffold
from fedgauge.client.models.vision import convnet, detached_params, floating_buffers, lenet, resnet20
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Batch
from fedgauge.simulations.benchmarks.observed_updates import GradedImages, known_of, observed, singles, untrained
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread

SEED = 0
TV = 0.1
SMOOTH = 0.01  # total variation's weight of the attacks on modes
SIZE = 4  # of their batches
STATISTICS = 1e-2  # weight of the statistics' distance
AUXILIARY = 256
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
                known = known_of(model, chain(assumed), data)
                wave = observed(known, truth, own(gradient(model, normalise=data.normalise)))
                streams = [partial(generator, SEED, "training", k) for k in range(images)]
                found = inverting_gradients(TV).reconstruct(wave, known, Budget(iterations), streams)
                figures.append(GradedImages(found, truth, data).mean_psnr(f"{net}, {name}"))
                progress(len(figures) - 1, len(nets) * len(TRAININGS))
    settings = dict(
        dataset=f"{data.name}, first training images", networks="untrained, torch's initialisation", seed=SEED, tv=TV,
        images=images, iterations=iterations, batch_size=1, rates="SGD 0.1, Adam 0.001",
        knowledge="honest server, labels restored, normalisation known, and the local training unless said otherwise",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


def proximal(progress: Progress, batches: int = 8, iterations: int = 500) -> BenchmarkReport:
    """PSNR of Inverting Gradients on FedProx's and SCAFFOLD's clients, at equal local steps: LeNet, four images an update.

    FedProx's are of one round, by its weight. SCAFFOLD's are of the last of three rounds, as in the first nothing corrects it,
    and beside them stand FedAvg's of that round. RuntimeError if an image is lost.
    """
    data, size, steps, weights = cifar10(), 4, 4, (0.0, 0.01, 0.1, 1.0)
    trial = _Federation(data, size, batches, iterations)
    figures: list[Figure] = []
    found: dict[str, GradedImages] = {}
    total = len(weights) + 3

    def measured(name: str, own: local_sgd, rounds: int, assumed: local_sgd | None = None) -> None:
        found[name] = trial.attacked(own, rounds, assumed)
        figures.append(found[name].mean_psnr(name, f" in {batches} batches"))
        progress(len(figures), total)

    with one_thread():
        for mu in weights:
            measured(f"FedProx, mu {mu:g}" if mu else "FedAvg", local_sgd(0.1, steps, proximal_mu=mu), 1)
        measured("FedAvg, round 3", local_sgd(0.1, steps), 3)
        measured("SCAFFOLD, round 3", scaffold(0.1, steps), 3)
        measured("SCAFFOLD, round 3, taken for FedAvg", scaffold(0.1, steps), 3, local_sgd(0.1, steps))
    pairs = {f"FedProx, mu {mu:g}": "FedAvg" for mu in weights if mu} | {"SCAFFOLD, round 3": "FedAvg, round 3"}
    if lost := next((f"{name}: {graded.lost}" for name, graded in found.items() if graded.lost), ""):
        raise RuntimeError(f"means of other images do not compare; {lost}")
    most = max(abs(mean(found[name].psnr) - mean(found[plain].psnr)) for name, plain in pairs.items())
    figures.append(Figure("largest difference from FedAvg", most, "dB", at_most=1.0))
    settings = dict(
        dataset=f"{data.name}, first training images, others in each round", network="LeNet, untrained before round 1",
        seed=SEED, tv=TV, batch_size=size, clients=batches, local_steps=steps, rate=0.1, iterations=iterations,
        knowledge="honest server, labels restored, normalisation, local training and control variates known",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


@dataclass(frozen=True)
class _Federation:
    """Clients that all take part in every round, a server that averages, and an attack on their last updates."""

    data: Dataset
    size: int
    clients: int
    iterations: int

    def attacked(self, own: local_sgd, rounds: int, assumed: local_sgd | None) -> GradedImages:
        """What is found of the last round's images.

        Args:
            assumed: the local training that the attacker takes for the clients'; default: their own.
        """
        model = untrained(partial(lenet, self.data.shape, 10), SEED)
        compute = gradient(model, normalise=self.data.normalise)
        params = detached_params(model)
        memories: list[TransformState] = [{} for _ in range(self.clients)]
        for round in range(1, rounds + 1):
            truth = [self._batch(round, k) for k in range(self.clients)]
            # what the server derives from its own records, a client has in its memory
            pulls = [pull_in(memory, "0.", params) for memory in memories]
            sent = [
                chain(own).with_state(memory)(compute)(params, batch, None)
                for memory, batch in zip(memories, truth, strict=True)
            ]
            seen = [Observation(round, k, params, update, pull=pulls[k]) for k, update in enumerate(sent)]
            params = {k: p + torch.stack([update[k] for update in sent]).mean(0) for k, p in params.items()}
        known = known_of(model, chain(assumed or own), self.data, self.size)
        parts = [as_known(known, wave) for wave in waves_known_alike(model, known.chain, self.size, Wave.stack(seen))]
        guesses = [
            guess
            for known, wave in parts
            for guess in inverting_gradients(TV).reconstruct(
                wave, known, Budget(self.iterations), [partial(generator, SEED, "proximal", k) for k in wave.clients]
            )
        ]
        return GradedImages(guesses, truth, self.data)

    def _batch(self, round: int, client: int) -> Batch:
        first = ((round - 1) * self.clients + client) * self.size
        return batch_of(self.data.x, self.data.y, torch.arange(first, first + self.size))


# ------------------------------------------------------------------------------------------------ BatchNorm's modes


@dataclass(frozen=True)
class _Row:
    """A network of a client, and what the server uses beside the update."""

    name: str
    make: Callable[..., nn.Module]
    train: bool = False
    statistics: str | None = None  # with which the guess's are compared
    returned: bool = False  # whether the client returns its buffers

    @property
    def attack(self) -> GradientMatching:
        prior = {"use": "batch_statistics", "weight": STATISTICS, "of": self.statistics}
        return inverting_gradients(SMOOTH, prior=None if self.statistics is None else prior)


ROWS = (
    _Row("LeNet, no BatchNorm", lenet),
    _Row("ConvNet of width 8, no BatchNorm", partial(convnet, width=8, norm="none")),
    _Row("ResNet-20, eval mode", resnet20),
    _Row("ResNet-20, train mode, statistics returned (GIA Running)", resnet20, True, "running", True),
    _Row("ResNet-20, train mode, statistics of auxiliary batches (GIA Estimate)", resnet20, True, "auxiliary"),
    _Row("ResNet-20, train mode, statistics unknown", resnet20, True),
)


def modes(progress: Progress, batches: int = 2, iterations: int = 200) -> BenchmarkReport:
    """Mean PSNR of Inverting Gradients, four images an update, by architecture, mode and knowledge of the statistics."""
    data = cifar10()
    truth = [batch_of(data.x, data.y, torch.arange(k * SIZE, (k + 1) * SIZE)) for k in range(batches)]
    end = batches * SIZE
    public = batch_of(data.x, data.y, torch.arange(end, end + AUXILIARY))
    guess = public.x.mean(0, keepdim=True)
    floor = [float(v) for batch in truth for v in psnr(batch.x, guess.expand_as(batch.x))]
    figures = [Figure("the mean of the auxiliary images: mean PSNR", mean(floor), "dB", note=f"n = {len(floor)}")]
    with one_thread():
        for row in ROWS:
            found = [_reconstructed(row, data, public, batch, k, iterations) for k, batch in enumerate(truth)]
            figures.append(GradedImages(found, truth, data).mean_psnr(row.name, f" in {batches} batches"))
            progress(len(figures) - 1, len(ROWS))
    settings = dict(
        dataset=f"{data.name}, first training images", networks="untrained", seed=SEED, tv=SMOOTH, statistics=STATISTICS,
        batch_size=SIZE, iterations=iterations, auxiliary=AUXILIARY, local_steps=1, rate=0.1,
        knowledge="honest server, labels given, normalisation and local training known",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


def _reconstructed(row: _Row, data: Dataset, public: Batch, batch: Batch, k: int, iterations: int) -> Reconstruction:
    """What is found of one client's batch."""
    model = untrained(partial(row.make, data.shape, data.classes), SEED).train(row.train)
    params, sent = detached_params(model), floating_buffers(model)
    own = local_sgd(0.1)
    update = own(gradient(model, normalise=data.normalise, track=row.train))(params, batch, None)
    returned = floating_buffers(model) if row.returned else {}
    known = known_of(model, chain(own), data, SIZE, auxiliary=public, labels=batch.y.sort().values[None])
    known, wave = as_known(known, Wave.stack([Observation(1, k, params, update, sent, returned=returned)]))
    for name, buffer in model.named_buffers():
        if name in wave.buffers:
            buffer.copy_(wave.buffers[name])
    found: Reconstruction
    (found,) = row.attack.reconstruct(wave, known, Budget(iterations), [partial(generator, SEED, "modes", k)])
    return found
