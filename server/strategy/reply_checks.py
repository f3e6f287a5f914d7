"""What one reply must be before anything is computed with it: its arrays, its number of examples, its metrics."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedgauge.client.arrays import npy_header
from fedgauge.client.update import Params, Update

MOST_EXAMPLES = 10**9  # that one client may claim if the server does not know better
MOST_STEPS = 2**53  # in a counter: beyond it an average in floating point skips whole numbers
_Form = TypeVar("_Form", bound=Hashable)
VARIANCE, STEPS = "running_var", "num_batches_tracked"  # how torch names BatchNorm's variances and its counter


@dataclass(frozen=True, eq=False)
class AcceptedReply:
    """A reply that the validator accepted."""

    client: int
    update: Update
    examples: int
    buffers: Mapping[str, Tensor]
    note: str = ""  # what the client's guard says about the weights that it was sent

    def moved(self, buffers: Mapping[str, Tensor]) -> Params:
        """How far the client has moved the buffers that it was sent."""
        return {k: t - buffers[k] for k, t in self.buffers.items()}


class ReplyRejected(ValueError):
    """A reply that the strategy must not get; the message is the recorded reason."""


def tensors_of(record: ArrayRecord, reference: Mapping[str, Tensor], loose: bool = False) -> dict[str, Tensor]:
    """A reply's arrays as tensors in the reference's order; ReplyRejected if names, shapes or dtypes differ from it.

    Args:
        loose: a user's own app may send back some of the arrays alone, floating-point ones in another precision, and whole
            numbers (BatchNorm's counters) as any kind of number.
    """
    if loose:
        reference = {name: t for name, t in reference.items() if name in record} or reference
    if missing := sorted(reference.keys() - record.keys()):
        raise ReplyRejected(f"missing tensors: {', '.join(missing)}")
    if extra := sorted(record.keys() - reference.keys()):
        raise ReplyRejected(f"tensors unknown to the model: {', '.join(extra)}")
    tensors: dict[str, Tensor] = {}
    for name, like in reference.items():
        expected = like.numpy()
        try:
            shape, dtype, *_ = npy_header(record[name].data)
            alike = dtype == expected.dtype or (
                loose and dtype.kind in {"f": "f", "i": "iuf"}.get(expected.dtype.kind, "")
            )
            if shape == expected.shape and alike:
                array = record[name].numpy()
                tensors[name] = torch.from_numpy(array)  # raises for another machine's byte order, or long doubles
        except Exception as error:  # hostile bytes can raise anything: ValueError, MemoryError, RecursionError
            raise ReplyRejected(f"{name} cannot be decoded: {error}") from error
        if shape != expected.shape:
            raise ReplyRejected(f"{name} has shape {shape}, expected {expected.shape}")
        if not alike:
            raise ReplyRejected(f"{name} has dtype {dtype}, expected {expected.dtype}")
        if not np.isfinite(array).all():
            raise ReplyRejected(f"{name} has entries that are not finite")
        if expected.dtype.kind == "i":
            _check_counter(name, array, expected)
    return tensors


def _check_counter(name: str, array: NDArray[Any], sent: NDArray[Any]) -> None:
    """Refuse whole numbers that no training counts to: an average of them would overflow, or become negative."""
    array = array.astype(np.float64) if array.dtype.kind == "f" else array  # half precision does not reach the bound
    if ((array > MOST_STEPS) | (array < -MOST_STEPS)).any():
        raise ReplyRejected(f"{name} must be from -{MOST_STEPS} to {MOST_STEPS}")
    if name.endswith(STEPS) and ((array <= -1) & (sent >= 0)).any():
        raise ReplyRejected(f"{name} is negative, and it counts batches")


def check_variances(buffers: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
    """ReplyRejected if a variance has become negative: the network's output would not be a number."""
    for name, returned in buffers.items():
        if name.endswith(VARIANCE) and ((returned < 0) & (sent[name] >= 0)).any():
            raise ReplyRejected(f"{name} is negative, and it is a variance")


def difference(weights: Tensor, sent: Tensor) -> Tensor:
    """What training added to an array; in half precision a difference of two would be rounded once more."""
    if weights.is_floating_point():
        wide = torch.promote_types(torch.promote_types(weights.dtype, sent.dtype), torch.float32)
        return weights.to(wide) - sent.to(wide)
    return weights ^ sent if weights.dtype == torch.bool else weights.to(sent.dtype) - sent


def examples_of(message: Message, key: str, most: int) -> int:
    """How many examples a client says that it trained on; ReplyRejected if it is no number from 1 to `most`."""
    examples = metrics_of(message).get(key)
    if not isinstance(examples, int | float) or not 1 <= examples <= most or examples != int(examples):
        raise ReplyRejected(f"{key} must be a whole number from 1 to {most}, got {str(examples)[:40]}")
    return int(examples)


def wrong_weight(value: object, key: str, most: int) -> str:
    """Why no average can be weighted by a client's number of examples, which may be 0 in an evaluation; empty if one can."""
    fits = isinstance(value, int | float) and 0 <= value <= most
    return "" if fits else f"{key} must be a number from 0 to {most}, got {str(value)[:40]}"


def commonest(forms: Sequence[_Form]) -> _Form | None:
    """The form that more replies have than any other; None if there is none."""
    ranked = Counter(forms).most_common(2)
    return ranked[0][0] if ranked and (len(ranked) < 2 or ranked[0][1] > ranked[1][1]) else None


def unlike_most(contents: Sequence[RecordDict]) -> list[int]:
    """The positions of replies whose records, or arrays, have other names than most; none if no form is the commonest."""

    def form(content: RecordDict) -> tuple[frozenset[tuple[str, ...]], frozenset[str]]:
        arrays = frozenset((name, *sorted(record)) for name, record in content.array_records.items())
        return arrays, frozenset(content.metric_records)

    forms = [form(content) for content in contents]
    usual = commonest(forms)
    return [i for i, own in enumerate(forms) if usual is not None and own != usual]


def metrics_of(message: Message) -> MetricRecord:
    """A reply's only MetricRecord."""
    records = list(message.content.metric_records.values())
    if len(records) != 1:
        raise ReplyRejected(f"expected one MetricRecord, got {len(records)}")
    return records[0]


def shared(records: Sequence[MetricRecord]) -> list[MetricRecord]:
    """The records without entries that not all have in the same form, because Flower would end the whole run over them."""

    def form(value: object) -> int | None:
        return len(value) if isinstance(value, list) else None

    keys = [
        k for k in (records[0] if records else ()) if all(k in r and form(r[k]) == form(records[0][k]) for r in records)
    ]
    return [MetricRecord({k: r[k] for k in keys}) for r in records]
