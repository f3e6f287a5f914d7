"""The objective of gradient matching: the distance of a guess's update from the observed one, plus priors on the guess."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.deadline import Variables
from fedgauge.attacks.engine.gradient_distances import Distance
from fedgauge.attacks.matching.priors import Prior
from fedgauge.client.chain import Chain
from fedgauge.client.components import Checked, NotNegative
from fedgauge.client.gradient import StochasticLayer, gradient
from fedgauge.client.psnr import assigned
from fedgauge.client.transforms import is_per_example
from fedgauge.client.update import Batch, Params, Update

NOISE = "noise of "  # a variable's name, before its layer's


class TrainingModel(Checked):
    """A frozen dataclass: how the attacker computes the update of a guess. By default, the clients' whole chain."""

    order_known: ClassVar[bool] = True  # whether it takes the examples of each local step as known
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}  # of its own variables

    def epochs(self, known: Knowledge) -> int:
        """Copies of the batch among a problem's images; ValueError where there can be no copies."""
        return 1

    def variables(self, known: Knowledge) -> Variables:
        """Start values of variables other than images and labels; ValueError if they cannot be searched for."""
        return {}

    def update(self, known: Knowledge, params: Params, x: Tensor, y: Tensor, seen: Update, own: Variables) -> Update:
        """The update of a guess: normalised images x (B, C, H, W), labels y, own variables."""
        return known.forward(params, Batch(known.pixels(x), y), None)

    def terms(self, x: Tensor, epochs: int, own: Variables) -> Iterator[Tensor]:
        """Further terms (N,) of the objectives of N problems with images x (N, epochs * B, C, H, W)."""
        return iter(())


@dataclass(frozen=True)
class unrolled(TrainingModel):
    """The clients' whole chain, step by step.

    Args:
        latent: for a model with layers that draw noise: also optimise the noise, with its normal density at this weight
            (times half the mean square); None: use the layers' mean.
    """

    latent: NotNegative | None = None

    def variables(self, known: Knowledge) -> Variables:
        return {} if self.latent is None else {name: torch.zeros(size) for name, size in _noise_sizes(known).items()}

    def update(self, known: Knowledge, params: Params, x: Tensor, y: Tensor, seen: Update, own: Variables) -> Update:
        client = known.given({name.removeprefix(NOISE): t for name, t in own.items()}) if own else known.forward
        return client(params, Batch(known.pixels(x), y), None)

    def terms(self, x: Tensor, epochs: int, own: Variables) -> Iterator[Tensor]:
        return (0.5 * (self.latent or 0.0) * t.square().flatten(1).mean(1) for t in own.values())


@dataclass(frozen=True)
class tied_epochs(TrainingModel):
    """Local steps over slices of the batch in an unknown order: each epoch has its own copy of the images.

    Data leakage in federated averaging (Dimitrov et al., TMLR 2022, section 4.2). With one set of images, the search would have
    to know the slice of each image in each epoch. The copies of an image can be wrong in different ways, so an order-invariant
    term ties them; at the end they are paired and averaged.

    Args:
        tied: weight of this term.
    """

    tied: NotNegative = 1.0
    order_known: ClassVar[bool] = False

    def epochs(self, known: Knowledge) -> int:
        return passes(known.chain, known.batch_size)

    def terms(self, x: Tensor, epochs: int, own: Variables) -> Iterator[Tensor]:
        if epochs > 1:
            yield self.tied * aggregate_gap(x, epochs)


@dataclass(frozen=True)
class surrogate_gradient(TrainingModel):
    """One gradient in place of several local steps, at a point between the weights before and after them.

    The point is optimised too (SME: Zhu et al., 2023).
    """

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"at": (0.0, 1.0)}

    def variables(self, known: Knowledge) -> Variables:
        return {"at": torch.full((1,), 0.5)}

    def update(self, known: Knowledge, params: Params, x: Tensor, y: Tensor, seen: Update, own: Variables) -> Update:
        between = {k: p + own["at"].clamp(0, 1) * seen[k] for k, p in params.items()}
        slopes = gradient(known.model, known.loss, plain=known.plain)(between, Batch(x, y), None)
        return {k: -known.scale * t for k, t in slopes.items()}


