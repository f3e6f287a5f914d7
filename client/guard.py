"""A client's guard: what it computed is looked at once more before it leaves, and may be held back.

The server learns that nothing comes, and no reason. (That much it does learn: who may hold back by what the examples are tells
one bit of them a round.)
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from flwr.app import ArrayRecord, Context, Error, Message
from torch import Tensor

from client.mods import Mod
from client.update import Params, Update, norm

_LOG = logging.getLogger("fedleak")
WITHHELD = 111  # an error code of our own
REASON = "withheld by the client's guard"  # the same whatever the cause
Audit = Callable[[Params, Update], float]  # (weights as sent, update) -> PSNR in dB of the best reconstructed example
Note = Callable[[str], None]


@dataclass(frozen=True)
class Outbound:
    """What an update must pass: every entry finite, a norm that is not too large, an audit of one's own that fails.

    Args:
        max_norm: the largest Euclidean norm that is sent; None: any.
        threshold: dB; held back is an update of which the audit reconstructs an example at this PSNR or better.
    """

    max_norm: float | None = None
    threshold: float = 20.0

    def objection(self, update: Mapping[str, Tensor], audit: Callable[[], float] | None = None) -> str:
        """Why an update should not leave, for the owner alone; empty where it may.

        Args:
            audit: of this update; ValueError where it cannot say: then it is held back. Asked last, as it costs most.
        """
        floats = {k: t.double() for k, t in update.items() if torch.is_floating_point(t)}
        if wrong := [k for k, t in floats.items() if not torch.isfinite(t).all()]:
            return f"{', '.join(wrong)}: entries that are not finite"
        if self.max_norm is not None and floats and (size := float(norm(floats))) > self.max_norm:
            return f"its norm is {size:.4g}, above max_norm {self.max_norm:g}"
        if audit is None:
            return ""
        try:
            leak = audit()
        except ValueError as error:
            return f"its audit says nothing: {error}"
        # not leak < threshold: a leak that is no number is none that was found to be small
        return "" if leak < self.threshold else f"its audit reconstructs an example at {leak:.1f} dB"


def guard(
    max_norm: float | None = None,
    audit: Audit | None = None,
    threshold: float = 20.0,
    replies: Literal["updates", "weights"] = "weights",
    note: Note = _LOG.warning,
) -> Mod:
    """A mod that answers with an error where an update should not leave: `@app.train(mods=[guard(max_norm=10.0), ...])`.

    First in the list: what the others make of an update is what leaves. It wants one ArrayRecord in the message, or several
    of which one is called "arrays", and in the reply the same names; every other ArrayRecord of the reply must be finite.

    Args:
        audit: None: none; it is handed what the message and the reply hold, and knows the examples by itself.
        replies: what the ClientApp answers with: weights (anybody's) or updates (fedleak's).
        note: told why an update was held back, at the client alone; default: its log.
    """
    outbound = Outbound(max_norm, threshold)

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        sent = _weights(message).to_torch_state_dict()
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        objection = next(filter(None, _objections(outbound, dict(sent), reply, audit, replies)), "")
        if not objection:
            return reply
        note(objection)
        return withheld(message)

    return mod


def withheld(message: Message) -> Message:
    """The answer in the place of an update."""
    return Message(Error(WITHHELD, REASON), reply_to=message)


def _objections(
    outbound: Outbound, sent: Params, reply: Message, audit: Audit | None, replies: Literal["updates", "weights"]
) -> Iterator[str]:
    found = [dict(record.to_torch_state_dict()) for record in reply.content.array_records.values()]
    if not any(tensors.keys() == sent.keys() for tensors in found):
        yield "the reply has no weights of the names that were sent"
    for tensors in found:
        if tensors.keys() != sent.keys():
            yield Outbound().objection(tensors)
            continue
        update = tensors
        if replies == "weights":
            update = {k: t - sent[k] for k, t in tensors.items() if torch.is_floating_point(t)}
        yield outbound.objection(update, None if audit is None else lambda made=update: audit(sent, made))  # type: ignore[misc]
    numbers = [v for record in reply.content.metric_records.values() for v in record.values()]
    flat = [n for v in numbers for n in (v if isinstance(v, list) else [v])]
    yield "" if all(map(math.isfinite, flat)) else "a metric that is not finite"


def _weights(message: Message) -> ArrayRecord:
    records = dict(message.content.array_records)
    if len(records) != 1 and "arrays" not in records:
        raise ValueError(f"guard wants one ArrayRecord in a message, or one called 'arrays', got {sorted(records)}")
    return records["arrays"] if "arrays" in records else next(iter(records.values()))
