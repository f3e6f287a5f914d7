"""The types that every attack shares: what the server observed, knows and may spend, and what it reconstructs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedgauge.client.chain import Chain
from fedgauge.client.components import Checked, Count, Positive
from fedgauge.client.data.dataset import by_channel
from fedgauge.client.gradient import StochasticLayer, gradient
from fedgauge.client.label_kinds import LabelKind
from fedgauge.client.models.columns import Columns
from fedgauge.client.update import Batch, Loss, Params, Update, UpdateFn

Stream = Callable[..., Generator]  # stream("start", restart): a separate generator for each purpose of one observation
Streams = Sequence[Stream]  # one for each observation of a wave, in order
Role = Literal["attack", "baseline", "limit", "estimate"]  # estimate: of a limit, which an attack may pass
LIMITS: Sequence[Role] = ("limit", "estimate")
Status = Literal["converged", "out_of_budget", "diverged", "not_applicable"]
ClientState = Mapping[str, Tensor]  # an attack's memory of one client between rounds, stored on disk


@dataclass(frozen=True, eq=False)
class Observation:
    """One client's update as the server saw it in one round; it has no field for the truth.

    Args:
        buffers: the model's as the server sent them.
        correction: where SCAFFOLD's control variates moved the client, which the server knows from the earlier rounds; {}: none.
        returned: the buffers that the client sent back; {}: none.
    """

    round: int
    client: int
    params: Params
    update: Update
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    correction: Update = field(default_factory=dict)
    returned: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Wave:
    """Observations of one round with the same params, their updates stacked on a leading axis: attacks are batch-first."""

    round: int
    clients: tuple[int, ...]
    params: Params
    update: Update  # each (K, ...)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    correction: Update = field(default_factory=dict)  # as the update, or {}
    returned: Mapping[str, Tensor] = field(default_factory=dict)  # each (K, ...), or {}

    @classmethod
    def stack(cls, observations: Sequence[Observation]) -> "Wave":
        """Stack observations of one round with the same params."""
        first = observations[0]
        stacked = {k: torch.stack([o.update[k] for o in observations]) for k in first.update}
        corrected = any(o.correction for o in observations)
        correction = {
            k: torch.stack([o.correction.get(k, torch.zeros_like(o.update[k])) for o in observations]) for k in stacked
        }
        clients = tuple(o.client for o in observations)
        names = set(first.returned).intersection(*(o.returned for o in observations))
        returned = {k: torch.stack([o.returned[k] for o in observations]) for k in first.returned if k in names}
        return cls(
            first.round, clients, first.params, stacked, first.buffers, correction if corrected else {}, returned
        )

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def device(self) -> torch.device:
        return next(iter(self.params.values())).device

    def to(self, device: torch.device) -> "Wave":
        parts = (self.params, self.update, self.buffers, self.correction, self.returned)
        params, update, buffers, correction, returned = (
            {name: t.to(device) for name, t in part.items()} for part in parts
        )
        return replace(self, params=params, update=update, buffers=buffers, correction=correction, returned=returned)

    def of(self, chosen: Sequence[int]) -> "Wave":
        parts = (self.update, self.correction, self.returned)
        update, correction, returned = ({name: t[list(chosen)] for name, t in part.items()} for part in parts)
        clients = tuple(self.clients[k] for k in chosen)
        return replace(self, clients=clients, update=update, correction=correction, returned=returned)

    def alone(self, k: int) -> Update:
        return {name: t[k] for name, t in self.update.items()}


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The threat model: everything that an attack may use in addition to the observation.

    Args:
        model: the network, with the buffers that the server sent; for text a fedgauge.client.models.language:LanguageModel.
        chain: the clients' chain, as the attacker believes it to be.
        shape: (C, H, W) of an image, (L,) of a sentence, (D,) of a row.
        classes, batch_size: as agreed in the federation.
        mean, std: the per-channel normalisation in front of the model; empty for sentences and rows.
        low, high: the least and greatest value that an example may have, where there is a normalisation.
        labels: (K, B, ...) if the attacker is given them; None: it restores them.
        auxiliary: public examples of the same distribution, or None.
        loss: what the clients minimise: a mean over the batch.
        lengths: (K, B) int64, tokens of each sentence including its start and end tokens, in the order of `labels`; None: unknown.
        columns: of a table's rows; None for other examples.
        plain: differentiate by plain autograd and in loops, for a model that torch.func or vmap refuses.
        label_kind: one class, findings, numbers or none.
    """

    model: nn.Module
    chain: Chain
    shape: tuple[int, ...]
    classes: int
    batch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: float = field(default=0.0, kw_only=True)
    high: float = field(default=1.0, kw_only=True)
    labels: Tensor | None = None
    auxiliary: Batch | None = None
    loss: Loss = F.cross_entropy
    lengths: Tensor | None = None
    columns: Columns | None = None
    plain: bool = False
    label_kind: LabelKind = field(default_factory=LabelKind)

    @cached_property
    def forward(self) -> UpdateFn:
        """A client as the attacker can compute it: the whole chain, differentiable, without its noise.

        If it is given a generator, it draws what has no noise-free form: some random links, and layers that draw noise.
        """
        return self.chain.mean(gradient(self.model, self.loss, normalise=self.normalise, plain=self.plain))

    @property
    def public(self) -> Batch:
        """The auxiliary examples; ValueError if there are none."""
        return self.enough(1)

    def enough(self, least: int, remedy: str = "raise [data] auxiliary") -> Batch:
        """The auxiliary examples; ValueError if they are fewer than these."""
        count = 0 if self.auxiliary is None else len(self.auxiliary.y)
        if self.auxiliary is None or count < least:
            raise ValueError(f"it needs {least} auxiliary examples, and there are {count}: {remedy}")
        return self.auxiliary

    def given(self, noise: Mapping[str, Tensor]) -> UpdateFn:
        """`forward` with fixed noise for the model's stochastic layers: by layer name, (steps, examples of a step, numbers)."""
        bare = gradient(self.model, self.loss, normalise=self.normalise, plain=self.plain)
        layers = {name: m for name, m in self.model.named_modules() if name in noise and isinstance(m, StochasticLayer)}

        def client(params: Params, batch: Batch, rng: Generator | None) -> Update:
            steps = count()

            def step(params: Params, batch: Batch, rng: Generator | None) -> Update:
                now = next(steps)
                for name, layer in layers.items():
                    layer.noise = noise[name][now][: len(batch.x)]  # an epoch's last batch may be smaller
                try:
                    return bare(params, batch, rng)
                finally:
                    for layer in layers.values():
                        layer.noise = None

            return self.chain.mean(step)(params, batch, rng)

        return client

    def to(self, device: torch.device) -> "Knowledge":
        """The same with its tensors on a device; the model and the chain stay where they are."""
        labels, lengths = (_moved(t, device) for t in (self.labels, self.lengths))
        auxiliary = None if self.auxiliary is None else Batch(*(t.to(device) for t in self.auxiliary))
        return replace(self, labels=labels, lengths=lengths, auxiliary=auxiliary)

    def alone(self, k: int) -> "Knowledge":
        """The same of only the k-th observation: its labels and lengths, if they are given."""
        labels, lengths = (None if given is None else given[k : k + 1] for given in (self.labels, self.lengths))
        return replace(self, labels=labels, lengths=lengths)

    @property
    def scale(self) -> float:
        """Learning rate times local steps: update ~ -scale * gradient."""
        return self.chain.local.scale

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels (..., C, H, W) in [0, 1] as the model takes them; examples that are not images stay unchanged."""
        if not self.mean:
            return pixels
        mean, std = (by_channel(v, len(self.shape), pixels) for v in (self.mean, self.std))
        return (pixels - mean) / std

    def pixels(self, x: Tensor) -> Tensor:
        """The inverse of `normalise`."""
        if not self.mean:
            return x
        mean, std = (by_channel(v, len(self.shape), x) for v in (self.mean, self.std))
        return x * std + mean

    def examples(self, x: Tensor) -> Tensor:
        """Convert the network's inputs to examples: pixels in [0, 1], or rows with possible cells."""
        if self.columns is not None:
            return self.columns.rows(self.columns.cells(x))
        return self.pixels(x).clamp(self.low, self.high)


