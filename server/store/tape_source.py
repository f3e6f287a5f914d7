"""Recorded updates as attacks read them. Those of a user's own app come by the names of its model, and may lack layers."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Observation
from fedgauge.attacks.source import FederationSource
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import ControlledSGD, correction_after, own_move
from fedgauge.client.update import Params, Update
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import TapeError

Replies = Literal["weights", "updates", "gradients"]
REPLIES = "replies"  # key in the meta table: what the clients of a user's app upload
# peft's names of an adapter's factors and of modules that are trained whole
_FACTOR = re.compile(r"\b(lora_[AB])\.(?:[^.]+\.)?weight$")
_TRAINED = re.compile(r"\.modules_to_save\.[^.]+\.")


class UploadMismatch(ValueError):
    """Uploads do not fit the scenario's [model]; the message names the difference and the remedy."""


@dataclass(frozen=True, eq=False)
class TapeSource(FederationSource):
    """The updates of a run, as its model has them."""

    run: Run = field(kw_only=True)
    ledger: Ledger = field(kw_only=True)

    def taped(self) -> Sequence[tuple[int, int, str]]:
        """Return round, client and digest of each accepted update with a file in the ledger, in order of arrival."""
        rows = self.ledger.observations()
        return [(o["round"], o["client"], o["digest"]) for o in rows if o["status"] == "accepted" and o["digest"]]

    def observation(self, round: int, client: int, digest: str) -> Observation:
        """Read one observation by the names of the run's model; of a SCAFFOLD client with its control variate.

        Raises:
            TapeError: a file is missing, damaged, or does not match the digest.
            UploadMismatch: a user's own app trains another model.
        """
        tape, foreign = self.run.tape(), self.ledger.foreign

        def read(round: int, digest: str) -> Observation:
            seen = tape.read(round, client, digest)
            if not foreign:
                return seen
            return as_the_model_has_it(seen, self.federation, replies_of(self.run, self.ledger))

        seen = read(round, digest)
        controlled = isinstance(self.federation.chain.local, ControlledSGD)
        return _with_known_pull(seen, self.ledger, read) if controlled else seen


def _with_known_pull(seen: Observation, ledger: Ledger, read: Callable[[int, str], Observation]) -> Observation:
    """Add the control variate of a SCAFFOLD client, which follows from all of its updates.

    Args:
        read: reads the client's observation of a round by its digest.

    Raises:
        TapeError: an earlier update is not on the tape.
    """
    own = {o["round"]: o for o in ledger.observations() if o["client"] == seen.client} if seen.round > 1 else {}
    correction: Update = {}
    before: Observation | None = None
    for round in range(1, seen.round):
        row = own.get(round)
        if row is None or row["status"] != "accepted" or not row["digest"]:
            raise TapeError(
                f"client {seen.client}'s control variate of round {seen.round} is unknown: round {round} was not recorded"
            )
        now = read(round, row["digest"])
        correction, before = _next_correction(before, correction, now), now
    return replace(seen, correction=_next_correction(before, correction, seen))


def _next_correction(before: Observation | None, correction: Update, now: Observation) -> Update:
    return {} if before is None else correction_after(before.params, own_move(before.update, correction), now.params)


def replies_of(run: Run, ledger: Ledger) -> Replies:
    """Return the kind of uploads of a user's app: from the ledger, or inferred from the first conclusive reply.

    Weights are nearer to the sent ones than to zero.
    """
    known = ledger.meta().get(REPLIES, "")
    if known in get_args(Replies):
        return cast(Replies, known)
    for o in ledger.observations():
        if o["status"] == "accepted" and o["digest"]:
            with suppress(TapeError):  # damaged; its own attacks say so
                if (near := _projection(run.tape().read(o["round"], o["client"], o["digest"]))) != 0.5:
                    found: Replies = "weights" if near > 0.5 else "updates"
                    if not ledger.readonly:
                        ledger.set_meta(**{REPLIES: found})
                    return found
    return "weights"


def _projection(seen: Observation) -> float:
    """Project a reply on the sent weights: about 1 for weights, 0 for a difference; .5 is undecided."""
    named = [(seen.params[k], t) for k, t in seen.update.items() if k in seen.params]
    if not named and len(seen.params) == len(seen.update):  # renamed, as torch.compile does
        named = list(zip(seen.params.values(), seen.update.values(), strict=True))
    pairs = [
        (sent.double().flatten(), came.double().flatten())
        for sent, came in named
        if came.is_floating_point() and sent.is_floating_point() and sent.shape == came.shape
    ]
    square = sum(float(sent @ sent) for sent, _ in pairs)
    product = sum(float(sent @ came) for sent, came in pairs)
    return product / square if square > 0 and math.isfinite(product) else 0.5


