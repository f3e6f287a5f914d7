"""The training of all learned attacks and language priors: Adam until held-out data no longer improve.

Inverters are trained on shadow updates (`train_inverter`); normal noise is drawn anew in each step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Reconstruction
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.learned.shadow_updates import ShadowTrainer
from fedgauge.client.rng import generator, seed_of

Network = TypeVar("Network")


def perceptron(widths: Sequence[int], *end: nn.Module) -> nn.Sequential:
    """Linear layers of these widths with ReLUs between, and `end` behind the last one."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *end)


def seeded(make: Callable[[], Network], *seed: str) -> Network:
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

    def answer(self, x: Tensor | None, y: Tensor | None = None) -> Reconstruction:
        """The reconstruction of one update, diverged if x is missing or not finite."""
        if x is None or not bool(x.isfinite().all()):
            reason = "the update is not finite, or too large to invert"
            return Reconstruction(None, y, self.error, self.steps, 0.0, "diverged", reason)
        if not self.interrupted:
            return Reconstruction(x, y, self.error, self.steps, 0.0, "converged")
        reason = f"{self.steps} of {self.planned} steps when the seconds were over"
        return Reconstruction(x, y, self.error, self.steps, 0.0, "out_of_budget", reason)


def train(
    network: nn.Module,
    loss: Callable[..., Tensor],
    batches: Iterable[Sequence[Tensor]],
    held: Sequence[Sequence[Tensor]],
    every: int,
    rate: float,
    patience: int,
    planned: int,
    clock: Deadline | None = None,
    schedule: Callable[[int], float] | None = None,
    **adam: Any,
) -> dict[str, Tensor]:
    """Train to the end or until the time is over; returns the best weights and the record, as the cache keeps them.

    Args:
        loss: of one batch, by the network.
        held: held-out batches, on which the error is taken every so many steps.
        patience: held-out errors without an improvement after which training ends; planned: steps.
        schedule: factor of the rate at a step, counted from 0; default: a tenth from 3/4 of the steps on.
        adam: further arguments of the optimizer.
    """
    # fused: otherwise Adam's memory traffic takes half as long as the matrix products
    optimizer = torch.optim.Adam(network.parameters(), lr=rate, **{"fused": True, **adam})
    factor = schedule or (lambda step: 0.1 if 4 * step >= 3 * planned else 1.0)
    step = since = 0
    lowest, best = float("inf"), dict[str, Tensor]()

    def check() -> None:
        nonlocal lowest, since, best
        with torch.no_grad():
            losses = [float(loss(*part)) * len(part[0]) for part in held]
        error = sum(losses) / sum(len(part[0]) for part in held)
        since += 1
        if error < lowest or not best:
            lowest, since = min(error, lowest), 0
            best = {f"w {k}": t.detach().clone() for k, t in network.state_dict().items()}

    check()
    for batch in batches:
        if since >= patience or (clock is not None and clock.over()):
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * factor(step)
        optimizer.zero_grad()
        with torch.enable_grad():
            loss(*batch).backward()
        optimizer.step()
        step += 1
        if step % every == 0 or step == planned:
            check()
        if step == planned:
            break
    interrupted = step < planned and since < patience
    if interrupted:
        check()
    return {**best, "numbers": torch.tensor([lowest, step, planned, interrupted], dtype=torch.float64)}


def load(network: nn.Module, kept: dict[str, Tensor]) -> TrainingRecord:
    """Give a network the weights that `train` returned; returns the record of that training."""
    network.load_state_dict({k: kept[f"w {k}"] for k in network.state_dict()})
    error, steps, planned, interrupted = kept["numbers"].tolist()
    return TrainingRecord(error, int(steps), int(planned), bool(interrupted))


def train_inverter(
    shadow: ShadowTrainer,
    name: str,
    network: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batch: int,
    *settings: Any,
    prepare: Callable[[Tensor, Tensor], None] = lambda rows, noise: None,
    together: int | None = None,
) -> dict[str, Tensor]:
    """Train a network from features of shadow updates to their examples, as the cache keeps it.

    Args:
        name: of the training, which seeds its order.
        loss: of the network's outputs, by the numbers (n, images) of the auxiliary examples.
        batch: updates in a step.
        settings: the next arguments of `train`: rate, patience, planned, clock.
        prepare: called before with the training rows and the deviation (columns,) of the noise that each step adds to them.
        together: held-out updates in one pass; default: all.
    """
    end = shadow.known.chain.update_distribution
    plain = end is not None and not (end.signed or end.sparse or end.scale or end.hidden) and end.shrink == 1
    sigma = end.sigma if end is not None and plain else 0.0  # of noise that each training step can draw itself
    own, held = shadow.shadow_data(False, quiet=sigma > 0), shadow.shadow_data(True)
    noise = sigma * shadow.view.noise(shadow.entries).to(own.rows)
    prepare(own.rows, noise)
    images, held_images = (data.groups.reshape(len(data.rows), -1) for data in (own, held))

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for passed in count():
            order = torch.randperm(len(images), generator=generator("order", name, passed))
            for chosen in order.split(batch):
                rows = own.rows[chosen]
                if sigma:
                    draw = generator("noise", name, passed, int(chosen[0]))
                    rows = rows + noise * torch.randn(rows.shape, generator=draw).to(rows)
                yield rows, images[chosen]

    size, epoch = together or len(held.rows), -(-len(own.rows) // batch)
    parts = list(zip(held.rows.split(size), held_images.split(size), strict=True))
    return train(network, lambda rows, images: loss(network(rows), images), batches(), parts, epoch, *settings)
