"""A deployed client: its owner's file gives the data, chain, grading and guard; the server only names the model.

From the server's protocol it takes the seed, the number of rounds and clients, and the model. The rest of the protocol is
only what the server assumes. Whether the client is a canary its owner says; a server that assumes otherwise gets no update.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedgauge.client.chain import Chain, may_read_examples
from fedgauge.client.components import ComponentKind, SpecError, Table, build, call, check_arguments
from fedgauge.client.data.images import Dataset, Shards, split
from fedgauge.client.data.own_images import SHARED_NAMES
from fedgauge.client.deployment.owner import GuardPolicy, OwnerConfig
from fedgauge.client.deployment.secure_sum_terms import SecureSum, build_secure_sum
from fedgauge.client.deployment.server_model import build_servers_model
from fedgauge.client.deployment.state_folder import ClientFolder
from fedgauge.client.deployment.terms import RequestRefused, ServerTerms
from fedgauge.client.federation import Federation
from fedgauge.client.models.vision import detached_params
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import secret_generator
from fedgauge.client.transforms import TransformState, transformed
from fedgauge.client.update import Batch, Params, Update, UpdateFn

STATISTICS = (
    '[model]: BatchNorm with mode = "train" sends statistics of the examples without noise; ask for mode = "eval"'
)
UNWILLING = "[canaries]: the protocol takes this client for a canary, to which its owner has not agreed"
NO_CANARY = "[canaries]: this client is a canary, and the protocol takes it for one that trains"
FAILS = "[model]: it fails on an empty example; the client's own log says how"
_GIVEN = {
    "mean": "mean (such as 0.5 for each channel)",
    "std": "std (such as 0.25 for each channel)",
    "classes": "classes (all that there may be)",
    "tokenizer": "tokenizer (the name of a published one) or tokenizer_folder",
    SHARED_NAMES: "each picture a file name of its own",
}


@dataclass(frozen=True, eq=False)
class DeployedClient(Federation):
    """The federation as one client of a deployment computes it: its owner's data and chain, the server's model."""

    owner: OwnerConfig

    @classmethod
    def of(cls, owner: OwnerConfig, terms: ServerTerms) -> "DeployedClient":
        """Built and checked; RequestRefused if the server's part is wrong, SpecError if the owner's is."""
        if owner.client >= terms.clients:
            raise RequestRefused(f"the protocol has {terms.clients} clients, too few for this one's number")
        if owner.canary != (owner.client >= terms.clients - terms.canaries):
            raise RequestRefused(NO_CANARY if owner.canary else UNWILLING)
        protocol = Protocol(
            terms.seed, terms.rounds, terms.clients, owner.data, terms.model, owner.chain, loss=owner.loss
        )
        own = cls(protocol, owner)
        try:
            _ = own.shards, own.model
            with owner.allowing():
                _ = own.loss, own.chain
                if owner.guard is not None:
                    self_audit(owner.guard)
                    owner.guard.check(own.chain.private)
                if owner.canary and not own.chain.private:
                    raise SpecError(
                        "canary = true measures noise behind a clip, and [[chain]] has none: add clip and gaussian"
                    )
                _refuse_second_reading(own.chain)
                if own.chain.private:
                    refuse_fitted(owner.dataset, owner.split)
        except SpecError as error:
            raise SpecError(f"{owner.path}: {error}") from error
        if own.chain.private:
            own._refuse_unprotected()
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
        """The network that the server names, if it is small enough, is installed here, and the owner allows its package."""
        offered, seed = self.shards.dataset.offered, self.protocol.seed
        with self.owner.allowing():
            return build_servers_model(self.protocol.model, offered, seed, self.owner.max_parameters)

    @cached_property
    def chain(self) -> Chain:
        """The owner's, with noise that also protects."""
        return super().chain.deployed

    def _refuse_unprotected(self) -> None:
        """Refuse a network whose statistics would leave without noise, or that fails whatever the examples are."""
        if any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules()):
            raise RequestRefused(STATISTICS)
        x, y = self.owner.batch([0] * self.owner.batch_size)
        empty = Batch(torch.zeros_like(x), torch.zeros_like(y))
        try:
            with _buffers_put_back(self.model):
                self.chain.before_noise(self.gradient)(detached_params(self.model), empty, secret_generator())
        except Exception as error:  # whatever a network raises
            raise RequestRefused(FAILS) from error

    @cached_property
    def secure_sum(self) -> SecureSum | None:
        """The sum in which alone the owner lets updates leave."""
        table = self.owner.secure_sum
        return None if table is None else build_secure_sum(table)

    @property
    def terms(self) -> dict[str, Any]:
        """What the epsilon of an update depends on, as JSON: by its owner's file, and how many records the client holds."""
        return {**self.owner.terms, "records": len(self.shards.indices[self.owner.client])}

    def draw(self, round: int) -> list[int]:
        """The rows of the training images that a round trains on."""
        if self.owner.sampling == "agreed":
            return self.shards.rows_at(self.owner.client, round).tolist()
        mine = self.shards.indices[self.owner.client]
        drawn = mine[torch.randperm(len(mine), generator=secret_generator())]
        return drawn[: self.owner.batch_size].tolist()

    def compute(self, params: Params, buffers: Mapping[str, Tensor], batch: Batch, memory: TransformState) -> Update:
        """The update that leaves the client, with noise that nobody else can reproduce; of a canary its direction.

        Beside noise behind a clip the network's buffers are afterwards as the server sent them.
        """
        self.load_buffers(buffers)
        private = self.chain.private
        sent = self.chain.planted(self.direction(self.owner.client)) if self.owner.canary else self.chain
        bound = sent.with_state(memory, self._without_failures if private else None)
        chain = Chain(tuple(part for link in bound.links for part in (_draws_of_its_own, link)))
        with _buffers_put_back(self.model) if private else nullcontext():
            update = chain(self.own_gradient)(params, batch, secret_generator())
        return {k: t.to(params[k].dtype) for k, t in update.items()}

    @property
    def sends_buffers(self) -> bool:
        return self.model.training and not self.chain.private

    def _without_failures(self, compute: UpdateFn) -> UpdateFn:
        """A failure in whatever link, or an update that is not finite, counts as zeros: that examples cause it must not be seen.

        Nor does a buffer that the network moves on one example reach the next one's gradient, where a clip is of each.
        """

        def tried(params: Params, batch: Batch, rng: Generator | None) -> Update:
            try:
                with _buffers_put_back(self.model):
                    update = compute(params, batch, rng)
                finite = torch.stack([t.isfinite().all() for t in update.values()]).all()
                return {k: torch.where(finite, t, 0.0) for k, t in update.items()}
            except Exception as error:  # whatever a network raises
                if transformed():
                    raise  # of all examples together: `per_example` takes them one by one
                reason = f"a gradient counts as zero: {type(error).__name__}: {error}"
                ClientFolder(self.owner.state).note("failed", what="gradient", reason=reason)
                return {k: torch.zeros_like(p) for k, p in params.items()}

        return tried