class Parametrisation(Protocol):
    """A frozen dataclass: examples as a function of the free numbers that are searched for, of the same shape.

    Its weight is that of the numbers' standard normal density in the objective.
    """

    @property
    def weight(self) -> float: ...

    def bind(self, known: Knowledge) -> Callable[[Tensor, Tensor], Tensor]:
        """The examples (N, B, *shape) of free numbers and labels (N, B); ValueError where the examples are of another kind."""
        ...

    def starts(self, normal: Tensor) -> Tensor:
        """The start of the search, from standard normal numbers."""
        ...


@dataclass(frozen=True)
class Objective:
    """Likelihood and priors of images.

    Args:
        likelihood: of the observed update; None: the one of the chain's own noise, as far as the attacker knows the chain.
        priors: on the images.
        labels: "restored" before matching (or given by the threat model), or "optimised" with the image as in DLG.
        training: how the update of a guess is computed.
        parametrisation: what is searched for in place of the examples themselves; None: these.
    """

    likelihood: Distance | None = None
    priors: tuple[Prior, ...] = ()
    labels: Literal["restored", "optimised"] = "restored"
    training: TrainingModel = field(default_factory=unrolled)
    parametrisation: Parametrisation | None = None


def _noise_sizes(known: Knowledge) -> dict[str, tuple[int, int, int]]:
    """The noise that a model's layers draw while a client trains: (steps, examples of a step, numbers), by variable name."""
    steps, links = known.chain.local, known.chain.links
    layers = {n: m.drawn for n, m in known.model.named_modules() if isinstance(m, StochasticLayer) and m.drawn}
    if layers and known.batch_size > 1 and any(map(is_per_example, links)):
        raise ValueError("the chain trains on each example separately, so the noise has no common variable")
    # in a sum, one client's steps follow the other's
    total = steps.gradients(known.batch_size // known.chain.parts) * known.chain.parts
    return {f"{NOISE}{n}": (total, known.chain.slice_of(known.batch_size), numbers) for n, numbers in layers.items()}


def passes(chain: Chain, batch_size: int) -> int:
    """Count the passes of the local steps through the batch; 1 if every step takes the whole batch.

    Raises:
        ValueError: local_sgd's slices do not divide the batch, or it is a sum of several clients.
    """
    local = chain.local
    if chain.slice_of(batch_size) * chain.parts >= batch_size or local.batch_size is None:
        return 1
    slices = -(-batch_size // local.batch_size)
    if chain.parts > 1 or (local.plain and batch_size % local.batch_size):
        what = f"a sum of clients, or slices of {local.batch_size} that do not divide {batch_size} examples"
        raise ValueError(f"epochs cannot be tied for {what}: describe the training by local_training")
    return -(-local.gradients(batch_size) // slices)


def aggregate_gap(x: Tensor, count: int) -> Tensor:
    """The distance (N,) between the epochs' mean images, for copies x (N, count * B, ...).

    It is the paper's L_inv with the squared distance: the mean over all pairs of epochs of |g(copies of one) - g(copies of the
    other)|^2 / entries. g is the mean over an epoch's images.
    """
    aggregates = _apart(x, count).mean(2)
    centred = aggregates - aggregates.mean(1, keepdim=True)  # the mean over pairs is twice the variance
    return 2 * centred.square().flatten(1).mean(1)


def pair_epochs(x: Tensor, labels: Tensor | None, count: int) -> Tensor:
    """For each epoch, which of its copies belongs to each of the first epoch's (N, count, B), by least squared distance.

    Args:
        labels: (N, count * B); only copies of the same label are paired.
    """
    copies = _apart(x.detach(), count).flatten(3).double().cpu().nan_to_num()
    costs = (copies[:, :1, :, None] - copies[:, :, None]).square().sum(4)  # (N, count, B of the first, B)
    if labels is not None:
        names = _apart(labels.cpu(), count)
        costs += (names[:, :1, :, None] != names[:, :, None]) * (1 + costs.sum((2, 3), keepdim=True))
    return torch.stack([torch.stack([assigned(cost) for cost in one]) for one in costs]).to(x.device)


def averaged(t: Tensor, order: Tensor) -> Tensor:
    """The mean (N, B, ...) over epochs of copies (N, count * B, ...), in the order (N, count, B) that pairs them."""
    copies = _apart(t, order.shape[1])
    return copies.gather(2, order.view(*order.shape, *[1] * (copies.dim() - 3)).expand_as(copies)).mean(1)


def _apart(t: Tensor, count: int) -> Tensor:
    return t.view(len(t), count, -1, *t.shape[2:])
