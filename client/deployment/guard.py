"""A client's guard: it inspects the weights that came and the update that would leave, and may withhold the update.

The server learns that no update comes, but not why. (A decision that depends on the examples tells it one bit about them a
round. In an inspection, these are the detectors that evaluate weights on examples: a server can send weights that raise an
alarm at clients with examples of a certain kind. Without them, `examples = false`, a refusal tells the server nothing new. An
alarm that is only logged tells it nothing either.)
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from torch import Generator, Tensor

from fedgauge.client.federation import Federation
from fedgauge.client.inspection.policy import REASON, InspectionPolicy
from fedgauge.client.inspection.probes import ProbeSet, probe_examples
from fedgauge.client.mods import Mod
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Params, Update, norm

_LOG = logging.getLogger("fedgauge")
WITHHELD = 111  # an error code of our own
INSPECTED = "inspected"  # the record of inspections in a client's state
_STATISTICS = (
    "running_mean",
    "running_var",
    "num_batches_tracked",
)  # of BatchNorm: they jump with an honest server, too
Audit = Callable[[Params, Update], float]  # (weights as sent, update) -> PSNR in dB of the best reconstructed example
Note = Callable[[str], None]


@dataclass(frozen=True)
class Inspection:
    """What came of inspecting the weights of a round; by default there was none.

    Args:
        words: for the owner; "" where the mode keeps quiet.
        withhold: why not to answer, for the owner only; "" if the client may.
        suspicion: the largest score over its threshold, >= 0; an alarm from 1 on.
    """

    words: str = ""
    withhold: str = ""
    alarm: bool = False
    suspicion: float = 0.0


@dataclass(frozen=True)
class UpdatePolicy:
    """What an update must pass: every entry is finite, the norm is not too large, the client's own attack on it fails.

    Args:
        max_norm: the largest Euclidean norm that is sent; None: any.
        threshold: an update is withheld if the audit reconstructs an example at this value or better.
        unit: of the audit's values.
        higher_leaks: whether a higher one is better.
    """

    max_norm: float | None = None
    threshold: float = 20.0
    unit: str = "dB"
    higher_leaks: bool = True

    def objection(self, update: Mapping[str, Tensor], audit: Callable[[], float] | None = None) -> str:
        """Why an update should not leave, for the owner only; empty if it may.

        Args:
            audit: of this update; on ValueError the update is withheld. It runs last, as it costs most.
        """
        if odd := [k for k, t in update.items() if t.is_complex()]:
            return f"{', '.join(odd)}: complex numbers, which no limit here is for"
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
            return f"its audit failed: {error}"
        # not (leak >= threshold): a NaN must not pass
        safe = leak < self.threshold if self.higher_leaks else leak > self.threshold
        return "" if safe else f"its audit reconstructs an example at {leak:.1f} {self.unit}"


def guard(
    max_norm: float | None = None,
    audit: Audit | None = None,
    threshold: float = 20.0,
    replies: Literal["updates", "weights"] = "weights",
    note: Note = _LOG.warning,
    inspection_policy: InspectionPolicy | None = None,
    probes: ProbeSet | None = None,
) -> Mod:
    """A mod that answers with an error if an update should not leave: `@app.train(mods=[guard(max_norm=10.0), ...])`.

    Put it first in the list, so that it checks what the other mods made of the update. It expects one ArrayRecord in the
    message, or several with one called "arrays", and the same names in the reply; every other ArrayRecord of the reply must be
    finite.

    Args:
        audit: gets what the message and the reply hold, and knows the examples by itself; None: no audit.
        replies: what the ClientApp answers with: weights (anybody's) or updates (fedgauge's).
        note: gets the reason for withholding an update, at the client only; default: its log.
        inspection_policy: what to do about suspicious weights; None: nothing. The node's state keeps what they are compared with.
        probes: the network, whose buffers become those that were sent, and the client's own examples; None: only the weights
            are inspected.
    """
    outbound, vigilant = UpdatePolicy(max_norm, threshold), inspection_policy or InspectionPolicy()

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        sent = _weights(message).to_torch_state_dict()
        if vigilant.inspect != "off":
            _load_buffers(sent, probes)
            with guard_memory(context.state) as memory:
                inspection = inspect_params(vigilant, probes, _learnt(sent, probes), _round(memory), memory)
            if inspection.words:
                note(inspection.words)
            if inspection.withhold:
                return withheld(message)
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
    """The answer instead of an update."""
    return Message(Error(WITHHELD, REASON), reply_to=message)


@contextmanager
def guard_memory(state: RecordDict) -> Iterator[TransformState]:
    """What a node's state keeps of earlier weights; changes are saved."""
    memory: TransformState = dict(state.array_records.get(INSPECTED, ArrayRecord()).to_torch_state_dict())
    yield memory
    if memory:
        state[INSPECTED] = ArrayRecord({k: t.contiguous() for k, t in memory.items()})


