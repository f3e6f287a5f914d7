"""The training of all learned attacks and language priors: Adam until held-out data no longer improve.

Inverters are trained on shadow updates (`train_inverter`), whose noise is drawn anew in each step where its density allows that.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Reconstruction
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.learned.shadow_updates import ShadowDataset, ShadowTrainer
from fedgauge.client.rng import generator, seed_of

Network = TypeVar("Network", bound=nn.Module)


def perceptron(widths: Sequence[int], *end: nn.Module) -> nn.Sequential:
    """Linear layers of these widths with ReLUs between, and `end` behind the last one."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *end)


def seeded(make: Callable[[], Network], *seed: str) -> Network:
    """An untrained network, as torch initialises it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(*seed))
        return make()


@dataclass(frozen=True)
class TrainingRecord:
    """The outcome of a training, or of another fit.

    Args:
        error: on held-out data.
        steps: done; planned: at most; interrupted: whether the deadline ended it.
    """

    error: float
    steps: int = 0
    planned: int = 0
    interrupted: bool = False

    def answer(self, x: Tensor | None, y: Tensor | None = None, seconds: float = 0.0) -> Reconstruction:
        """The reconstruction of one update, diverged if x is missing or not finite."""
        if x is None or not bool(x.isfinite().all()):
            reason = "the update is not finite, or too large to invert"
            return Reconstruction(None, y, self.error, self.steps, seconds, "diverged", reason)
        if not self.interrupted:
            return Reconstruction(x, y, self.error, self.steps, seconds, "converged")
        reason = f"{self.steps} of {self.planned} steps when the seconds were over"
        return Reconstruction(x, y, self.error, self.steps, seconds, "out_of_budget", reason)


class Trainer:
    """A network, its optimizer and the best weights so far.

    Args:
        patience: held-out errors without an improvement after which training ends; planned: steps.
        loss: of one batch, by the network.
        schedule: factor of the rate at a step, counted from 0; default: a tenth from 3/4 of the steps on.
        adam: further arguments of the optimizer.
    """

    def __init__(
        self,
        network: nn.Module,
        rate: float,
        patience: int,
        planned: int,
        loss: Callable[..., Tensor],
        schedule: Callable[[int], float] | None = None,
        **adam: Any,
    ) -> None:
        self.network, self.rate, self.patience, self.planned, self.loss = network, rate, patience, planned, loss
        self.schedule = schedule or (lambda step: 0.1 if 4 * step >= 3 * planned else 1.0)
        # fused: otherwise Adam's memory traffic takes half as long as the matrix products
        self.adam = torch.optim.Adam(network.parameters(), lr=rate, **{"fused": True, **adam})
        self.step = self.since = 0
        self.lowest = float("inf")  # of the held-out errors
        self.best: dict[str, Tensor] = {}

    @property
    def done(self) -> bool:
        """Whether all steps are taken, or no error was lower for `patience` checks."""
        return self.step >= self.planned or self.since >= self.patience

    def train_step(self, *batch: Tensor) -> None:
        """One step."""
        for group in self.adam.param_groups:
            group["lr"] = self.rate * self.schedule(self.step)
        self.adam.zero_grad()
        with torch.enable_grad():
            self.loss(*batch).backward()
        self.adam.step()
        self.step += 1

    def record_error(self, error: float) -> None:
        """Record the error on held-out data, and keep the weights if it is the lowest."""
        if error < self.lowest or not self.best:
            self.lowest, self.since = min(error, self.lowest), 0
            self.best = {f"w {k}": t.detach().clone() for k, t in self.network.state_dict().items()}
        else:
            self.since += 1

    def train(
        self,
        batches: Iterable[Sequence[Tensor]],
        every: int,
        held: Sequence[Sequence[Tensor]],
        clock: Deadline | None = None,
    ) -> dict[str, Tensor]:
        """Train to the end or until the time is over; returns the best weights and the record, as the cache keeps them.

        Args:
            every: steps between two errors on held-out batches.
        """

        def error() -> float:
            with torch.no_grad():
                losses = [float(self.loss(*part)) * len(part[0]) for part in held]
            return sum(losses) / sum(len(part[0]) for part in held)

        self.record_error(error())
        for batch in batches:
            if self.done or (clock is not None and clock.over()):
                break
            self.train_step(*batch)
            if self.step % every == 0 or self.done:
                self.record_error(error())
        if not self.done:
            self.record_error(error())
        numbers = [self.lowest, self.step, self.planned, not self.done]
        return {**self.best, "numbers": torch.tensor(numbers, dtype=torch.float64)}


def load(network: nn.Module, kept: dict[str, Tensor]) -> TrainingRecord:
    """Give a network the weights that `Trainer.train` returned; returns the record of that training."""
    network.load_state_dict({k: kept[f"w {k}"] for k in network.state_dict()})
    error, steps, planned, interrupted = kept["numbers"].tolist()
    return TrainingRecord(error, int(steps), int(planned), bool(interrupted))


# ------------------------------------------------------------------------------------------------- on shadow updates


def train_inverter(
    shadow: ShadowTrainer,
    name: str,
    batch: int,
    rate: float,
    patience: int,
    planned: int,
    network: Callable[[ShadowDataset, float], nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
    clock: Deadline,
    together: int | None = None,
) -> dict[str, Tensor]:
    """Train a network from features of shadow updates to their examples, as the cache keeps it.

    Args:
        name: of the training, which seeds its order.
        batch: updates in a step; the others are those of `Trainer`.
        network: makes it from the training data and the noise that each step adds to them.
        loss: of the network's outputs, by the numbers (n, images) of the auxiliary examples.
        together: held-out updates in one pass; default: all.
    """
    sigma = final_noise_std(shadow)
    shadow_data, held = shadow.shadow_data(False, quiet=sigma > 0), shadow.shadow_data(True)
    made, size = network(shadow_data, sigma), together or len(held.rows)
    parts = list(zip(held.rows.split(size), _images(held).split(size), strict=True))

    def batch_loss(rows: Tensor, images: Tensor) -> Tensor:
        return loss(made(rows), images)

    trainer = Trainer(made, rate, patience, planned, batch_loss)
    drawn = batches(shadow, shadow_data, sigma, batch, name)
    return trainer.train(drawn, steps_per_epoch(shadow_data, batch), parts, clock)


def _images(data: ShadowDataset) -> Tensor:
    return data.groups.reshape(len(data.rows), -1)


def steps_per_epoch(shadow_data: ShadowDataset, size: int) -> int:
    """Steps of an epoch with batches of this size."""
    return -(-len(shadow_data.rows) // size)


def batches(
    shadow: ShadowTrainer, shadow_data: ShadowDataset, sigma: float, size: int, name: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless rows and image numbers (n, images), each step with its own draws.

    Args:
        sigma: of the noise that each step draws anew; name: of the training, which seeds its order.
    """
    images, passed = _images(shadow_data), 0
    scale = sigma * shadow.view.noise(shadow.entries)
    while True:
        order = torch.randperm(len(images), generator=generator("order", name, passed))
        for chosen in order.split(size):
            rows = shadow_data.rows[chosen]
            if sigma:
                draw = generator("noise", name, passed, int(chosen[0]))
                rows = rows + scale.to(rows) * torch.randn(rows.shape, generator=draw).to(rows)
            yield rows, images[chosen]
        passed += 1


def final_noise_std(shadow: ShadowTrainer) -> float:
    """The deviation of normal noise at the end of the chain, which each training step can draw itself; 0: other chains."""
    known = shadow.known.chain.update_distribution
    if known is None or known.signed or known.sparse or known.scale or known.hidden or known.shrink != 1:
        return 0.0
    return known.sigma
