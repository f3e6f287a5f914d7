"""Simulates clients' updates for any examples, through the chain as the attacker knows it.

The chain's links draw noise from the attacker's generator; attacks that need gradients use noise-free forms.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Generator, Tensor
from torch.func import vmap

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.gradients.layers import Unsupported
from fedgauge.attacks.engine.gradients.per_problem import examples_are_independent, whole_batch_update
from fedgauge.client.chain import Chain
from fedgauge.client.gradient import gradient
from fedgauge.client.models.losses import is_mean
from fedgauge.client.transforms import GroupMean
from fedgauge.client.update import Batch, Params, Update, UpdateFn

CHUNK = 128  # clients at once: LeNet's updates of so many are 8 MB
NUMBERS = 2**26  # entries of the updates computed at once, 256 MB: only a few updates of a language model


@dataclass(frozen=True, eq=False)
class Simulator:
    """Simulates clients under one model, with any images.

    Args:
        known: has the chain; if it ends in a sum, each of its clients draws separately.
        quiet: use the chain's noise-free form.
    """

    known: Knowledge
    params: Params
    quiet: bool = False

    @property
    def members(self) -> int:
        return next((link.members for link in self.known.chain.links if isinstance(link, GroupMean)), 1)

    @property
    def client(self) -> Chain:
        links = tuple(link for link in self.known.chain.links if not isinstance(link, GroupMean))
        return Chain(links).mean if self.quiet else Chain(links)

    def updates(self, x: Tensor, y: Tensor, rng: Generator, chunk: int = CHUNK) -> Iterator[Update]:
        """The updates (n, ...) of N batches x (N, B, C, H, W) in [0, 1] with labels y (N, B), a few at a time, in order."""
        entries = sum(p.numel() for p in self.params.values())
        chunk = max(1, min(chunk, NUMBERS // entries) // self.members)
        together = True
        for some, labels in zip(x.split(chunk), y.split(chunk), strict=True):
            batches = self._apart(some, labels)
            found = self._together(batches, rng) if together else None
            together = found is not None  # else the chain itself, also for the remaining batches
            found = self._by_chain(batches, rng) if found is None else found
            yield self._summed({k: t.detach() for k, t in found.items()})

    def differentiable(self, x: Tensor, y: Tensor) -> Update:
        """The updates (n, ...) of batches x (n, B, C, H, W), differentiable by x; for a quiet simulator."""
        batches = self._apart(x, y)
        found = self._together(batches, None)
        return self._summed(_mapped(self._bare(), self.params, batches, None) if found is None else found)

    def _apart(self, x: Tensor, y: Tensor) -> Batch:
        return Batch(*(t.reshape(-1, t.shape[1] // self.members, *t.shape[2:]) for t in (x, y)))

    def _summed(self, updates: Update) -> Update:
        if self.members == 1:
            return updates
        return {k: t.view(-1, self.members, *t.shape[1:]).mean(1) for k, t in updates.items()}

    def _together(self, batches: Batch, rng: Generator | None) -> Update | None:
        """All clients' updates in one pass, differentiable; None where the model or the chain does not allow it."""
        model, known = self.known.model, self.known
        step = whole_batch_update(self.client, known.loss, rng, by_example=True)
        differentiable = batches.x.is_floating_point()  # token ids have no gradient, which one pass needs
        if step is None or not differentiable or not is_mean(known.loss, known.classes, known.label_kind):
            return None
        x = known.normalise(batches.x)
        if not examples_are_independent(model, self.params, torch.stack([x[0], 0.5 * x[-1]])):
            return None
        try:
            found = step(model, self.params, x.requires_grad_(), batches.y, False)  # what requires grad keeps its graph
        except Unsupported:
            return None
        return cast(Update, found)

    def _bare(self) -> UpdateFn:
        return self.client(gradient(self.known.model, self.known.loss, normalise=self.known.normalise))

    def _by_chain(self, batches: Batch, rng: Generator) -> Update:
        client, state = self._bare(), rng.get_state()
        if len(batches.x) > 1:
            try:
                return _mapped(client, self.params, batches, rng)
            except (RuntimeError, ValueError):  # such as a link that branches on values: then one client at a time
                rng.set_state(state)
        alone = [client(self.params, Batch(x, y), rng) for x, y in zip(*batches, strict=True)]
        return {k: torch.stack([one[k] for one in alone]) for k in alone[0]}


def _mapped(client: UpdateFn, params: Params, batches: Batch, rng: Generator | None) -> Update:
    def one(x: Tensor, y: Tensor) -> Update:
        return client(params, Batch(x, y), rng)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # fused attention has no rule for vmap
        found: Update = vmap(one, randomness="different")(*batches)
    return found