def inspect_message(
    inspection_policy: InspectionPolicy,
    own: Federation,
    client: int,
    round: int,
    rows: Tensor,
    weights: tuple[Params, Mapping[str, Tensor]],
    memory: TransformState,
    rng: Generator | None = None,
) -> Inspection:
    """What a client finds in the weights that it got.

    Args:
        rows: the training images of the round.
        weights: with the buffers that came with them.
        memory: what the client kept from earlier rounds; it is updated.
        rng: None: the client's own entropy.
    """
    if inspection_policy.inspect == "off":
        return Inspection()
    params, buffers = weights
    own.load_buffers(buffers)
    probes = ProbeSet(own.model, probe_examples(own.shards, client, rows), own.loss, own.shards.dataset.normalise)
    return inspect_params(inspection_policy, probes, params, round, memory, rng)


def inspect_params(
    inspection_policy: InspectionPolicy,
    probes: ProbeSet | None,
    params: Params,
    round: int,
    memory: TransformState,
    rng: Generator | None = None,
) -> Inspection:
    """`inspect_message` for weights whose buffers the model of the probes already has."""
    if inspection_policy.inspect == "off":
        return Inspection()
    results = inspection_policy.findings(probes, params, round, memory, rng)
    withhold = results.reasons if inspection_policy.inspect == "refuse" else ""
    words = ""
    if results.alarms:
        words = f"round {round}: alarm, suspicion {results.suspicion:.3g}: {results.reasons}"
    elif inspection_policy.inspect == "log":
        words = f"round {round}: suspicion {results.suspicion:.3g}"
    return Inspection(words, withhold, bool(results.alarms), results.suspicion)


def _learnt(sent: Mapping[str, Tensor], probes: ProbeSet | None) -> Params:
    """The parameters among the tensors that were sent: by the network's names, if it is known."""
    if probes is not None:
        return {name: sent[name] for name, _ in probes.model.named_parameters() if name in sent}
    return {k: t for k, t in sent.items() if torch.is_floating_point(t) and not k.endswith(_STATISTICS)}


def _load_buffers(sent: Mapping[str, Tensor], probes: ProbeSet | None) -> None:
    for name, buffer in () if probes is None else probes.model.named_buffers():
        if name in sent:
            buffer.copy_(sent[name])


def _round(memory: TransformState) -> int:
    """The number of this message: a message's own round number is only the server's claim."""
    memory["messages"] = memory.get("messages", torch.tensor(0)) + 1
    return int(memory["messages"])


def _objections(
    outbound: UpdatePolicy, sent: Params, reply: Message, audit: Audit | None, replies: Literal["updates", "weights"]
) -> Iterator[str]:
    found = [dict(record.to_torch_state_dict()) for record in reply.content.array_records.values()]
    if not any(tensors.keys() == sent.keys() for tensors in found):
        yield "the reply has no weights with the names that were sent"
    for tensors in found:
        if tensors.keys() != sent.keys():
            yield UpdatePolicy().objection(tensors)
            continue
        update = tensors
        if replies == "weights":
            update = {k: t - sent[k] for k, t in tensors.items() if t.is_floating_point() or t.is_complex()}
        yield outbound.objection(update, None if audit is None else lambda made=update: audit(sent, made))  # type: ignore[misc]
    numbers = [v for record in reply.content.metric_records.values() for v in record.values()]
    flat = [n for v in numbers for n in (v if isinstance(v, list) else [v])]
    yield "" if all(map(math.isfinite, flat)) else "a metric that is not finite"


def _weights(message: Message) -> ArrayRecord:
    records = dict(message.content.array_records)
    if len(records) != 1 and "arrays" not in records:
        raise ValueError(f"guard expects one ArrayRecord in a message, or one called 'arrays', got {sorted(records)}")
    return records["arrays"] if "arrays" in records else next(iter(records.values()))
