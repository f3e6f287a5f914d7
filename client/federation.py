"""A federation: a protocol with its data loaded, its model built and its chain composed."""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedgauge.client.chain import Chain, trained_on
from fedgauge.client.components import ComponentKind, SpecError, build, call, check_arguments, coerce, errors_in
from fedgauge.client.data.batches import Shards, batch_of, split
from fedgauge.client.data.canary_examples import with_canary_examples
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.gradient import evaluated, gradient
from fedgauge.client.label_kinds import LabelKind
from fedgauge.client.local_training import LOCAL_TRAININGS
from fedgauge.client.models.build import build_model
from fedgauge.client.models.losses import (
    FittedLoss,
    fitted_loss,
    is_cross_entropy,
    is_mean,
    loss_of,
    named_loss,
    per_example_accuracy,
    predicts_tokens,
    takes_logits,
    takes_probabilities,
)
from fedgauge.client.models.vision import detached_params, floating_buffers, load_weights
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.transforms import (
    BatchTransform,
    GroupMean,
    Link,
    TransformState,
    UpdateDistribution,
    is_identity,
    is_per_example,
    noise_free,
    per_example,
)
from fedgauge.client.update import Batch, Loss, Params, Update, UpdateFn, at_least_single, average, canary, concatenate

DATASET = ComponentKind("a dataset", ("fedgauge.datasets",), Dataset, annotated=False)
TRANSFORM = ComponentKind("a link of a chain", ("fedgauge.links",), Link)
TRIED = 6  # public examples on which a loss is tried
LOGITS = 2**24  # computed at once where a network is evaluated
# without BatchNorm's mixing
UNMIXED = '[model] mode = "eval", or bring a network with GroupNorm, such as norm = "group"'


