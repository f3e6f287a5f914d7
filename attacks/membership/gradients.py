"""Gradients of many candidates at the weights that the server sent, without holding all of them at once."""

import warnings
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.batch_limiter import raise_if_exhausted
from fedgauge.attacks.engine.gradients.factored import FactoredGradient, formed
from fedgauge.attacks.engine.gradients.layers import Unsupported
from fedgauge.attacks.engine.gradients.per_problem import gradients
from fedgauge.client.chain import Chain
from fedgauge.client.gradient import StochasticLayer, gradient
from fedgauge.client.models.losses import is_mean, loss_of
from fedgauge.client.transforms import is_per_example
from fedgauge.client.update import Batch, Params, Update

CHUNK = 128  # candidates that are differentiated together
ENTRIES = 2**28  # of their gradients, as far as one has fewer: a gibibyte


@dataclass(frozen=True, eq=False)
class CandidateGradients:
    """The gradients of N candidates' own losses; zero where the chain freezes the network.

    Args:
        params: the weights that the server sent.
        batch: the candidates: x (N, ...) in [0, 1], y (N,).
        chunk: the most candidates that are differentiated together; fewer where their gradients are large.
        draws: source of what the network itself draws (PRECODE); None: it counts with its mean.

    Raises:
        ValueError: the network or the loss mixes examples, so that a candidate has no gradient of its own.
    """

    known: Knowledge
    params: Params
    batch: Batch
    chunk: int = CHUNK
    draws: Generator | None = None

    def __post_init__(self) -> None:
        mixes = any(isinstance(module, _BatchNorm) and module.training for module in self.known.model.modules())
        if mixes or not is_mean(self.known.loss, self.known.classes, self.known.label_kind):
            reason = "BatchNorm in train mode (set it to eval mode), or a loss that is no mean over examples"
            raise ValueError(f"a candidate has no gradient of its own: {reason}")
        together = ENTRIES // sum(t.numel() for t in self.params.values())
        object.__setattr__(self, "chunk", max(1, min(self.chunk, together)))

    @property
    def is_stochastic(self) -> bool:
        """Return whether the network draws random numbers, so that its loss may depend on more than the logits."""
        return any(isinstance(module, StochasticLayer) for module in self.known.model.modules())

    def __len__(self) -> int:
        return len(self.batch.x)

    @cached_property
    def _frozen(self) -> set[str]:
        links = [getattr(link, "inner", link) for link in self.known.chain.links]
        says = [frozen for link in links if (frozen := getattr(link, "frozen", None))]  # the defense `freeze`
        return {name for name in self.params if any(frozen(name) for frozen in says)}

    @cached_property
    def losses(self) -> Tensor:
        return self.losses_at(self.params)

    def losses_at(self, params: Params) -> Tensor:
        """(N,) float64, each candidate's loss at other weights."""
        losses: list[Tensor] = []
        with torch.no_grad():
            for part in self._parts():
                x = self.known.normalise(part.x)
                read = functional_call(self.known.model, params, (x,)), part.y, x
                losses += [loss_of(self.known.loss, *(t[i : i + 1] for t in read)) for i in range(len(x))]
        return torch.stack(losses).double()

    def products(self, directions: Tensor) -> Tensor:
        """<gradient, direction> for each direction (K, d), flattened in the order of the weights: (K, N) float64."""
        return torch.cat([(rows @ directions.T).double() for rows in self.rows()]).T

    @cached_property
    def norms(self) -> Tensor:
        """(N,) float64, each gradient's Euclidean norm; gradients of large layers are not formed."""
        return self._norms(self._frozen)

    def _norms(self, frozen: Set[str]) -> Tensor:
        try:
            parts = (self._factored(part, True).items() for part in self._parts())
            squares = [torch.stack([_squares(t) for k, t in part if k not in frozen]).sum(0) for part in parts]
        except Unsupported:
            squares = [rows.double().square().sum(1) for rows in self._rows(frozen)]
        return torch.cat(squares).sqrt()

    def rows(self) -> Iterator[Tensor]:
        """The gradients (n, d), a chunk of candidates at a time, flattened in the order of the weights."""
        return self._rows(self._frozen)

    def _rows(self, frozen: Set[str]) -> Iterator[Tensor]:
        for part in self._parts():
            found = self._formed(part)
            seen = (torch.zeros_like(found[k]) if k in frozen else found[k] for k in self.params)
            yield torch.cat([t.flatten(1) for t in seen], 1)

    def _formed(self, part: Batch) -> Update:
        bare = gradient(self.known.model, self.known.loss, normalise=self.known.normalise, plain=self.known.plain)
        if not self.known.plain and self.draws is None:
            with suppress(Unsupported):
                return {k: formed(t, self.params[k].shape).detach() for k, t in self._factored(part, False).items()}
            try:
                with warnings.catch_warnings():  # an operator without a rule is as fast example by example
                    warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                    return vmap(lambda x, y: bare(self.params, Batch(x[None], y[None]), None))(*part)
            except RuntimeError as error:  # not every network works under vmap
                raise_if_exhausted(error)
        each = [bare(self.params, Batch(x[None], y[None]), self.draws) for x, y in zip(*part, strict=True)]
        return {k: torch.stack([one[k] for one in each]) for k in self.params}

    def _factored(self, part: Batch, factors: bool) -> dict[str, Tensor | FactoredGradient]:
        if self.known.plain or self.is_stochastic or not part.x.is_floating_point():
            raise Unsupported("the gradients of words, of penalties, and plain autograd, are formed as a whole")
        x = self.known.normalise(part.x)[:, None].requires_grad_()
        return gradients(self.known.model, self.params, x, part.y[:, None], 1.0, factors, self.known.loss)

    def _parts(self) -> Iterator[Batch]:
        return map(Batch, self.batch.x.split(self.chunk), self.batch.y.split(self.chunk))

    @cached_property
    def kept(self) -> Tensor:
        """(N,) float64 in (0, 1]: the part of each gradient that enters the mean, where links clip it by its norm."""
        links = [link for link in self.known.chain.links if is_per_example(link)]
        if not links:
            return torch.ones(len(self), dtype=torch.float64)
        none = torch.zeros(1, dtype=torch.int64)

        def clipped(size: Tensor) -> Tensor:
            return Chain(tuple(links)).mean(lambda *_: {"": size[None]})({}, Batch(size.view(1, 1), none), None)[""][0]

        # a vector of one entry has the gradient's norm, before layers are frozen; a zero gradient enters as it is
        whole = self._norms(frozenset()) if self._frozen else self.norms
        return torch.where(whole > 0, torch.stack([clipped(size) for size in whole]) / whole, 1.0)


def _squares(part: Tensor | FactoredGradient) -> Tensor:
    """The squared norms (P,) of a tensor's gradients (P, ...), float64."""
    if not isinstance(part, FactoredGradient):
        return part.detach().double().flatten(1).square().sum(1)
    signals, inputs = (torch.bmm(t, t.transpose(1, 2)).detach().double() for t in part)
    return (signals * inputs).flatten(1).sum(1)
