"""How like an update a guess of sentences is: LAMP's cosine, DLG's squares, TAG's squares and magnitudes.

By ghost products where they decide it, by gradients formed one at a time where magnitudes count, by gradients formed together
where only some entries do, and through the client's whole chain where the update is more than one gradient.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import functional_call, grad, grad_and_value, vmap

from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.engine.distances import signs
from fedgauge.attacks.engine.gradients.recording import Unsupported
from fedgauge.attacks.text.ghost_products import (
    ObservedGradients,
    ProductTable,
    check_differentiable,
    formed,
    gradients,
)
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import is_mean
from fedgauge.client.training import local_sgd
from fedgauge.client.transforms import is_identity, noise_free
from fedgauge.client.update import Batch, Params, Update, UpdateFn

TOGETHER = 32  # problems in one pass, whose graph is held until it is differentiated
FEW = 4  # of those whose gradients are formed together
TINY = 1e-20
Kind = Literal["cosine", "squared", "l2_l1"]
Way = Literal["products", "streamed", "formed", "chain"]


@dataclass(frozen=True)
class GradientDistance:
    """A distance between gradients, summed as the papers of text sum it.

    Args:
        kind: cosine, the mean over tensors of 1 - cos; squared, the sum of squares; l2_l1, that and l1 times that of magnitudes.
        visible: entries that are exactly zero in what was seen do not count.
        signed: signs were seen, not values; then the kind does not matter.
    """

    kind: Kind = "cosine"
    l1: float = 0.01
    visible: bool = False
    signed: Literal["", "hinge", "tanh"] = ""

    @property
    def way(self) -> Way:
        """The cheapest way to it where the update is one gradient."""
        if self.visible or self.signed:
            return "formed"
        return "streamed" if self.kind == "l2_l1" else "products"

    def of_table(self, table: ProductTable) -> Tensor:
        """Distances (P,) by the products of every tensor."""
        if self.kind == "cosine":
            lengths = (_root(table.seen) * _root(table.expected)).clamp_min(TINY)
            return (1 - table.inner / lengths).mean(1)
        # not clamped at zero, below which rounding may take it: there the slope would end
        return (table.seen - 2 * table.inner + table.expected).sum(1)

    def of(self, seen: Update, expected: Update) -> Tensor:
        """The distance of one gradient, a scalar; also under vmap."""
        if self.signed:
            return signs(self.signed)(seen, expected)
        if self.visible:
            expected = {k: torch.where(seen[k] != 0, t, torch.zeros_like(t)) for k, t in expected.items()}
        if self.kind == "cosine":
            pairs = [(seen[k], t) for k, t in expected.items()]
            columns = [
                torch.stack([(a * b).sum() for a, b in both])
                for both in (pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])
            ]
            return self.of_table(ProductTable(*(c[None] for c in columns)))[0]
        apart = [seen[k] - t for k, t in expected.items()]
        total = torch.stack([t.square().sum() for t in apart]).sum()
        if self.kind == "l2_l1":
            total = total + self.l1 * torch.stack([t.abs().sum() for t in apart]).sum()
        return total


def _root(square: Tensor) -> Tensor:
    """Square root, safe to differentiate at zero."""
    return square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()


class SentenceGuess(NamedTuple):
    """P problems' batches of sentences.

    Args:
        x: word embeddings (P, B, L, width).
        y: labels (P, B), or next words' probabilities (P, B, L, vocabulary).
        mask: which positions exist (P, B, L).
        owners: (P,) the observation of each, in runs.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    owners: Tensor

    def split(self, size: int) -> "list[SentenceGuess]":
        """At most so many problems each."""
        return [SentenceGuess(*part) for part in zip(*(t.split(size) for t in self), strict=True)]