@dataclass(frozen=True)
class Budget(Checked):
    """The budget of one attack on one observation.

    Args:
        iterations: gradient evaluations, at least 1.
        restarts: independent starts, at least 1; the attack's own objective chooses among them.
        seconds: for the whole batch of updates, above 0; default: no limit.

    Example:
        >>> str(Budget(iterations=1000, restarts=2))
        '1,000 iterations x 2 restarts'
    """

    iterations: Count = 500
    restarts: Count = 1
    seconds: Positive | None = None

    def __str__(self) -> str:
        words = f"{_counted(self.iterations, 'iteration')} x {_counted(self.restarts, 'restart')}"
        return words + (f", at most {self.seconds:g} s for a batch of updates" if self.seconds is not None else "")


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """An attack's reconstruction from one observation.

    Args:
        x: (B, C, H, W) in [0, 1], token ids (B, L) int64, padded like the data, or rows (B, D); None: nothing to grade.
        y: (B, ...) labels as restored, given or optimised; None: the attack claims none.
        objective: of the attack itself, at the end; it chooses among restarts.
        iterations: spent; seconds: a wave's are shared equally among its observations, by the audit, which measures them.
        status: converged (ran its schedule to the end), out_of_budget (time ended it), diverged, not_applicable.
        reason: why the status is not converged; for converged ones an optional note on what is proven or how it was found.
        confidence: of a row's cells (B, F) in [0, 1], as the attack judges itself; None: it does not.
    """

    x: Tensor | None
    y: Tensor | None
    objective: float
    iterations: int
    seconds: float
    status: Status
    reason: str = ""
    confidence: Tensor | None = None

    def to(self, device: torch.device) -> "Reconstruction":
        x, y, confidence = (_moved(t, device) for t in (self.x, self.y, self.confidence))
        return replace(self, x=x, y=y, confidence=confidence)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their names in its file: what `from_tensors` reads back."""
        named = {"x": self.x, "y": self.y, "confidence": self.confidence}
        return {name: t for name, t in named.items() if t is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], status: Status, seconds: float) -> "Reconstruction":
        """Restore a reconstruction from a file's tensors and its ledger row; objective and iterations stay in the ledger."""
        x, y, confidence = (tensors.get(name) for name in ("x", "y", "confidence"))
        return cls(x, y, math.nan, 0, seconds, status, confidence=confidence)


