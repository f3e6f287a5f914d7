"""An update-level defense as an ordinary Flower mod, for any ClientApp."""

from collections.abc import Callable, Mapping

import torch
from flwr.app import Array, ArrayRecord, Context, Message
from torch import Generator, Tensor

from fedgauge.client.arrays import npy_array, npy_header
from fedgauge.client.chain import Chain, flat
from fedgauge.client.rng import secret_generator
from fedgauge.client.transforms import UpdateTransform
from fedgauge.client.update import Params, Transform, at_least_single

Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]


def as_mod(transform: Transform, rng: Generator | None = None) -> Mod:
    """A mod that defends the weights a ClientApp replies with: theta + transform(weights - theta).

    Attach it to training, `@app.train(mods=[as_mod(clip(1.0)), as_mod(gaussian(1e-3))])`; the last one in the
    list is nearest to the training. It expects one ArrayRecord in the message, and one with the same names in the reply.

    For an epsilon, put a clip and its noise into one mod, `as_mod(chain(clip(1.0), gaussian(1e-3)))`: between two mods weights
    are rounded. The epsilon covers these weights, not the app's metrics or that it answers. Integers and complex numbers pass
    unchanged.

    Args:
        transform: a defense of the finished update (an UpdateTransform, or a chain of them): a mod has no examples.
        rng: source of the defense's randomness; default: the operating system's entropy, which is the client's secret, and
            noise is discrete as in a deployment.

    Raises:
        ValueError: the transform does not act on the finished update, or, in the mod, the reply's arrays do not match the
            message's.
    """
    if rng is None:
        transform = Chain((transform,)).deployed
    # a generator for each: what a mask shows of its own must not lead to another defense's draws
    defenses = []
    for defense, each in flat([transform]):
        if each or not isinstance(defense, UpdateTransform):
            raise ValueError(f"a mod acts on the finished update, but {defense} needs the examples or trains")
        defenses.append((defense, secret_generator() if rng is None else rng))

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        sent = only_arrays(message)[1].to_torch_state_dict()
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        key, record = only_arrays(reply)
        weights = record.to_torch_state_dict()
        if sent.keys() != weights.keys() or any(_form(t) != _form(sent[k]) for k, t in weights.items()):
            raise ValueError(f"the reply's arrays do not match the message's: {sorted(weights)} and {sorted(sent)}")
        trained, start = at_least_single(_floating(weights)), at_least_single(_floating(sent))
        update = {k: t - start[k] for k, t in trained.items()}
        for defense, draws in defenses:
            update = defense.apply(update, draws)
        defended = {k: (start[k] + update[k]).to(weights[k].dtype).contiguous() for k in update}
        reply.content[key] = ArrayRecord({**weights, **defended})
        return reply

    return mod


def _floating(tensors: Params) -> Params:
    return {k: t for k, t in tensors.items() if torch.is_floating_point(t)}


def _form(tensor: Tensor) -> tuple[torch.Size, bool]:
    """Return the facts that must agree; the precision may differ: stock FedAdam sends float64 to models that train in float32."""
    return tensor.shape, torch.is_floating_point(tensor)


def tensors_of(record: ArrayRecord, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A message's arrays as tensors, in the order of `like`.

    Raises:
        ValueError: names, shapes or dtypes differ, or an entry is not finite.
    """
    if differing := sorted(like.keys() ^ record.keys()):
        raise ValueError(f"missing tensors, or unknown to the model: {', '.join(differing)}")
    tensors = {name: tensor_of(name, record[name], t.shape, t.dtype) for name, t in like.items()}
    if wrong := [name for name, t in tensors.items() if not torch.isfinite(t).all()]:
        raise ValueError(f"{wrong[0]} has entries that are not finite")
    return tensors


def tensor_of(name: str, array: Array, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an array as a tensor, after its header is checked; ValueError if shape or dtype differ."""
    expected = torch.empty(0, dtype=dtype).numpy().dtype
    try:
        header = npy_header(array.data)
        if (header.shape, header.dtype) == (shape, expected):
            return torch.from_numpy(npy_array(array.data))
    except ValueError as error:
        raise ValueError(f"{name} cannot be decoded: {error}") from error
    is_of = f"shape {header.shape} and dtype {header.dtype}"
    raise ValueError(f"{name} has {is_of}, expected {tuple(shape)} and {expected}")


def only_arrays(message: Message) -> tuple[str, ArrayRecord]:
    """The one record of arrays in a message, and its name.

    Raises:
        ValueError: there is none or another.
    """
    records = dict(message.content.array_records)
    if len(records) != 1:
        raise ValueError(f"expected exactly one ArrayRecord in a message, got {sorted(records) or 'none'}")
    return next(iter(records.items()))
