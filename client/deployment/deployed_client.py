"""A deployed client: its owner's file gives the data, chain, grading and guard; the server only names the model.

From the server's protocol it takes the seed, the number of rounds and clients, and the model. The rest of the protocol is
only what the server assumes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedgauge.client.components import (
    ComponentKind,
    SpecError,
    Table,
    build,
    call,
    check_arguments,
    coerce,
    is_own,
    path_arguments,
)
from fedgauge.client.data.images import Shards, split
from fedgauge.client.deployment.owner import GuardPolicy, OwnerConfig
from fedgauge.client.deployment.terms import NO_FILE, RequestRefused, ServerTerms
from fedgauge.client.federation import Federation
from fedgauge.client.local_data import may_download
from fedgauge.client.models.build import MODEL, build_model, changes_of
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import secret_generator
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Batch, Params, Update

MOST_PARAMETERS = 2**28  # of a model that a server may name: 1 GiB


@dataclass(frozen=True, eq=False)
class DeployedClient(Federation):
    """The federation as one client of a deployment computes it: its owner's data and chain, the server's model."""

    owner: OwnerConfig

    @classmethod
    def of(cls, owner: OwnerConfig, terms: ServerTerms) -> "DeployedClient":
        """Built and checked; RequestRefused if the server's part is wrong, SpecError if the owner's is."""
        if owner.client >= terms.clients:
            raise RequestRefused(f"this is client {owner.client}, the protocol has {terms.clients} clients")
        protocol = Protocol(
            terms.seed, terms.rounds, terms.clients, owner.data, terms.model, owner.chain, loss=owner.loss
        )
        own = cls(protocol, owner)
        try:
            _ = own.shards, own.model
            with owner.allowing():
                _ = own.loss, own.chain, self_audit(owner.guard) if owner.guard else None
        except SpecError as error:
            raise SpecError(f"{owner.path}: {error}") from error
        return own

    @cached_property
    def shards(self) -> Shards:
        """The owner's images: all of them, or the part that the protocol's seed gives this client."""
        owner, clients, data = self.owner, self.protocol.clients, self.owner.dataset
        if not owner.whole:
            fixed = {"dataset": data, "clients": clients, "seed": self.protocol.seed}
            table = {**owner.split, "batch_size": owner.batch_size}
            dealt: Shards = call(split, check_arguments(split, table, "[data]", fixed), "[data]")
            return dealt
        if len(data.y) < owner.batch_size:
            raise SpecError(f"[data]: {data.name} has {len(data.y)} images, fewer than batch_size {owner.batch_size}")
        none = torch.zeros(0, dtype=torch.int64)
        indices = tuple(torch.arange(len(data.y)) if c == owner.client else none for c in range(clients))
        return Shards(data, indices, none, owner.batch_size, self.protocol.seed)

    @cached_property
    def model(self) -> nn.Module:
        """The network that the server names, if it fits in memory, is installed here, and the owner allows its package."""
        table = dict(self.protocol.model)
        offered = self.shards.dataset.offered
        allowed = may_download.set(False)  # a server must not make a client download anything
        try:
            mode = coerce(table.pop("mode", "eval"), Literal["train", "eval"], "[model]: mode")
            with self.owner.allowing():
                for _, named, kind in (("", table, MODEL), *changes_of(table, "[model]")):
                    if path_arguments(named, kind):
                        raise RequestRefused(NO_FILE)
                if is_own(table, MODEL):  # the owner trusts the packages that it allows
                    self._check_size(table, offered)
                return build_model(table, "[model]", offered, self.protocol.seed, beside=("mode",)).train(
                    mode == "train"
                )
        except SpecError as error:
            raise RequestRefused(str(error)) from error
        finally:
            may_download.reset(allowed)

    def _check_size(self, table: Table, offered: Mapping[str, Any]) -> None:
        with torch.device("meta"):  # only shapes, before any memory is taken
            shadow = build_model(table, "[model]", offered, self.protocol.seed, beside=("mode",))
        size = sum(t.numel() for t in (*shadow.parameters(), *shadow.buffers()))
        if size > MOST_PARAMETERS:
            raise RequestRefused(f"[model]: it has {size} parameters, more than {MOST_PARAMETERS}")

    def draw(self, round: int) -> list[int]:
        """The rows of the training images that a round trains on."""
        if self.owner.sampling == "agreed":
            return self.shards.rows_at(self.owner.client, round).tolist()
        mine = self.shards.indices[self.owner.client]
        drawn = mine[torch.randperm(len(mine), generator=secret_generator())]
        return drawn[: self.owner.batch_size].tolist()

    def compute(self, params: Params, buffers: Mapping[str, Tensor], batch: Batch, memory: TransformState) -> Update:
        """The update that leaves the client, with noise that nobody else can reproduce."""
        self.load_buffers(buffers)
        return self.update_fn(memory)(params, batch, secret_generator())


class SelfAudit(ABC):
    """An attack of a client on its own update before it leaves; a frozen dataclass of the attack's name and budget."""

    @abstractmethod
    def leak(
        self, own: Federation, params: Params, buffers: Mapping[str, Tensor], update: Update, batch: Batch
    ) -> float:
        """PSNR in dB of the best reconstructed example; -inf if there is none.

        Raises:
            ValueError: the attack does not apply to this update.
        """


SELF_AUDIT = ComponentKind("an audit of one's own update", ("fedgauge.audits",), SelfAudit)
INVERSION = "invert_own"  # clients may not import attacks, so the registry finds it by name


def self_audit(guard: GuardPolicy) -> SelfAudit | None:
    """The audit that an owner asks for."""
    if guard.audit is None:
        return None
    table = {"use": INVERSION, "attack": guard.audit, "iterations": guard.iterations, "seconds": guard.seconds}
    found: SelfAudit = build(table, "[guard]", SELF_AUDIT)
    return found