@dataclass(frozen=True, eq=False)
class Federation:
    """A protocol with its data loaded and split, its model built, and its chain composed.

    Args:
        protocol: what all parties agree on; its parts are built when they are first used.

    Raises:
        SpecError: on first use of a part that the protocol describes wrongly; `check` builds all of them.

    Example:
        >>> tables = {"rounds": 1, "clients": 4, "data": {"use": "mnist5k", "batch_size": 2}}
        >>> tables |= {"model": {"use": "mlp"}, "chain": [{"use": "local_sgd", "rate": 0.1}]}
        >>> Federation(Protocol.from_tables(tables)).batch_at(client=0, round=1).x.shape
        torch.Size([2, 1, 28, 28])
    """

    protocol: Protocol

    @cached_property
    def shards(self) -> Shards:
        """The dataset, split among the clients; with canary examples, if the protocol has any."""
        table = self.protocol.data
        own = {"batch_size", "partition", "alpha", "shards_per_client", "auxiliary"}
        dataset = build({k: v for k, v in table.items() if k not in own}, "[data]", DATASET, more_keys=sorted(own))
        try:
            dataset.check()
        except Exception as error:  # fields of a user's making may be of any type
            raise SpecError(f"[data]: {table['use']}: {type(error).__name__}: {error}") from error
        fixed = {"dataset": dataset, "clients": self.protocol.clients, "seed": self.protocol.seed}
        given = {k: v for k, v in table.items() if k in own}
        shards: Shards = call(split, check_arguments(split, given, "[data]", fixed), "[data]")
        shards = replace(shards, dataset=dataset.in_units_of(shards.auxiliary))
        if each := self.protocol.canary_examples:
            planted = {"clients": self.protocol.canary_clients, "each": each, "coins": self.protocol.coins}
            shards = call(with_canary_examples, {"shards": shards, **planted}, "[canaries]")
        return shards

    @cached_property
    def model(self) -> nn.Module:
        """The network with its defenses and initial weights, in eval mode unless [model] mode says train.

        The weights come from the file that the table names, otherwise from the seed.
        """
        table = dict(self.protocol.model)
        mode = coerce(table.pop("mode", "eval"), Literal["train", "eval"], "[model]: mode")
        weights = coerce(table.pop("weights", None), str | None, "[model]: weights")
        offered, seed = self.shards.dataset.offered, self.protocol.seed
        model = build_model(table, offered, seed, more_keys=("mode", "weights"))
        if weights is not None:
            call(load_weights, {"model": model, "path": Path(weights)}, "[model]: weights")
        return model.train(mode == "train")

    @property
    def loss(self) -> Loss:
        """The clients' loss: the mean over a batch of a function of the network's outputs and labels."""
        return self._loss_and_kind[0]

    @property
    def label_kind(self) -> LabelKind:
        """The kind of the examples' labels: one class, findings, numbers or none."""
        return self._loss_and_kind[1]

    @cached_property
    def _loss_and_kind(self) -> tuple[Loss, LabelKind]:
        table, data, public = self.protocol.loss, self.shards.dataset, self.shards.auxiliary_batch()
        loss = named_loss(table)
        if predicts_tokens(loss) == data.labelled:
            other = "cross_entropy" if data.labelled else "next_token"
            raise SpecError(f'[loss]: {table["use"]} does not fit [data]: set use = "{other}"')
        of_classes = data.one_class or not data.labelled
        if of_classes and not isinstance(loss, FittedLoss) and takes_logits(loss, data.classes):
            return loss, LabelKind(public.y)
        some = Batch(*(t[:TRIED] for t in public))
        x = data.normalise(some.x)
        try:
            with torch.no_grad(), evaluated(self.model):
                outputs = self.model(x)
        except Exception as error:  # a user's network may raise anything
            raise SpecError(f"[model]: it fails on examples: {type(error).__name__}: {error}") from error
        if not isinstance(outputs, torch.Tensor):
            why = "one tensor of outputs, such as torch.cat of its parts, which [loss] splits"
            raise SpecError(f"[model]: it returns a {type(outputs).__name__}: let it return {why}")
        return fitted_loss(loss, table, (outputs, some.y, x), public.y, data.classes)

    @cached_property
    def chain(self) -> Chain:
        """The defenses and local training, in the order a gradient travels."""
        links, data, whole = [], self.shards.dataset, self.shards.batch_size
        offered = {"model": self.model, "shape": data.shape, "classes": data.classes, "examples": whole}
        offered["normalise"] = data.normalise
        for i, table in enumerate(self.protocol.chain, 1):
            where, arguments = f"[[chain]] #{i}", dict(table)
            each = coerce(arguments.pop("each", False), bool, f"{where}: each")
            # examples at a link: those of a local step, behind local_sgd those of the round
            step = next((t.get("batch_size") for t in self.protocol.chain[i:] if t.get("use") in LOCAL_TRAININGS), None)
            offered["batch_size"] = min(step, whole) if isinstance(step, int) and step > 0 else whole
            link = build(arguments, where, TRANSFORM, offered, more_keys=("each",))
            if self.protocol.secure_sum and link.remembers:
                raise SpecError(f"{where}: {table['use']} is stateful and cannot be used with [secure_sum]: remove one")
            links.append(per_example(link) if each else link)
        composed: Chain = Chain(tuple(links))
        with errors_in("[[chain]]", ValueError):
            for fault in composed.faults():
                raise SpecError(fault)
        for fault in self._misfits(composed):
            raise SpecError(fault)
        return composed

    def _misfits(self, composed: Chain) -> Iterator[str]:
        """Yield why a chain does not fit the data, the network, the loss or the canaries."""
        local, whole = composed.local, self.shards.batch_size
        steps = composed.links[: composed.links.index(local)]
        if whole % (local.batch_size or whole) and any(hasattr(link, "batch_size") for link in steps):
            yield f"[[chain]]: batch_size must divide [data] batch_size {whole}, as a link needs equal batches"
        if local.remembers and any(composed.stays(name) for name, _ in self.model.named_parameters()):
            yield "[[chain]]: private_layers and scaffold cannot be combined: use local_sgd"
        if self.protocol.canaries is not None and not composed.private:
            yield "[canaries] needs noise behind a clip in the chain: add clip and gaussian, or dp_sgd"
        mixing = [name for name, m in self.model.named_modules() if isinstance(m, _BatchNorm) and m.training]
        if mixing and any(map(is_per_example, composed.links)):
            layer = f"layer {mixing[0]!r} (BatchNorm in train mode)"
            yield f"[[chain]] acts per example, and {layer} mixes examples: set {UNMIXED}"
        # the network's own frozen parameters, unless a link before local training freezes them
        freezing = [says for link in steps if (says := getattr(link, "frozen", None))]  # the defense `freeze`
        own = {k: p for k, p in self.model.named_parameters() if p.is_floating_point()}
        if still := [k for k, p in own.items() if not p.requires_grad and not any(says(k) for says in freezing)]:
            named = whole_parts(still, dict(self.model.named_parameters()))
            freeze = f'[[chain]] use = "freeze", layers = {named} before local_sgd, or set requires_grad = True'
            yield f"[model]: {named[0]!r} has requires_grad = False, but clients would still train it: freeze it by {freeze}"
        for i, link in enumerate(composed.links, 1):
            bare = link.inner if isinstance(link, per_example) else link
            mean: Any = noise_free(bare)  # a user's may be anything
            known: Any = bare.update_distribution(UpdateDistribution()) if isinstance(bare, Link) else None
            if not callable(mean) or not isinstance(known, UpdateDistribution | None):
                yield f"[[chain]] #{i}: mean must be a transform, and update_distribution return an UpdateDistribution or None"
            if isinstance(link, BatchTransform) and not self._takes_labels(link, f"[[chain]] #{i}"):
                yield f"[loss]: {self.protocol.loss['use']} takes no probabilities as labels, which [[chain]] #{i} makes"

    def _takes_labels(self, link: BatchTransform, where: str) -> bool:
        data = self.shards.dataset
        examples = batch_of(data.x, data.y, torch.arange(2))
        batch = call(link.transform, {"batch": examples, "rng": generator("examples")}, where)
        if not isinstance(batch, Batch) or not len(batch.x) == len(batch.y) == len(examples.y):
            raise SpecError(f"{where}: transform must return a Batch of as many examples as it gets")
        return not batch.y.is_floating_point() or takes_probabilities(self.loss, data.classes, self.label_kind)

    @cached_property
    def gradient(self) -> UpdateFn:
        """The undefended gradient of the loss, as an attacker computes it: buffers are not updated."""
        return gradient(self.model, self.loss, normalise=self.shards.dataset.normalise)

    @property
    def own_gradient(self) -> UpdateFn:
        """The gradient as a client computes it: layers in train mode update the buffers that it sends."""
        return gradient(self.model, self.loss, normalise=self.shards.dataset.normalise, track=self.sends_buffers)

    @property
    def sends_buffers(self) -> bool:
        """True if clients update and send the network's buffers: in train mode, unless the chain has private noise.

        BatchNorm in train mode is the exception: the trained network needs its statistics, and there is no epsilon then.
        """
        norms = any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules())
        return self.model.training and (norms or not self.chain.private)

    def update_fn(self, memory: TransformState | None = None, client: int | None = None) -> UpdateFn:
        """Return the client as a function `(params, batch, rng) -> update`.

        BatchNorm in train mode updates the model's running statistics.

        Args:
            memory: the client's state from earlier rounds, which is updated; None: as in its first round.
            client: its number, since a canary sends something else; default: a client that trains.
        """
        chain = self.chain
        if client is not None and client in self.protocol.canary_clients and not self.protocol.canary_examples:
            chain = chain.planted(self.direction(client))
        return chain.with_state({} if memory is None else memory)(self.own_gradient)

    def direction(self, client: int) -> Update:
        """Return a canary's update in every round: norm 1, uniform over all directions."""
        return canary(at_least_single(self.initial()[0]), generator(self.protocol.seed, "canary", client))

    def initial(self) -> tuple[Params, dict[str, Tensor]]:
        """Return the weights and floating-point buffers that the federation starts from, by name."""
        return detached_params(self.model), floating_buffers(self.model)

    def as_seen(self, chain: Chain, members: int) -> Chain:
        """Return the chain of the server's view: the mean of this many clients' updates."""
        return chain if members == 1 else Chain((*chain.links, GroupMean(members, self._is_one_client(chain))))

    def _is_one_client(self, chain: Chain) -> bool:
        """Check that the noise-free mean of several clients' updates equals one client's update on all their examples."""
        others = [noise_free(link) for link in chain.links if link is not chain.local]
        norms = [m for m in self.model.modules() if isinstance(m, _BatchNorm) and m.training]
        one_step = chain.local.one_gradient and chain.local.batch_size in (None, self.shards.batch_size)
        means = is_mean(self.loss, self.shards.dataset.classes, self.label_kind)
        return one_step and means and not norms and all(map(is_identity, others))

    def client_update(self, params: Params, buffers: Mapping[str, Tensor], client: int, round: int) -> Update:
        """Compute the server's view of a client in a round: its update, or with [secure_sum] its group's mean.

        Args:
            params: the weights that the server sends.
            buffers: the buffers that it sends, such as BatchNorm's statistics.
            client: its number, from 0.
            round: from 1.
        """
        members = self.protocol.group(client)
        updates = [self.own_update(params, buffers, member, round) for member in members]
        return updates[0] if len(updates) == 1 else average(updates, [1] * len(updates))

    def own_update(
        self,
        params: Params,
        buffers: Mapping[str, Tensor],
        client: int,
        round: int,
        memory: TransformState | None = None,
    ) -> Update:
        """Compute a client's update in a round, with the simulation's randomness.

        Args:
            params, buffers, client, round: as for `client_update`.
            memory: its state from earlier rounds, which is updated; None: this is its first round.

        Returns:
            Tensors with the names, shapes and dtypes of `params`.
        """
        self.load_buffers(buffers)
        rng = generator(self.protocol.seed, "client", client, round)
        update = self.update_fn(memory, client)(params, self.shards.batch_at(client, round), rng)
        return {k: t.to(params[k].dtype) for k, t in update.items()}

    def trained_on(self, params: Params, buffers: Mapping[str, Tensor], client: int, round: int) -> Batch | None:
        """Return `batch_at` after the chain's batch transforms; None if it has none."""
        if not any(isinstance(link, BatchTransform) for link in self.chain.links):
            return None
        self.load_buffers(buffers)
        found = []
        for member in self.protocol.group(client):
            batch, rng = self.shards.batch_at(member, round), generator(self.protocol.seed, "client", member, round)
            found.append(trained_on(self.chain, self.gradient, params, batch, rng) or batch)
        return concatenate(found)

    def batch_at(self, client: int, round: int) -> Batch:
        """Return the private examples behind the server's view of a client in a round.

        Returns:
            x in [0, 1], (B, *shape), and y, (B, ...). With [secure_sum] these are the examples of the group, client after client.
        """
        return concatenate([self.shards.batch_at(member, round) for member in self.protocol.group(client)])

    def rows_at(self, client: int, round: int) -> Tensor:
        """Return the rows of the examples of `batch_at` in the training data."""
        return torch.cat([self.shards.rows_at(member, round) for member in self.protocol.group(client)])

    def on(self, device: torch.device) -> "Federation":
        """Return a copy with the model on a device; the data is not moved."""
        return self.having(model=copy.deepcopy(self.model).to(device))

    def having(self, shards: Shards | None = None, model: nn.Module | None = None, **changes: Any) -> "Federation":
        """Return a copy with other examples, another network or other values of the protocol; its chain is built anew."""
        other = Federation(replace(self.protocol, **changes))
        # cached properties live in __dict__
        vars(other).update(shards=shards or self.shards, model=self.model if model is None else model)
        return other

    def evaluate(self, params: Params, most: int | None = None) -> tuple[float, float]:
        """Compute accuracy and mean loss on the held-out test examples, with BatchNorm in eval mode.

        The accuracy is from 0 to 1; for number labels it is R2, at least 0, and without labels NaN.

        Args:
            most: evaluate only this many test examples; default: all.
        """
        dataset = self.shards.dataset
        chunk = max(1, min(500, LOGITS // (dataset.y_test[0].numel() * dataset.classes)))
        every = torch.arange(len(dataset.y_test))[:most]
        right, loss = 0.0, 0.0
        with evaluated(self.model), torch.no_grad():
            for rows in every.split(chunk):
                x, y = batch_of(dataset.x_test, dataset.y_test, rows)
                x = dataset.normalise(x)
                logits = functional_call(self.model, params, (x,))
                right += float(per_example_accuracy(logits, y, self.label_kind).sum())
                if is_cross_entropy(self.loss) and y.dim() == 1:
                    loss += float(F.cross_entropy(logits, y, reduction="sum"))
                else:  # this loss is a mean over each part
                    loss += float(loss_of(self.loss, logits, y, x)) * len(y)
        return max(right / len(every), 0.0), loss / len(every)

    def load_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Set the model's buffers to the server's values."""
        own = dict(self.model.named_buffers())
        for name, value in buffers.items():
            own[name].copy_(value)

    def returned_buffers(self, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that a client sends back; private ones keep the received values."""
        moved = floating_buffers(self.model)
        return {k: sent[k] if k in sent and self.chain.stays(k) else t for k, t in moved.items()}

    def check(self) -> "Federation":
        """Build every part, so that mistakes are reported before anything starts; return this federation.

        Raises:
            SpecError: the protocol does not fit together; the message names the table, the mistake and what to write.
        """
        _ = self.shards, self.model, self.loss, self.chain
        return self


@lru_cache(maxsize=2)  # a simulation's client process serves many clients of one federation
def federation(protocol_json: str) -> Federation:
    """The built federation of a protocol, kept between messages."""
    return Federation(Protocol.from_json(protocol_json))


def whole_parts(names: Collection[str], parameters: Iterable[str]) -> list[str]:
    """Name these parameters as `freeze` takes them: the outermost modules that have no others, and single parameters."""
    others = {place for name in {*parameters} - {*names} for place in _places(name)}
    return list(dict.fromkeys(next(place for place in _places(name) if place not in others) for name in names))


def _places(name: str) -> list[str]:
    """Return the modules around a parameter, from the outermost on, and its name."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts) + 1)]
