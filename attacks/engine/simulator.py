"""Simulates the updates that clients would send for any examples, through the chain as the attacker knows it.

The chain's own links draw noise from the attacker's generator; noise-free forms are for attacks that need gradients.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import vmap

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.gradients.per_problem import examples_are_independent, gradients, local_training_changes
from fedgauge.attacks.engine.gradients.recording import Unsupported
from fedgauge.client.chain import Chain
from fedgauge.client.models.losses import is_mean
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.transforms import GroupMean, UpdateTransform, is_identity, per_example
from fedgauge.client.update import Batch, Params, Update, UpdateFn

CHUNK = 128  # clients at once: LeNet's updates of so many are 8 MB
NUMBERS = 2**26  # entries of the updates computed at once, 256 MB: only a few updates of a language model


class Stages(NamedTuple):
    """The stages of a chain whose only gradients are those of whole batches, or of single examples."""

    each: tuple[UpdateTransform, ...]  # on each example's gradient
    before: tuple[UpdateTransform, ...]  # on the batch's gradient
    local: local_sgd
    after: tuple[UpdateTransform, ...]  # on the finished update


def stages(chain: Chain) -> Stages | None:
    """The stages of a client's chain; None if it computes in another way, so that it has to run itself."""
    place = chain.links.index(chain.local)
    front, after = ([k for k in part if not is_identity(k)] for part in (chain.links[:place], chain.links[place + 1 :]))
    one_by_one = [k.inner for k in front if isinstance(k, per_example)]
    before = [k for k in front if not isinstance(k, per_example)]
    if front != [k for k in front if isinstance(k, per_example)] + before:
        return None
    each, whole, last = (
        tuple(k for k in part if isinstance(k, UpdateTransform)) for part in (one_by_one, before, after)
    )
    if len(each) + len(whole) + len(last) < len(one_by_one) + len(before) + len(after):
        return None
    if not chain.local.plain or chain.local.batch_size is not None or (front and chain.local.steps > 1):
        return None
    return Stages(each, whole, chain.local, last)


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
        """Clients in one update."""
        return next((link.members for link in self.known.chain.links if isinstance(link, GroupMean)), 1)

    @property
    def client(self) -> Chain:
        """The chain of each client."""
        links = tuple(link for link in self.known.chain.links if not isinstance(link, GroupMean))
        return Chain(links).mean if self.quiet else Chain(links)

    def updates(self, x: Tensor, y: Tensor, rng: Generator, chunk: int = CHUNK) -> Iterator[Update]:
        """The updates (n, ...) of N batches x (N, B, C, H, W) in [0, 1] with labels y (N, B), a few at a time, in order."""
        by_stages = self._stages
        entries = sum(p.numel() for p in self.params.values())
        chunk = max(1, min(chunk, NUMBERS // entries) // self.members)
        for some, labels in zip(x.split(chunk), y.split(chunk), strict=True):
            batches = self._apart(some, labels)
            if by_stages is not None:
                try:
                    yield _detached(self._summed(self._together(by_stages, batches, rng)))
                    continue
                except Unsupported:
                    by_stages = None  # use the chain itself from now on
            yield self._summed(self._by_chain(batches, rng))

    def differentiable(self, x: Tensor, y: Tensor) -> Update:
        """The updates (n, ...) of batches x (n, B, C, H, W), differentiable by x; for a quiet simulator."""
        batches = self._apart(x, y)
        if (by_stages := self._stages) is not None:
            try:
                return self._summed(self._together(by_stages, batches, None))
            except Unsupported:
                pass
        return self._summed(_mapped(self._bare(), self.params, batches, None))

    @property
    def _stages(self) -> Stages | None:
        if self.known.text is not None:  # token ids have no gradient, which `gradients` needs
            return None
        return stages(self.client) if is_mean(self.known.loss, self.known.classes) else None

    def _apart(self, x: Tensor, y: Tensor) -> Batch:
        """The batch of each member of a sum."""
        return Batch(*(t.reshape(-1, t.shape[1] // self.members, *t.shape[2:]) for t in (x, y)))

    def _summed(self, updates: Update) -> Update:
        if self.members == 1:
            return updates
        return {k: t.view(-1, self.members, *t.shape[1:]).mean(1) for k, t in updates.items()}

    def _together(self, plan: Stages, batches: Batch, rng: Generator | None) -> Update:
        """All clients' gradients in one pass, then each link on all of them, differentiable."""
        model, known = self.known.model, self.known
        size = batches.x.shape[1]
        x, y = known.normalise(batches.x), batches.y
        if plan.each:
            x, y = x.flatten(0, 1)[:, None], y.flatten()[:, None]
        if not examples_are_independent(model, self.params, x[:1] if len(x) == 1 else x[:2]):
            raise Unsupported("the model mixes the examples of a batch")
        x = x.requires_grad_()  # an input that already requires grad keeps its graph
        if plan.each or plan.before:
            found = _formed(gradients(model, self.params, x, y, 1.0, False, known.loss))
            found = _through(plan.each, found, rng)
            if plan.each:
                found = {k: t.view(-1, size, *t.shape[1:]).mean(1) for k, t in found.items()}
            found = {k: -plan.local.rate * t for k, t in _through(plan.before, found, rng).items()}
        else:
            found = _formed(local_training_changes(model, self.params, x, y, plan.local, False, known.loss))
        return _through(plan.after, found, rng)

    def _bare(self) -> UpdateFn:
        return self.client(gradient(self.known.model, self.known.loss, normalise=self.known.normalise))

    def _by_chain(self, batches: Batch, rng: Generator) -> Update:
        client = self._bare()
        if len(batches.x) > 1 and self._maps(client, batches):
            return _detached(_mapped(client, self.params, batches, rng))
        alone = [client(self.params, Batch(x, y), rng) for x, y in zip(*batches, strict=True)]
        return {k: torch.stack([one[k].detach() for one in alone]) for k in alone[0]}

    def _maps(self, client: UpdateFn, batches: Batch) -> bool:
        """Whether vmap works for this client: a link may branch on values, which vmap does not allow."""
        try:
            _mapped(client, self.params, Batch(batches.x[:2], batches.y[:2]), torch.Generator().manual_seed(0))
        except (RuntimeError, ValueError):
            return False  # then one client after the other, where a real error is raised again
        return True


def _mapped(client: UpdateFn, params: Params, batches: Batch, rng: Generator | None) -> Update:
    def one(x: Tensor, y: Tensor) -> Update:
        return client(params, Batch(x, y), rng)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # fused attention has no rule for vmap
        found: Update = vmap(one, randomness="different")(*batches)
    return found


def _formed(found: object) -> Update:
    assert isinstance(found, dict)
    return found


def _detached(updates: Update) -> Update:
    return {k: t.detach() for k, t in updates.items()}


def _through(links: tuple[UpdateTransform, ...], updates: Update, rng: Generator | None) -> Update:
    """Updates (n, ...) after some links, with separate draws for each."""
    for link in links:
        updates = vmap(lambda update, link=link: link.apply(update, rng), randomness="different")(updates)
    return updates
