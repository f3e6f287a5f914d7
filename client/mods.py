"""Mount an update-level defense as an ordinary Flower mod, in anybody's ClientApp."""

from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Generator

from client.update import Batch, Params, Transform, Update

Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]


def as_mod(transform: Transform, rng: Generator | None = None) -> Mod:
    """A mod that defends the weights a ClientApp replies with: theta + transform(weights - theta).

    Attach it to training, `@app.train(mods=[as_mod(clip(1.0)), as_mod(gaussian(1e-3))])`; the last one listed is the
    nearest to the training. It wants one ArrayRecord in the message and one, with the same names, in the reply.

    Args:
        transform: a defense of the finished update; one that needs the examples cannot be a mod.
        rng: of the defense's randomness; default: seeded by the operating system, the client's own secret.

    Raises:
        ValueError: the reply's arrays do not match the message's.
    """
    if rng is None:
        rng = Generator()
        rng.seed()

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        sent = _only_arrays(message)[1].to_torch_state_dict()
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        key, record = _only_arrays(reply)
        weights = record.to_torch_state_dict()
        if {k: t.shape for k, t in weights.items()} != {k: t.shape for k, t in sent.items()}:
            raise ValueError(f"the reply's arrays {sorted(weights)} are not those of the message, {sorted(sent)}")
        floating = [k for k, t in weights.items() if torch.is_floating_point(t)]

        def trained(params: Params, batch: Batch, rng: Generator | None) -> Update:
            return {k: weights[k] - params[k] for k in floating}

        nothing = Batch(torch.empty(0), torch.empty(0, dtype=torch.int64))
        update = transform(trained)(dict(sent), nothing, rng)
        defended = {k: (sent[k] + update[k]).contiguous() if k in update else t for k, t in weights.items()}
        reply.content[key] = ArrayRecord(defended)
        return reply

    return mod


def _only_arrays(message: Message) -> tuple[str, ArrayRecord]:
    records = dict(message.content.array_records)
    if len(records) != 1:
        raise ValueError(f"as_mod wants exactly one ArrayRecord in a message, got {sorted(records) or 'none'}")
    return next(iter(records.items()))
