"""A secure sum as an ordinary Flower mod: the client sends a masked vector instead of its update."""

import hashlib
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedgauge.client.arrays import npy_array
from fedgauge.client.data_folder import state_folder
from fedgauge.client.deployment.secure_sum import PairwiseMasking, Record, Refused, Value, Vector
from fedgauge.client.files import claimed
from fedgauge.client.mods import Mod, only_arrays

RECORD = "secure-sum"  # of a question, an answer, and what a client keeps between the two
ARRAYS = "secure-sum-arrays"  # of an answer's vector
WEIGHT = "num-examples"


def secure_sum(
    protocol: PairwiseMasking, replies: Literal["updates", "weights"] = "weights", claims: Path | None = None
) -> Mod:
    """A mod that lets a client's update leave only as a part of its group's sum.

    Attach it to training, first in the list: `@app.train(mods=[secure_sum(PairwiseMasking(5, clip=0.1)), as_mod(clip(1.0))])`.
    The server wraps its strategy in fedgauge.server.strategy.secure_aggregation.SecureSumStrategy with the same protocol. A
    client refuses a request for a single update. The mod expects one ArrayRecord in the message, one in the reply, and
    num-examples. Other metrics and integers among the weights stay at the client, since they are not summed.

    Each step of a session is answered once at most. Flower may hand two messages to two processes with one state, and
    their two answers together could reveal an update.

    Args:
        replies: what the ClientApp answers with: weights (anybody's) or updates (fedgauge's).
        claims: a private folder in which the client notes each step before it answers; default: one for the node in
            XDG_STATE_HOME/fedgauge (~/.local/state/fedgauge).

    Raises:
        ValueError: inside the mod: the server asks for a single update, or for a step twice.
    """

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        if RECORD not in message.content.config_records:
            raise Refused("the server asks for a single update: wrap its strategy in SecureSumStrategy")
        # the ClientApp gets what it would get without a secure sum: some expect a single ConfigRecord
        plain = copy(message)
        plain.content = RecordDict({k: v for k, v in message.content.items() if k != RECORD})
        failed: list[Message] = []

        def train() -> tuple[Vector, int]:
            reply = call_next(plain, context)
            if reply.has_error():
                failed.append(reply)
                raise ValueError(reply.error.reason)
            return _update(message, reply, replies), _examples(reply)

        kept, question = dict(context.state.config_records.get(RECORD, ConfigRecord())), read(message.content)
        _claim(protocol, question, claims or state_folder() / "secure-sums" / str(context.node_id))
        try:
            state, answer = protocol.answer(cast(Record, kept), question, train)
        except ValueError:
            if failed:  # the ClientApp's own error, e.g. that it was too late
                return failed[0]
            raise
        context.state[RECORD] = ConfigRecord(cast(Any, state))
        return Message(to_config_record(answer), reply_to=message)

    return mod


def _claim(protocol: PairwiseMasking, question: Mapping[str, Value], claims: Path) -> None:
    """Claim a session's step; Refused if it is claimed already, whatever came of that."""
    session, step = question.get("session"), question.get("step")
    if not isinstance(session, bytes) or not isinstance(step, str):  # 1 and True are equal, and would be two claims
        raise Refused("a question of a secure sum must name its session (bytes) and its step (text)")
    protocol.check(question)
    if not claimed(claims / hashlib.sha256(session + b"/" + step.encode()).hexdigest()):
        raise Refused(f"asked to {step} again in a session: a client answers each question once, in one process")


def to_config_record(record: Mapping[str, Value]) -> RecordDict:
    """A question or an answer as a message carries it."""
    arrays = {k: Array(v) for k, v in record.items() if isinstance(v, np.ndarray)}
    plain = {k: v for k, v in record.items() if k not in arrays}
    return RecordDict({RECORD: ConfigRecord(cast(Any, plain)), **({ARRAYS: ArrayRecord(arrays)} if arrays else {})})


def read(content: RecordDict) -> Record:
    """The question or answer in a message; {} if there is none.

    Raises:
        Exception: hostile bytes may raise anything, before memory is taken for what they claim to be.
    """
    plain = cast(Record, dict(content.config_records.get(RECORD, ConfigRecord())))
    return {**plain, **{k: npy_array(v.data) for k, v in content.array_records.get(ARRAYS, ArrayRecord()).items()}}


def _update(message: Message, reply: Message, replies: str) -> Vector:
    """The floating-point entries of weights - theta, or of an update, flat, in the message's order."""
    sent, returned = (only_arrays(each)[1].to_torch_state_dict() for each in (message, reply))
    moving = {k: t for k, t in sent.items() if t.is_floating_point()}
    expected = sent if replies == "weights" else moving
    forms = [{k: (t.shape, t.is_floating_point()) for k, t in tensors.items()} for tensors in (expected, returned)]
    if forms[0] != forms[1]:
        raise ValueError("the reply's arrays do not have the names, shapes and kinds of the message's")
    origin = moving if replies == "weights" else {k: torch.zeros_like(t) for k, t in moving.items()}
    parts = [(returned[k].double() - t.double()).flatten() for k, t in origin.items()]
    flat: Vector = torch.cat(parts).numpy()
    return flat


def _examples(reply: Message) -> int:
    found = [record[WEIGHT] for record in reply.content.metric_records.values() if WEIGHT in record]
    if len(found) != 1 or not isinstance(found[0], int | float) or found[0] != int(found[0]):
        raise ValueError(f"expected one whole {WEIGHT} in the reply, got {found or 'none'}")
    return int(found[0])