def _moved(t: Tensor | None, device: torch.device) -> Tensor | None:
    return None if t is None else t.to(device)


class Attack(Checked, ABC):
    """A frozen dataclass: its fields are the hyperparameters, its methods state capabilities and needs."""

    is_stateful: ClassVar[bool] = False  # whether it remembers what it learned from a client's earlier updates
    decodes: ClassVar[tuple[str, ...]] = ()  # server attacks of which the plan must have one; empty: any or none
    tunes: ClassVar[bool] = False  # whether it has `variants`
    needs_secure_sum: ClassVar[bool] = False  # whether it reads the sum of several clients' updates

    @property
    def label_source(self) -> Literal["restored", "optimised"]:
        """Source of its labels, unless the threat model gives them."""
        return "restored"

    @property
    def needs_derivative(self) -> bool:
        """Return whether it descends through the clients' chain and so needs its derivative."""
        return False

    @property
    def trains_first(self) -> bool:
        """Return whether it first trains or loads a network, which may take minutes."""
        return False

    @property
    def role(self) -> Role:
        """Role of its scores in comparisons: a baseline reads no update, and a limit bounds every attack."""
        return "attack"

    @property
    def watched(self) -> Sequence[int]:
        """The only clients it observes, in every round; empty: those that the plan attacks."""
        return ()

    @property
    def metric(self) -> str:
        """The metric that it headlines, if it reconstructs nothing; empty: the main one of its data."""
        return ""

    @property
    def takes_gradients(self) -> bool:
        """Return whether it reads the update as a gradient and cannot account for anything else in it."""
        return not (self.needs_derivative or self.trains_first)

    @property
    def on_cpu(self) -> bool:
        """Return whether it runs on the CPU even where there is a GPU: small work, or exact in double precision."""
        return False

    @abstractmethod
    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        """One reconstruction for each observation of the wave, in order.

        Args:
            streams: one for each observation; they are the only source of randomness, so packing does not change a start.
        """

    def advance(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams, memories: Sequence[ClientState]
    ) -> tuple[list[Reconstruction], list[ClientState]]:
        """`reconstruct`, and each client's new state; see StatefulAttack."""
        return self.reconstruct(wave, known, budget, streams), list(memories)

    def variants(self, known: Knowledge) -> Mapping[str, "Attack"]:
        """The attack with other settings, by what is different in words; empty if it has nothing to tune."""
        return {}


class StatefulAttack(Attack):
    """An attack with memory: earlier updates of a client change how it attacks the next one.

    It attacks a client's observations in the order of their rounds, each client for itself.
    """

    is_stateful: ClassVar[bool] = True

    @abstractmethod
    def advance(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams, memories: Sequence[ClientState]
    ) -> tuple[list[Reconstruction], list[ClientState]]:
        """One reconstruction for each observation of the wave, and the new state of its client, in order.

        Args:
            memories: each client's state after the attack on its last observation, empty before the first; read only.
        """

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        return self.advance(wave, known, budget, streams, [{} for _ in wave.clients])[0]


def not_applicable(wave: Wave, reason: str) -> list[Reconstruction]:
    """The results of an attack that cannot work on these observations."""
    return [Reconstruction(None, None, float("nan"), 0, 0.0, "not_applicable", reason) for _ in wave.clients]
