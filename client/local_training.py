"""Local training as clients of torch do it: optimizers, schedules, epochs, accumulation, clipping; SCAFFOLD's control variates."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from fedgauge.client.components import Count, Fraction, NotNegative, Positive
from fedgauge.client.transforms import Link, TransformState, UpdateDistribution
from fedgauge.client.update import Batch, Params, Transform, Update, UpdateFn, norm

OptimizerName = Literal["sgd", "adam", "adamw"]
Schedule = Literal["constant", "step", "cosine", "linear"]
LOCAL_TRAININGS = ("local_sgd", "local_training", "scaffold")  # the links that turn gradients into an update, by name


@dataclass(frozen=True)
class local_sgd(Link):
    """Local training: turns a gradient function into a weight-change function (FedSGD is one step).

    Args:
        rate: learning rate of the local steps, > 0.
        steps: local steps, >= 1. E epochs over n examples in batches of b are E * n / b steps.
        batch_size: examples a step; step t takes slice t of the round's batch, in order, then from the start again; the
            last slice may be smaller. Default: the whole batch in every step.
        proximal_mu: FedProx's proximal weight: mu * (theta - theta_global) is added to each step's gradient.

    Example:
        >>> local_sgd(rate=0.1, steps=4, batch_size=8).gradients(32)
        4
    """

    plain: ClassVar[bool] = True  # each step is one rate times the gradient of the next slice, plus the proximal term

    rate: Positive
    steps: Count = 1
    batch_size: Count | None = None
    proximal_mu: NotNegative = 0.0

    @property
    def accumulate(self) -> int:
        """Number of gradients that are averaged for one step."""
        return 1

    @property
    def one_gradient(self) -> bool:
        """Check that the update is one gradient, times -rate."""
        return self.steps == 1

    @property
    def adaptive(self) -> bool:
        """Check for per-entry step sizes (Adam), with which the update hides the gradient's magnitudes."""
        return False

    @property
    def words(self) -> str:
        return f"{self.steps} local step{'s' if self.steps > 1 else ''} of SGD"

    def gradients(self, size: int) -> int:
        """Count the gradients of training on a batch of this size."""
        return sum(map(len, islice(self.order(size, None), self.steps)))

    def order(self, size: int, rng: Generator | None) -> Iterator[tuple[slice | Tensor, ...]]:
        """The rows of each gradient of each step, without end; rng None: each epoch in the order given."""
        length = self.batch_size or size
        return cycle([(slice(i, i + length),) for i in range(0, size, length)])

    def rate_at(self, step: int) -> float:
        return self.rate

    def direction(self, g: Update, here: Params, memory: dict[str, Update], step: int) -> Update:
        """The move of a step against which the weights go, for a rate of 1.

        Args:
            memory: what the optimizer keeps between the steps of a round; it is updated.
        """
        return g

    @property
    def scale(self) -> float:
        """Change of the weights by one unit of a constant gradient: update ~ -scale * gradient."""
        return self.rate * self.steps

    def start(self, params: Params, step: int) -> Params:
        """The weights to which a step adds what the gradients have moved so far."""
        return params

    @property
    def beside(self) -> Update | None:
        """The update's part that is no gradient; None: there is none."""
        return None

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """Noise of each step is scaled by the rate; over several steps its sum is nearly normal."""
        if self.steps == 1:
            return replace(before, sigma=self.rate * before.sigma, scale=self.rate * before.scale)
        if before.sparse or before.signed:
            return None
        return UpdateDistribution(sigma=self.rate * math.sqrt(self.steps * before.variance), hidden=before.hidden)

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        def train(params: Params, batch: Batch, rng: Generator | None) -> Update:
            # accumulates the change itself: theta + change - theta would cost 2.5e-6 of rounding
            change: Update = {}
            memory: dict[str, Update] = {}
            for step, parts in enumerate(islice(self.order(len(batch.x), rng), self.steps)):
                start = self.start(params, step)
                here = {k: (p + change[k]).to(p.dtype) for k, p in start.items()} if change else start
                found = [compute(here, Batch(batch.x[rows], batch.y[rows]), rng) for rows in parts]
                g = found[0]
                if self.accumulate > 1:
                    g = {k: sum((other[k] for other in found[1:]), t) / self.accumulate for k, t in g.items()}
                if self.proximal_mu and change:
                    proximal = self.proximal_mu * len(parts) / self.accumulate
                    g = {k: t + proximal * change[k] for k, t in g.items()}
                rate = self.rate_at(step)
                moved = self.direction(g, here, memory, step)
                change = {k: change[k] - rate * t if change else -rate * t for k, t in moved.items()}
            beside = self.beside
            return change if beside is None else {k: t + beside[k] for k, t in change.items()}

        return train


