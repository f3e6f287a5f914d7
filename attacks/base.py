"""The vocabulary of attacks: what a curious server saw, what it knows, what it may spend, what it gets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedgauge.client.chain import Chain
from fedgauge.client.training import StochasticLayer, gradient
from fedgauge.client.update import Batch, Loss, Params, Update, UpdateFn

Stream = Callable[..., Generator]  # stream("start", restart): a generator of its own for one purpose of one observation
Status = Literal["converged", "out_of_budget", "diverged", "not_applicable"]
ClientState = Mapping[
    str, Tensor
]  # what an attack keeps of one client from round to round; between them it lies on disk


@dataclass(frozen=True, eq=False)
class Observation:
    """What the server saw of one client in one round; it has no field for the truth."""

    round: int
    client: int
    params: Params
    update: Update
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Wave:
    """Observations of one round, which share params, with their updates stacked on a leading axis: attacks are batch-first."""

    round: int
    clients: tuple[int, ...]
    params: Params
    update: Update  # each (K, ...)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def stack(cls, observations: Sequence[Observation]) -> "Wave":
        """One wave of observations of the same round and params; ValueError when they are of several rounds."""
        first = observations[0]
        if any(o.round != first.round for o in observations):
            raise ValueError(f"a wave is of one round, got {sorted({o.round for o in observations})}")
        stacked = {k: torch.stack([o.update[k] for o in observations]) for k in first.update}
        return cls(first.round, tuple(o.client for o in observations), first.params, stacked, first.buffers)

    def __len__(self) -> int:
        return len(self.clients)

    def of(self, chosen: Sequence[int]) -> "Wave":
        """The wave of some of its observations."""
        update = {name: t[list(chosen)] for name, t in self.update.items()}
        return replace(self, clients=tuple(self.clients[k] for k in chosen), update=update)

    def alone(self, k: int) -> Update:
        """The k-th observation's update."""
        return {name: t[k] for name, t in self.update.items()}