def as_the_model_has_it(seen: Observation, federation: Federation, replies: Replies = "weights") -> Observation:
    """Convert a recorded reply to an update with the model's names and precision.

    Integers (BatchNorm's counters) are left out; other buffers are separate. Parameters that the app does not upload must be
    frozen in the chain; they have the values of the scenario's [model].

    Args:
        seen: the sent arrays (params) and the reply (update), as recorded.
        replies: the kind of reply.

    Raises:
        UploadMismatch: the arrays do not fit the model.
    """
    model = federation.model
    if seen.update and all(t.dtype == torch.uint8 for t in seen.update.values()):
        raise UploadMismatch("the app's replies are bytes (uint8), as of tree models: no attack here inverts them")
    parts = ((names_of(arrays, model), arrays) for arrays in (seen.update, seen.params))
    came, sent = ({names[k]: t for k, t in arrays.items()} for names, arrays in parts)
    own = dict(model.named_parameters())
    buffers = {k: b for k, b in model.named_buffers() if b.is_floating_point()}
    _check(came, sent, own | buffers, model)
    used = [k for k in came if k in own or k in buffers]
    as_sent = {"updates": 1, "gradients": -1}.get(replies)
    update = {k: as_sent * came[k] if as_sent else _difference(came[k], sent[k]) for k in used}
    missing = [k for k in own if k not in update]
    freezing = (getattr(link, "frozen", None) for link in federation.chain.links)  # a method of the defense `freeze`
    frozen: list[Callable[[str], bool]] = [says for says in freezing if says is not None]
    if unsaid := [k for k in missing if not any(says(k) for says in frozen)]:
        raise UploadMismatch(
            f'the app does not upload {_some(unsaid)}: if it keeps them frozen, add [[chain]] use = "freeze" before local_sgd, '
            "and name their values by [model] weights"
        )
    initial: Params = federation.initial()[0] if missing else {}
    return replace(
        seen,
        params={k: (sent[k] if k in sent else initial[k]).to(p.dtype) for k, p in own.items()},
        update={k: update[k].to(p.dtype) if k in update else torch.zeros_like(p) for k, p in own.items()},
        buffers={**seen.buffers, **{k: sent[k].to(b.dtype) for k, b in buffers.items() if k in sent}},
        returned={**seen.returned, **{k: (sent[k] + update[k]).to(b.dtype) for k, b in buffers.items() if k in update}},
    )


def _difference(weights: Tensor, sent: Tensor) -> Tensor:
    """Subtract the sent weights in at least single precision."""
    wide = torch.promote_types(torch.promote_types(weights.dtype, sent.dtype), torch.float32)
    return weights.to(wide) - sent.to(wide)


def names_of(arrays: Mapping[str, Tensor], model: nn.Module) -> dict[str, str]:
    """Return the model's name of each array; positions ("0", "1", ...) follow the state_dict or the parameters.

    A tied parameter that the app uploads only under its second name gets its first one.
    """
    names, known = _known_names(arrays, model), _tensors(model)
    first = {id(p): name for name, p in model.named_parameters()}
    other = {k: first.get(id(known[name]), name) for k, name in names.items() if name in known}
    return {k: name if other.get(k, name) in names.values() else other[k] for k, name in names.items()}


def _known_names(arrays: Mapping[str, Tensor], model: nn.Module) -> dict[str, str]:
    if arrays and all(name.isdecimal() for name in arrays):
        orders = [list(model.state_dict()), [name for name, _ in model.named_parameters()]]
        fits = [names for names in orders if len(names) == len(arrays)]
        if not fits:
            raise UploadMismatch(
                f"the app uploads {len(arrays)} arrays without names, and [model] has {len(orders[0])}, {len(orders[1])} of them "
                "parameters: name the network that the app trains"
            )
        return dict(zip(sorted(arrays, key=int), fits[0], strict=True))
    known = _tensors(model).keys()
    outer = {name.partition(".")[0] for name in known}
    if part := _part_of(arrays, _tensors(model)):
        return {name: f"{part}.{name}" for name in arrays}
    own = {name: _FACTOR.sub(r"\1.default.weight", _TRAINED.sub(".", name)) for name in arrays}
    names = {name: name if name in known else own[name] for name in arrays}
    while not known >= set(names.values()):
        inside = {k: f"{part}.{name}" for part in outer if len(outer) == 1 for k, name in names.items()}
        if inside and known >= set(inside.values()):
            return inside  # our model wraps the app's network
        if len({name.partition(".")[0] for name in names.values()}) > 1 or not all("." in n for n in names.values()):
            return {name: name for name in arrays}
        names = {k: name.partition(".")[2] for k, name in names.items()}  # the app wraps it, as torch.compile does
    return names


def _part_of(arrays: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> str:
    """Return the only layer with these names and shapes; empty if there is none or several."""
    if not arrays or arrays.keys() & known.keys():
        return ""
    first = min(arrays)
    layers = [name.removesuffix(f".{first}") for name in known if name.endswith(f".{first}")]
    shapes = {name: t.shape for name, t in known.items()}
    fits = [layer for layer in layers if all(shapes.get(f"{layer}.{k}") == t.shape for k, t in arrays.items())]
    return fits[0] if len(fits) == 1 else ""


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    # a tied parameter has several names, of which named_parameters() lists the first
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def _check(came: Mapping[str, Tensor], sent: Mapping[str, Tensor], own: Mapping[str, Tensor], model: nn.Module) -> None:
    """Check that the arrays are the model's, finite, and were sent in this form."""
    known = _tensors(model)
    if unknown := [k for k in came if k not in known]:
        has = f"[model] has no {_some(unknown)} (it has {_some(list(known))})"
        raise UploadMismatch(f"{has}: name the app's network, and upload by its state_dict's names, or without names")
    for name, t in ((name, t) for name, t in came.items() if name in own):
        why = ""
        if t.shape != own[name].shape:
            why = f"has shape {tuple(t.shape)}, that of [model] {tuple(own[name].shape)}: name the app's network"
        elif not t.is_floating_point():
            why = f"holds whole numbers ({t.dtype}): let it send floating-point arrays"
        elif name not in sent or sent[name].shape != t.shape:
            why = "was not sent in this form: nothing says where training began"
        elif not torch.isfinite(t).all():
            why = "is not finite: the training has diverged"
        if why:
            raise UploadMismatch(f"the app's {name} {why}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