@dataclass(frozen=True)
class LocalTraining(local_sgd):
    """The steps of one of torch's optimizers, new in each round; `local_training` builds it and explains its fields.

    Attributes:
        examples: of an epoch; None: the whole batch. An attacker's batch of several times as many has a copy for each epoch.
        smoothing: added to Adam's denominator, in means of it over each tensor: the attacker's form of a step that is nearly
            a sign.
    """

    plain = one_gradient = False  # `local_training` returns local_sgd where it is plain

    optimizer: OptimizerName = "sgd"
    momentum: NotNegative = 0.0
    nesterov: bool = False
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    schedule: Schedule = "constant"
    step_size: Count = 1
    gamma: float = 0.1
    shuffle: bool = False
    accumulate: Count = 1
    max_norm: Positive | None = None
    examples: int | None = None
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(f"momentum and nesterov belong to sgd; {self.optimizer} has betas")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")

    @property
    def adaptive(self) -> bool:
        return self.optimizer != "sgd"

    @property
    def words(self) -> str:
        names = {"momentum": self.momentum, "weight decay": self.weight_decay, "clipping to": self.max_norm}
        names_of = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
        beside = "".join(f", {name} {value:g}" for name, value in names.items() if value)
        return f"{self.steps} local step{'s' if self.steps > 1 else ''} of {names_of[self.optimizer]}{beside}"

    @property
    def mean(self) -> Link:
        """Adam's first step has almost no derivative: an attacker uses g / (|g| + mean |g|) of each tensor instead."""
        return replace(self, smoothing=1.0) if self.adaptive else self

    @property
    def scale(self) -> float:
        bare = replace(self, batch_size=None, examples=None, accumulate=1, max_norm=None, weight_decay=0.0)
        one = Batch(torch.zeros(1), torch.zeros(1, dtype=torch.int64))
        moved = bare(lambda *_: {"": torch.ones((), dtype=torch.float64)})({"": torch.zeros(()).double()}, one, None)
        return -float(moved[""])

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """Adam's first step shows little more than signs; what later steps make of noise has no closed form."""
        alone = Link.update_distribution(self, before)
        return replace(alone, signed=True) if alone is not None and self.adaptive and self.steps == 1 else alone

    def order(self, size: int, rng: Generator | None) -> Iterator[tuple[slice | Tensor, ...]]:
        length = self.examples if self.examples and size % self.examples == 0 else size
        for epoch in count():
            drawn = self.shuffle and rng is not None
            order = torch.randperm(length, generator=rng) if drawn else torch.arange(length)
            parts = (order + epoch % (size // length) * length).split(self.batch_size or length)
            for i in range(0, len(parts), self.accumulate):
                yield parts[i : i + self.accumulate]

    def rate_at(self, step: int) -> float:
        if self.schedule == "step":
            return self.rate * float(self.gamma ** (step // self.step_size))
        step -= step % self.step_size
        if self.schedule == "cosine":
            return self.rate * (1 + math.cos(math.pi * step / self.steps)) / 2
        if self.schedule == "linear":
            return self.rate * (1 - step / self.steps)
        return self.rate

    def direction(self, g: Update, here: Params, memory: dict[str, Update], step: int) -> Update:
        if self.max_norm is not None:
            factor = (self.max_norm / (norm(g) + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ rounds
            g = {k: t * factor for k, t in g.items()}
        if self.weight_decay and self.optimizer != "adamw":
            g = {k: t + self.weight_decay * here[k] for k, t in g.items()}
        first, second = memory.get("first"), memory.get("second")
        if not self.adaptive:
            memory["first"] = first = {k: self.momentum * first[k] + t for k, t in g.items()} if first else g
            return {k: t + self.momentum * first[k] for k, t in g.items()} if self.nesterov else first
        a, b = self.betas
        memory["first"] = first = {k: a * first[k] + (1 - a) * t if first else (1 - a) * t for k, t in g.items()}
        squares = {k: (1 - b) * t.square() for k, t in g.items()}
        memory["second"] = second = {k: b * second[k] + t for k, t in squares.items()} if second else squares
        a, b = (1 - beta ** (step + 1) for beta in self.betas)
        sizes = {k: _root(v / b) for k, v in second.items()}
        beside = {k: t + self.eps for k, t in sizes.items()}
        if self.smoothing:  # 0 times an infinite mean, of squares that overflow, is no number
            beside = {k: t + self.smoothing * sizes[k].mean() for k, t in beside.items()}
        move = {k: _divided(m / a, beside[k]) for k, m in first.items()}
        if self.weight_decay and self.optimizer == "adamw":
            move = {k: t + self.weight_decay * here[k] for k, t in move.items()}
        return move


def _divided(t: Tensor, by: Tensor) -> Tensor:
    """The quotient, or 0 where the divisor is: squares and eps may be below the least number, in half precision soon."""
    return torch.where(by > 0, t / torch.where(by > 0, by, 1.0), 0.0)


def _root(t: Tensor) -> Tensor:
    """The square root, with derivative 0 at zero: entries without a gradient are common."""
    return torch.where(t > 0, torch.where(t > 0, t, 1.0).sqrt(), 0.0)


def local_training(
    rate: Positive,
    examples: int,
    optimizer: OptimizerName = "sgd",
    steps: Count | None = None,
    epochs: Count | None = None,
    batch_size: Count | None = None,
    shuffle: bool = False,
    momentum: NotNegative = 0.0,
    nesterov: bool = False,
    betas: tuple[Fraction, Fraction] = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    weight_decay: NotNegative = 0.0,
    schedule: Schedule = "constant",
    step_size: Count = 1,
    gamma: float = 0.1,
    accumulate: Count = 1,
    max_norm: Positive | None = None,
    proximal_mu: NotNegative = 0.0,
) -> local_sgd:
    """Local training by torch's SGD, Adam or AdamW, in epochs or steps; a new optimizer in each round.

    Equal to torch.optim on the same batches. Where that is plain SGD over the batch in order, the result is `local_sgd`.

    Args:
        rate: learning rate, > 0.
        examples: of a round.
        optimizer: sgd, adam or adamw.
        steps: of the optimizer; default: what the epochs need.
        epochs: passes over the round's examples; default: one. Only one of steps and epochs is given.
        batch_size: examples of a batch, the last of an epoch may be smaller; default: all of them.
        shuffle: draw a new order for each epoch. An attacker does not know it.
        momentum, nesterov: of sgd.
        betas, eps: of adam and adamw.
        weight_decay: torch's: added to the gradient, or by adamw to the step.
        schedule: of the rate over the round's steps: constant, step (times gamma every step_size steps), or cosine or linear to
            zero.
        step_size: steps after which a schedule changes the rate, such as those of an epoch.
        gamma: of the schedule step.
        accumulate: batches to average for one step; the remainder at an epoch's end makes one step, divided by the same
            number.
        max_norm: clips each step's gradient, as torch.nn.utils.clip_grad_norm_ does.
        proximal_mu: FedProx's proximal weight.

    Example:
        >>> local_training(0.1, examples=8, epochs=2, batch_size=4).steps
        4

    Raises:
        ValueError: both steps and epochs are given, or two settings exclude each other.
    """
    if steps is not None and epochs is not None:
        raise ValueError("steps and epochs both say how long to train: remove one of them")
    if batch_size is not None and batch_size >= examples:
        batch_size = None
    if steps is None:
        batches = -(-examples // (batch_size or examples))
        steps = (epochs or 1) * -(-batches // accumulate)
    found = LocalTraining(
        rate,
        steps,
        batch_size,
        proximal_mu,
        optimizer=optimizer,
        momentum=momentum,
        nesterov=nesterov,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        schedule=schedule,
        step_size=step_size,
        gamma=gamma,
        shuffle=shuffle and batch_size is not None,
        accumulate=accumulate,
        max_norm=max_norm,
        examples=examples,
    )
    # the same training as plain `local_sgd` where it is that; its attacks and its digests are those of plain SGD
    if found.steps == 1 and not found.adaptive:  # momentum and schedule only change later steps
        rate = found.rate * (1 + found.momentum if found.nesterov else 1)
        found = replace(found, rate=rate, momentum=0.0, nesterov=False, schedule="constant", step_size=1, gamma=0.1)
    divides = found.batch_size is None or examples % found.batch_size == 0
    plain = LocalTraining(found.rate, found.steps, found.batch_size, found.proximal_mu, examples=examples)
    same = replace(found, betas=plain.betas, eps=plain.eps, step_size=plain.step_size, gamma=plain.gamma) == plain
    return local_sgd(found.rate, found.steps, found.batch_size, found.proximal_mu) if same and divides else found


@dataclass(frozen=True, eq=False)
class Correction:
    """SCAFFOLD's correction of a client's weights in a round: steps * rate * (c_i - c), by parameter."""

    of: Update

    def __repr__(self) -> str:
        """By its values, as caches name what they keep by the chain."""
        found = hashlib.sha256()
        for name in sorted(self.of):
            values = self.of[name].detach().cpu().contiguous().flatten().view(torch.uint8)
            found.update(name.encode() + values.numpy().tobytes())
        return f"Correction({found.hexdigest()[:16]})"


@dataclass(frozen=True)
class ControlledSGD(local_sgd):
    """SGD with steps corrected by a control variate; built by `scaffold`.

    The client's variate c_i is the mean gradient of its last round, and the global one c the mean of all clients' (option II).
    With every client in every round, and a server that averages, c is the last move of the global weights over
    -(steps * rate). So a round's correction is the global weights less the end of the client's own gradients in its last
    round, and only weights and updates travel. It uses the sent update, after any defense.
    """

    remembers = True

    correction: Correction | None = None  # of this round; None in a client's first
    corrected: bool = False  # the update is without the correction, for an attacker who knows it

    @property
    def one_gradient(self) -> bool:
        return self.steps == 1 and (self.correction is None or self.corrected)

    @property
    def words(self) -> str:
        return f"{super().words} with SCAFFOLD's control variates"

    def start(self, params: Params, step: int) -> Params:
        if self.correction is None:
            return params
        return {k: p + self.correction.of[k] * (step / self.steps) for k, p in params.items()}

    @property
    def beside(self) -> Update | None:
        return None if self.correction is None or self.corrected else self.correction.of

    def bound(self, memory: TransformState, prefix: str) -> Transform:
        def corrected(params: Params) -> ControlledSGD:
            correction = _correction_in(memory, prefix, params)
            return replace(self, correction=Correction(correction) if correction else None)

        return lambda compute: lambda params, batch, rng: corrected(params)(compute)(params, batch, rng)

    def noting(self, memory: TransformState, prefix: str) -> Transform:
        """Behind the whole chain: writes to the memory where the client was, and where its own gradients moved it."""

        def noted(params: Params, sent: Update) -> Update:
            own = own_move(sent, _correction_in(memory, prefix, params))
            memory.update({f"{prefix}at.{k}": p.detach().clone() for k, p in params.items()})
            # what is not finite must not stay for ever
            memory.update({f"{prefix}own.{k}": t.detach().nan_to_num(0.0, 0.0, 0.0) for k, t in own.items()})
            return sent

        return lambda compute: lambda params, batch, rng: noted(params, compute(params, batch, rng))


def own_move(sent: Update, correction: Update) -> Update:
    """Return the part of an update that comes from the client's gradients: the update without the round's correction."""
    return {k: t - correction[k] for k, t in sent.items()} if correction else sent


def correction_after(at: Params, own: Update, params: Params) -> Update:
    """The correction of a round that begins at params; {} if nothing was before.

    Args:
        at, own: the weights that the client began its last round with, and its own move from there.
    """
    return {k: (p - at[k]) - own[k] for k, p in params.items()} if at else {}


def _correction_in(memory: TransformState, prefix: str, params: Params) -> Update:
    """Return the correction of a round that begins at params, from the entries of a client's memory with this prefix."""
    at, own = (
        {k.removeprefix(start): t for k, t in memory.items() if k.startswith(start)}
        for start in (f"{prefix}at.", f"{prefix}own.")
    )
    return correction_after(at, own, params)


def scaffold(rate: Positive, steps: Count = 1, batch_size: Count | None = None) -> local_sgd:
    """SCAFFOLD's local steps: SGD that corrects each step by control variates (Karimireddy et al., 2020, option II).

    Every client takes part in every round, and the server averages. Each client derives the variates by itself.

    Example:
        >>> scaffold(rate=0.5, steps=4).scale
        2.0
    """
    return ControlledSGD(rate, steps, batch_size)