def _draws_of_its_own(compute: UpdateFn) -> UpdateFn:
    """Draws from a generator that the link outside does not share: a mask's zeros give a generator's whole state away."""

    def apart(params: Params, batch: Batch, rng: Generator | None) -> Update:
        return compute(params, batch, secret_generator())

    return apart


@contextmanager
def _buffers_put_back(model: nn.Module) -> Iterator[None]:
    """Afterwards the network's buffers are what they were, also those that its forward pass replaces or adds."""
    copies = {id(b): b.detach().clone() for b in model.buffers()}
    held = [(m, {k: None if b is None else copies[id(b)] for k, b in m._buffers.items()}) for m in model.modules()]
    try:
        yield
    finally:
        for module, buffers in held:
            for name in set(module._buffers.keys()) - buffers.keys():
                del module._buffers[name]
            for name, buffer in buffers.items():  # by name, which a scripted module takes, too
                module._buffers[name] = buffer


def refuse_fitted(dataset: Dataset, data: Table) -> None:
    """SpecError if what a chain with noise gets of one example depends on the others, which the noise does not hide.

    Args:
        data: the table that says how the dataset is divided.
    """
    if dataset.fitted:
        raise SpecError(
            f"[data]: {', '.join(dataset.fitted)} would be computed from the private examples, so that one of these changes all "
            "others, which the epsilon of a chain of clip and noise does not cover: give "
            f"{', '.join(_GIVEN.get(key, key) for key in dataset.fitted)}, chosen without a look at the examples"
        )
    if (partition := data.get("partition", "iid")) != "iid":
        raise SpecError(
            f"[data]: partition = {partition!r} divides by the labels, so that one example's label moves others between clients, "
            'which the epsilon of a chain of clip and noise does not cover: set partition = "iid", or whole = true'
        )


def _refuse_second_reading(chain: Chain) -> None:
    """SpecError if a link behind the noise may use the examples again, which no noise would then hide."""
    if named := [type(link).__name__ for link in chain.behind_noise or () if may_read_examples(link)]:
        raise SpecError(
            f"[[chain]]: {named[0]} stands behind the noise and may use the examples again, which that noise does not hide: "
            "move it before the clip, or remove it"
        )


class SelfAudit(ABC):
    """An attack of a client on its own update before it leaves; a frozen dataclass of the attack's name and budget."""

    @abstractmethod
    def leak(
        self,
        own: Federation,
        params: Params,
        buffers: Mapping[str, Tensor],
        update: Update,
        returned: Mapping[str, Tensor],
        batch: Batch,
    ) -> float:
        """The best reconstructed example's value of its modality's main metric.

        Args:
            returned: the buffers that would leave with the update; {}: none.

        Raises:
            ValueError: the attack does not apply to this update.
        """

    @abstractmethod
    def scale(self, own: Federation) -> "LeakScale":
        """The scale of what `leak` returns."""


class LeakScale(NamedTuple):
    """The scale of a metric.

    Args:
        leaked: from this value on an example has leaked, where the owner names none.
        higher_leaks: whether higher values leak more.
        best: the value that counts as the worst leak.
    """

    leaked: float
    unit: str
    higher_leaks: bool
    best: float

    def threshold(self, named: float | None) -> float:
        """From which value on an update is withheld; one that is named beyond the best would withhold nothing."""
        if named is None:
            return self.leaked
        return (min if self.higher_leaks else max)(named, self.best)


SELF_AUDIT = ComponentKind("an audit of one's own update", ("fedgauge.audits",), SelfAudit)
INVERSION = "invert_own"  # clients may not import attacks, so the registry finds it by name


def self_audit(guard: GuardPolicy) -> SelfAudit | None:
    """The audit that an owner asks for."""
    if guard.audit is None:
        return None
    table = {"use": INVERSION, "attack": guard.audit, "iterations": guard.iterations, "seconds": guard.seconds}
    found: SelfAudit = build(table, "[guard]", SELF_AUDIT)
    return found