class Matcher:
    """Distances of guesses to the updates of a wave, and their slopes by embeddings and by soft labels.

    The word embeddings' own gradient is left out: a guess is of embeddings, which are no rows of a table.

    Args:
        keys: count the gradients of keys' biases, which are zero but for rounding, as the published code does.

    Attributes:
        way: products (no large gradient is formed), streamed (one pass, each formed and forgotten), formed (one pass, all
            formed), or chain (the client's whole chain, by vmap: several local steps, clipping, examples one by one).

    Raises:
        ValueError: the model cannot be matched, or nothing that can be compared was sent.
    """

    def __init__(self, wave: Wave, known: Knowledge, kind: Kind, l1: float = 0.01, keys: bool = False) -> None:
        assert isinstance(known.model, LanguageModel)
        self.model: LanguageModel = known.model
        check_differentiable(self.model)
        told = known.chain.update_distribution
        sparse, signed = told is not None and told.sparse, told is not None and told.signed
        self.known = replace(known, chain=known.chain.visible) if sparse else known
        hinge: Literal["hinge", "tanh"] = "hinge" if known.batch_size == 1 else "tanh"
        self.distance = GradientDistance(kind, l1, sparse, hinge if signed else "")
        # the noise-free form of a mask that is not known shrinks every entry, and those that are seen are whole
        self.scale = known.scale * (1.0 if told is None else told.shrink)
        self.params = wave.params
        parts = self.model.parts
        left = {parts.word} | known.chain.hidden | (frozenset() if keys else parts.key_biases)
        self.names = [name for name in wave.update if name not in left]
        if not self.names:
            raise ValueError("nothing was sent but the gradient of word embeddings, which no guess of embeddings has")
        # in units of the gradient, as the papers' weights are
        self.seen = ObservedGradients({name: wave.update[name] / -known.scale for name in self.names})
        self.way: Way = self._way()

    def _way(self) -> Way:
        chain, size = self.known.chain, self.known.batch_size
        others = [link for link in chain.links if not isinstance(link, local_sgd)]
        plain = all(is_identity(noise_free(link)) for link in others) and not self.distance.signed
        whole = chain.parts == 1 and chain.slice_of(size) == size
        if not (plain and whole and chain.local.steps == 1 and is_mean(self.known.loss, self.known.classes)):
            return "chain"
        return self.distance.way

    def value(self, guess: SentenceGuess) -> Tensor:
        """Distances (P,)."""
        parts = guess.split(self._together)
        return torch.cat([self._value(part) for part in parts])

    def value_and_slopes(self, guess: SentenceGuess) -> tuple[Tensor, Tensor, Tensor | None]:
        """Distances (P,), and their slopes by x, and by y where that is of probabilities."""
        found = [self._value_and_slopes(part) for part in guess.split(self._together)]
        values, by_x, by_y = zip(*found, strict=True)
        return torch.cat(values), torch.cat(by_x), None if by_y[0] is None else torch.cat(by_y)

    @property
    def _together(self) -> int:
        return TOGETHER if self.way in ("products", "streamed") else FEW

    def _value(self, guess: SentenceGuess) -> Tensor:
        if self.way != "chain":
            try:
                with torch.enable_grad():
                    found = self._in_one_pass(guess._replace(x=guess.x.detach().requires_grad_()), False)
                return found.detach()
            except Unsupported:
                self.way = "chain"
        with torch.no_grad():
            found = self._each(self._one, guess)
            assert isinstance(found, Tensor)
            return found

    def _value_and_slopes(self, guess: SentenceGuess) -> tuple[Tensor, Tensor, Tensor | None]:
        soft = guess.y.is_floating_point()
        if self.way != "chain":
            leaves = [guess.x.detach().requires_grad_()] + ([guess.y.detach().requires_grad_()] if soft else [])
            moved = guess._replace(**dict(zip(("x", "y"), leaves, strict=False)))
            try:
                with torch.enable_grad():
                    values = self._in_one_pass(moved, True)
                    slopes = torch.autograd.grad(values.sum(), leaves, materialize_grads=True)
                return values.detach(), slopes[0], slopes[1] if soft else None
            except Unsupported:
                self.way = "chain"
        # grad within vmap: autograd round a vmap of grad is wrong for LayerNorm in torch 2.13
        by = (0, 1) if soft else (0,)
        found, values = self._each(grad_and_value(self._one, by), guess)
        return values, found[0], found[1] if soft else None

    def _in_one_pass(self, guess: SentenceGuess, differentiable: bool) -> Tensor:
        x, y, mask, owners = guess
        found = gradients(self.model, self.params, x, y, mask, self.known.loss, self.names, differentiable)
        with torch.set_grad_enabled(differentiable):
            if self.way == "products":
                return self.distance.of_table(self.seen.table(found, owners))
            if self.way == "streamed":
                return self.seen.apart(found, owners, self.distance.l1)
            whole = {name: formed(part, self.params[name].shape) for name, part in found.items()}
            seen = {name: self.seen.gradient[name][owners] for name in whole}
            distances: Tensor = vmap(self.distance.of)(seen, whole)
            return distances

    def _each(self, function, guess: SentenceGuess):  # type: ignore[no-untyped-def]  # vmap keeps whatever form it returns
        seen = {name: t[guess.owners] for name, t in self.seen.gradient.items()}
        return vmap(function)(guess.x, guess.y, guess.mask, seen)

    def _one(self, x: Tensor, y: Tensor, mask: Tensor, seen: Update) -> Tensor:
        """One problem's distance through the whole chain."""
        packed = torch.cat([x, mask.to(x.dtype)[..., None]], -1)
        update = self._client(self.params, Batch(packed, y), None)
        return self.distance.of(seen, {name: update[name] / -self.scale for name in self.names})

    @property
    def _client(self) -> UpdateFn:
        """The chain round a gradient by embeddings; which positions exist stands behind them, so that slices keep it."""
        model, loss = self.model, self.known.loss

        def compute(params: Params, batch: Batch, rng: Generator | None) -> Update:
            x, mask = batch.x[..., :-1], batch.x[..., -1] > 0.5

            def objective(at: Params) -> Tensor:
                return loss(functional_call(model, at, (x, mask)), batch.y)

            return dict(grad(objective)(params))

        return self.known.chain.mean(compute)
