"""A deployed client: its owner's file gives the data, chain, grading and guard; the server only names the model.

From the server's protocol it takes the seed, the number of rounds and clients, and the model. The rest of the protocol is
only what the server assumes. Whether the client is a canary its owner says; a server that assumes otherwise gets no update.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedgauge.client.chain import Chain
from fedgauge.client.components import SpecError, Table, call, check_arguments, errors_in, settings_of
from fedgauge.client.data.batches import Shards, split
from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.client.deployment.secure_sum import PairwiseMasking
from fedgauge.client.deployment.server_model import build_servers_model
from fedgauge.client.deployment.server_terms import RequestRefused, ServerTerms
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import secret_generator
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Batch, Params, Update, UpdateFn, norm

UNWILLING = "[canaries]: the protocol takes this client for a canary, to which its owner has not agreed"
NO_CANARY = "[canaries]: this client is a canary, and the protocol takes it for one that trains"


@dataclass(frozen=True, eq=False)
class DeployedClient(Federation):
    """The federation as one client of a deployment computes it: its owner's data and chain, the server's model."""

    owner: OwnerConfig

    @classmethod
    def of(cls, owner: OwnerConfig, terms: ServerTerms) -> "DeployedClient":
        """Built and checked.

        Raises:
            RequestRefused: the server's part is wrong.
            SpecError: the owner's part is wrong.
        """
        unknown = owner.client >= terms.clients
        if unknown or owner.canary != (owner.client >= terms.clients - terms.canaries):
            few = f"the protocol has {terms.clients} clients, fewer than this client's number requires"
            raise RequestRefused(few if unknown else NO_CANARY if owner.canary else UNWILLING)
        numbers = (terms.seed, terms.rounds, terms.clients)
        own = cls(Protocol(*numbers, owner.data, terms.model, owner.chain, loss=owner.loss), owner)
        with errors_in(owner.path):
            _ = own.shards, own.model
            with owner.allowing():
                _ = own.loss, own.chain
                if owner.canary and not own.chain.private:
                    raise SpecError("canary = true needs noise behind a clip in [[chain]]: add clip and gaussian")
        return own

    @cached_property
    def shards(self) -> Shards:
        """The owner's images: all of them, or the part that the protocol's seed gives this client."""
        owner, clients, data = self.owner, self.protocol.clients, self.owner.dataset
        size, seed = owner.draw.batch_size, self.protocol.seed
        if not owner.draw.whole:
            fixed = {"dataset": data, "clients": clients, "seed": seed}
            given = check_arguments(split, {**owner.split, "batch_size": size}, "[data]", fixed)
            dealt: Shards = call(split, given, "[data]")
            return dealt
        if len(data.y) < size:
            raise SpecError(f"[data]: {data.name} has {len(data.y)} images, fewer than batch_size {size}")
        none = torch.zeros(0, dtype=torch.int64)
        indices = tuple(torch.arange(len(data.y)) if c == owner.client else none for c in range(clients))
        return Shards(data, indices, none, size, seed)

    @cached_property
    def model(self) -> nn.Module:
        """The network that the server names, if it is small enough, is installed here, and the owner allows its package."""
        offered, seed = self.shards.dataset.offered, self.protocol.seed
        with self.owner.allowing():
            return build_servers_model(self.protocol.model, offered, seed, self.owner.max_parameters)

    @cached_property
    def chain(self) -> Chain:
        """The owner's, with noise that also protects."""
        return super().chain.deployed

    @cached_property
    def secure_sum(self) -> PairwiseMasking | None:
        """The only secure sum in which the owner sends updates."""
        table = self.owner.secure_sum
        return None if table is None else settings_of(PairwiseMasking, table, "[secure_sum]")

    @property
    def terms(self) -> Table:
        """Settings that determine an update's epsilon, as JSON; secret: its draw amplifies privacy."""
        chain, draw = json.loads(json.dumps(self.owner.chain, default=str)), self.owner.draw
        # of shared data the server chooses how much is this client's, which in another run may have been one batch
        secret, records = draw.sampling == "secret" and draw.whole, len(self.shards.indices[self.owner.client])
        return {"chain": chain, "batch_size": draw.batch_size, "secret": secret, "records": records}

    def draw(self, round: int) -> list[int]:
        if self.owner.draw.sampling == "agreed":
            return self.shards.rows_at(self.owner.client, round).tolist()
        mine = self.shards.indices[self.owner.client]
        drawn = mine[torch.randperm(len(mine), generator=secret_generator())]
        return drawn[: self.owner.draw.batch_size].tolist()

    def compute(self, params: Params, buffers: Mapping[str, Tensor], batch: Batch, memory: TransformState) -> Update:
        """Compute the update to send, with secret noise; a canary computes its direction instead."""
        self.load_buffers(buffers)
        sent = self.chain.planted(self.direction(self.owner.client)) if self.owner.canary else self.chain
        links = sent.with_state(memory).links
        chain = Chain(tuple(part for link in links for part in (_draws_of_its_own, link)))
        update = chain(self.own_gradient)(params, batch, secret_generator())
        return {k: t.to(params[k].dtype) for k, t in update.items()}

    @property
    def sends_buffers(self) -> bool:
        return self.model.training and not self.chain.private


def _draws_of_its_own(compute: UpdateFn) -> UpdateFn:
    """Draws from a generator that the link outside does not share: a mask's zeros give a generator's whole state away."""
    return lambda params, batch, rng: compute(params, batch, secret_generator())


def objection(update: Mapping[str, Tensor], max_norm: float | None = None) -> str:
    """Return the reason to withhold an update, for the owner only; empty if there is none."""
    if odd := [k for k, t in update.items() if t.is_complex()]:
        return f"{', '.join(odd)}: complex numbers, which no limit here is for"
    floats = {k: t.double() for k, t in update.items() if torch.is_floating_point(t)}
    if wrong := [k for k, t in floats.items() if not torch.isfinite(t).all()]:
        return f"{', '.join(wrong)}: entries that are not finite"
    if max_norm is not None and floats and (size := float(norm(floats))) > max_norm:
        return f"its norm is {size:.4g}, above max_norm {max_norm:g}"
    return ""