@dataclass(frozen=True, eq=False)
class Sentences:
    """What an attacker of text knows beside what the model says of its words.

    Args:
        lengths: (K, B) int64, tokens of each sentence with those that frame it, by label as `labels` are; None: not known.
    """

    lengths: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The threat model: all that an attack may use besides the observation.

    Args:
        model: the network, with the buffers that the server sent; of text, a fedgauge.client.models.language:LanguageModel.
        chain: the clients' chain as the attacker believes it to be.
        shape: (C, H, W) of an image, (L,) of a sentence.
        classes, batch_size: as agreed in the federation.
        mean, std: the per-channel normalisation in front of the model; empty where the examples are no images.
        labels: (K, B) int64 where the attacker is given them, else None: it restores them.
        auxiliary: public examples of the same distribution, else None.
        loss: what the clients minimise: a mean over the batch.
        text: None of images.
    """

    model: nn.Module
    chain: Chain
    shape: tuple[int, ...]
    classes: int
    batch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: Tensor | None = None
    auxiliary: Batch | None = None
    loss: Loss = F.cross_entropy
    text: Sentences | None = None

    @cached_property
    def forward(self) -> UpdateFn:
        """A client as the attacker can compute it: the whole chain, differentiable, without its noise.

        Handed a generator, it draws from it what has no noise-free form: links that are random all the same, and layers.
        """
        return self.chain.mean(gradient(self.model, self.loss, normalise=self.normalise))

    def given(self, noise: Mapping[str, Tensor]) -> UpdateFn:
        """`forward`, with the noise that layers of the model draw: by layer, (steps, examples of a step, numbers)."""
        bare = gradient(self.model, self.loss, normalise=self.normalise)
        layers = {name: m for name, m in self.model.named_modules() if name in noise and isinstance(m, StochasticLayer)}

        def client(params: Params, batch: Batch, rng: Generator | None) -> Update:
            steps = count()

            def step(params: Params, batch: Batch, rng: Generator | None) -> Update:
                now = next(steps)
                for name, layer in layers.items():
                    layer.noise = noise[name][now]
                try:
                    return bare(params, batch, rng)
                finally:
                    for layer in layers.values():
                        layer.noise = None

            return self.chain.mean(step)(params, batch, rng)

        return client

    @property
    def scale(self) -> float:
        """update ~ -scale * gradient: learning rate times local steps."""
        return self.chain.local.scale

    def normalise(self, pixels: Tensor) -> Tensor:
        """x (..., C, H, W) in [0, 1] to what the model is fed, as which everything else is fed already."""
        if not self.mean:
            return pixels
        mean, std = self._statistics(pixels)
        return (pixels - mean) / std

    def pixels(self, x: Tensor) -> Tensor:
        """The inverse of `normalise`."""
        if not self.mean:
            return x
        mean, std = self._statistics(x)
        return x * std + mean

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (
            torch.tensor(v, dtype=like.dtype, device=like.device).view(-1, 1, 1) for v in (self.mean, self.std)
        )
        return mean, std


@dataclass(frozen=True)
class Budget:
    """What one attack on one observation may spend: gradient evaluations, restarts, seconds of the whole wave."""

    iterations: int = 500
    restarts: int = 1
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}")
        if self.restarts < 1:
            raise ValueError(f"restarts must be at least 1, got {self.restarts}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")

    def __str__(self) -> str:
        words = f"{_counted(self.iterations, 'iteration')} x {_counted(self.restarts, 'restart')}"
        return words + (f", at most {self.seconds:g} s a wave" if self.seconds is not None else "")


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


@dataclass(frozen=True, eq=False)
class Trace:
    """T snapshots of an attack on its way: what it would have handed out if it had stopped there.

    Args:
        iteration: (T,) int64, gradient evaluations spent.
        objective: (T,) float64, the attack's own.
        x: (T, B, C, H, W) uint8, pixels in 255ths.
    """

    iteration: Tensor
    objective: Tensor
    x: Tensor


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What an attack made of one observation.

    Args:
        x: (B, C, H, W) in [0, 1], or token ids (B, L) int64, padded as the data are; None where there is none to grade.
        y: (B,) int64 labels as restored, given or optimised; None where the attack claims none.
        objective: the attack's own, at the end; restarts are chosen by it.
        iterations, seconds: spent; the seconds of a wave are shared equally among its observations.
        status: converged (ran its schedule to the end), out_of_budget (time ended it), diverged, not_applicable.
        reason: why, where the status is not converged; else what is proven of it, or how it was found, where that is to be told.
        trace: of the restart that was chosen, from its start to this; None where none was asked for.
    """

    x: Tensor | None
    y: Tensor | None
    objective: float
    iterations: int
    seconds: float
    status: Status
    reason: str = ""
    trace: Trace | None = None


class Attack(ABC):
    """A frozen dataclass whose fields are the attack's hyperparameters."""

    @abstractmethod
    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        """One reconstruction for each observation of the wave, in order.

        Args:
            streams: one for each observation; all randomness comes from them, so packing does not change a start.
        """

    def traced(self, snapshots: int) -> "Attack":
        """The same attack, with about so many snapshots kept of each reconstruction; ValueError where it has no way to go."""
        raise ValueError(f"{type(self).__name__} does not iterate: it has no trace")


class StatefulAttack(Attack):
    """An attack with memory: what it made of a client's earlier updates changes how it meets the next one.

    It meets the observations of a client in the order of their rounds; what it remembers of one client owes nothing to others.
    """

    @abstractmethod
    def initial(self) -> ClientState:
        """What is remembered of a client that was never met."""

    @abstractmethod
    def advance(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream], memories: Sequence[ClientState]
    ) -> tuple[list[Reconstruction], list[ClientState]]:
        """One reconstruction for each observation of the wave, and what is remembered of its client afterwards, in order.

        Args:
            memories: one for each observation, as the attack on its client's last one left it; not written to.
        """

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        return self.advance(wave, known, budget, streams, [self.initial() for _ in wave.clients])[0]


def not_applicable(wave: Wave, reason: str) -> list[Reconstruction]:
    """The honest answer of an attack that cannot work on these observations."""
    return [Reconstruction(None, None, float("nan"), 0, 0.0, "not_applicable", reason) for _ in wave.clients]
