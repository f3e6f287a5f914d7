"""Distances between an update and guesses of its sentences: LAMP's cosine, DLG's squares, TAG's squares and magnitudes.

Ghost products suffice for cosine and squares. Gradients are formed, one matrix at a time, where magnitudes or only some entries
count, and go through the client's whole chain where the update is more than one gradient.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.utils._pytree import tree_map

from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.engine.batch_limiter import raise_if_exhausted
from fedgauge.attacks.engine.gradient_distances import InnerProducts, cosine, each, root, signs
from fedgauge.attacks.text.certificate import Unreadable, language_model
from fedgauge.attacks.text.ghost_products import ObservedGradients, SentenceGuess, gradients
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.losses import is_mean
from fedgauge.client.transforms import UpdateDistribution, is_identity, noise_free
from fedgauge.client.update import Batch, Params, Update, UpdateFn

TOGETHER = 32  # problems in one pass; its graph stays in memory until it is differentiated
FEW = 4  # problems in one pass that forms all gradients together
TINY = 1e-20
Kind = Literal["cosine", "squared", "l2_l1"]
Way = Literal["products", "formed", "chain"]


class Matcher:
    """Distances of guesses to the updates of a wave, and their slopes by embeddings and by soft labels.

    The word embeddings' own gradient is left out: a guess consists of embeddings that are no rows of the table.

    Args:
        kind: cosine, the mean over tensors of 1 - cos; squared, the sum of squares; l2_l1, squares plus l1 times magnitudes. It has
            no effect where signs were observed instead of values.
        keys: count the gradients of keys' biases, which are zero up to rounding, as the published code does.

    Attributes:
        way: products (one pass, no large gradient is formed), formed (one pass, each gradient is formed and freed), or chain (the
            client's whole chain by vmap: several local steps, clipping, per-example links).

    Raises:
        Unreadable: the model reads no sentences, or the update has nothing to compare.
    """

    def __init__(self, wave: Wave, known: Knowledge, kind: Kind, l1: float = 0.01, keys: bool = False) -> None:
        self.model = language_model(known)
        distribution = known.chain.update_distribution or UpdateDistribution()
        self.known = replace(known, chain=known.chain.visible) if distribution.sparse else known
        self.kind, self.l1 = kind, l1 if kind == "l2_l1" else 0.0
        self.signed = signs("hinge" if known.batch_size == 1 else "tanh") if distribution.signed else None
        # the noise-free form of an unknown mask shrinks every entry, but the entries that are seen are not shrunk
        self.scale = known.scale * distribution.shrink
        self.params = wave.params
        parts = self.model.parts
        left = {parts.word} | known.chain.hidden | (frozenset() if keys else parts.key_biases)
        self.names = [name for name in wave.update if name not in left]
        if not self.names:
            raise Unreadable("the update holds only the gradient of word embeddings, which matching cannot use")
        # in units of the gradient, as the papers' weights are
        observed = {name: wave.update[name] / -known.scale for name in self.names}
        self.seen = ObservedGradients(observed, distribution.sparse)
        chain, size = self.known.chain, known.batch_size
        others = (link for link in chain.links if not isinstance(link, local_sgd))
        plain = all(is_identity(noise_free(link)) for link in others) and self.signed is None
        whole = chain.parts == 1 and chain.slice_of(size) == size and chain.local.one_gradient
        self.way: Way = "formed" if kind == "l2_l1" else "products"
        if not (plain and whole and is_mean(known.loss, known.classes, known.label_kind)):
            self.way = "chain"

    def value(self, guess: SentenceGuess) -> Tensor:
        """Distances (P,)."""
        return torch.cat([self._of(part, False)[0] for part in self._parts(guess)])

    def value_and_slopes(self, guess: SentenceGuess) -> tuple[Tensor, Tensor, Tensor | None]:
        """Distances (P,), and their slopes by x, and by y where y holds probabilities."""
        values, *slopes = zip(*(self._of(part, True) for part in self._parts(guess)), strict=True)
        by_x, *by_y = (torch.cat(parts) for parts in slopes)
        return torch.cat(values), by_x, by_y[0] if by_y else None

    def _parts(self, guess: SentenceGuess) -> Iterator[SentenceGuess]:
        size = FEW if self.way == "chain" else TOGETHER
        for part in zip(*(t.split(size) for t in guess), strict=True):
            yield SentenceGuess(*part)

    def _of(self, guess: SentenceGuess, differentiable: bool) -> tuple[Tensor, ...]:
        """Distances (P,) and, if differentiable, their slopes by x, and by y where y holds probabilities."""
        places = (0, 1) if guess.y.is_floating_point() else (0,)
        if self.way != "chain":
            leaves = [guess[i].detach().requires_grad_() for i in places]
            try:
                with torch.enable_grad():
                    values = self._in_one_pass(SentenceGuess(*leaves, *guess[len(leaves) :]), differentiable)
                    slopes = torch.autograd.grad(values.sum(), leaves, materialize_grads=True) if differentiable else ()
                return values.detach(), *slopes
            except Exception as error:  # a user's model may raise anything on many problems at once
                raise_if_exhausted(error)
                self.way = "chain"
        if not differentiable:
            with torch.no_grad():
                return (self._each(self._one, guess),)
        # grad within vmap: autograd around a vmap of grad is wrong for LayerNorm in torch 2.13
        slopes, values = self._each(grad_and_value(self._one, places), guess)
        return values, *slopes

    def _in_one_pass(self, guess: SentenceGuess, differentiable: bool) -> Tensor:
        parts = gradients(self.model, self.params, guess, self.known.loss, self.names, differentiable)
        with torch.set_grad_enabled(differentiable):
            if self.way == "products":
                return self._of_products(self.seen.products(parts, guess.owners))
            return self.seen.apart(parts, guess.owners, self.l1)

    def _of_products(self, products: InnerProducts) -> Tensor:
        """Distances (P,) from the products (P, T) of every tensor."""
        inner, seen, expected = products
        if self.kind == "cosine":
            return (1 - inner / (root(seen) * root(expected)).clamp_min(TINY)).mean(1)
        # not clamped at zero, although rounding may go below: the slope would vanish there
        return (seen - 2 * inner + expected).sum(1)

    def _each(self, function, guess: SentenceGuess):  # type: ignore[no-untyped-def]  # vmap keeps the structure of what it returns
        seen = {name: t[guess.owners] for name, t in self.seen.gradient.items()}
        try:
            return vmap(function)(guess.x, guess.y, guess.mask, seen)
        except Exception as error:  # a user's model may raise anything under vmap
            raise_if_exhausted(error)
        alone = [{name: t[i] for name, t in seen.items()} for i in range(len(guess.x))]
        problems = zip(guess.x, guess.y, guess.mask, alone, strict=True)
        return tree_map(lambda *same: torch.stack(same), *[function(*one) for one in problems])

    def _one(self, x: Tensor, y: Tensor, mask: Tensor, seen: Update) -> Tensor:
        """One problem's distance, computed through the whole chain."""
        packed = torch.cat([x, mask.to(x.dtype)[..., None]], -1)
        update = self._client(self.params, Batch(packed, y), None)
        expected = {name: update[name] / -self.scale for name in self.names}
        if self.signed is not None:
            return self.signed(seen, expected)
        if self.seen.visible:
            expected = {k: torch.where(seen[k] != 0, t, torch.zeros_like(t)) for k, t in expected.items()}
        if self.kind == "cosine":
            return each(cosine())(seen, expected)
        apart = [seen[k] - t for k, t in expected.items()]
        return torch.stack([t.square().sum() + self.l1 * t.abs().sum() for t in apart]).sum()

    @cached_property
    def _client(self) -> UpdateFn:
        """The chain around a gradient at embeddings; the mask is packed behind them, so that slices of a batch keep it."""

        def compute(params: Params, batch: Batch, rng: Generator | None) -> Update:
            x, mask = batch.x[..., :-1], batch.x[..., -1] > 0.5

            def objective(at: Params) -> Tensor:
                return self.known.loss(functional_call(self.model, at, (x, mask)), batch.y)

            return dict(grad(objective)(params))

        return self.known.chain.mean(compute)
