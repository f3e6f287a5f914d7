"""A network from its table: its layers, its initial weights, and the changes by adapters, a defense or a malicious server."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedgauge.client.components import ComponentKind, SpecError, Table, build, coerce, is_own, resolve
from fedgauge.client.rng import seed_of

MODEL = ComponentKind("a model", ("fedgauge.models",), nn.Module, annotated=False)
ADAPTER = ComponentKind("an adapter of the model", ("fedgauge.adapters",), nn.Module)
MODEL_DEFENSE = ComponentKind("a defense of the model", ("fedgauge.model_defenses",), nn.Module)
# clients build it as if they had agreed to it
MALICIOUS = ComponentKind("an architecture of a malicious server", ("fedgauge.architectures",), nn.Module)

WHERE = "[model]"  # place of the table, for messages
_CHANGES = {"adapter": ADAPTER, "defense": MODEL_DEFENSE, "architectures": MALICIOUS}  # by key of a network's table


def build_model(table: Table, offered: Mapping[str, Any], seed: int, more_keys: Sequence[str] = ()) -> nn.Module:
    """A network from its table, its initial weights drawn from the seed, with the changes that the table names.

    Args:
        offered: of the dataset.
        more_keys: other valid keys of the table, for messages.

    Raises:
        SpecError: the table fits no network, or the network does not fit the data.
    """
    own = {k: v for k, v in table.items() if k not in _CHANGES}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "model"))
        _refuse_other_examples(own, offered)
        model: nn.Module = build(own, WHERE, MODEL, offered, more_keys=(*more_keys, *_CHANGES))
        if isinstance(model, getattr(sys.modules.get("transformers"), "PreTrainedModel", ())):
            model.register_forward_hook(_logits)
        for place, change, kind in changes_of(table):
            model = build(change, place, kind, {**offered, "model": model})
    for name, module in model.named_modules():
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            raise SpecError(f"{WHERE}: layer {name!r} is lazy: let the factory run one example through the network")
    return model


def _logits(network: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Return the logits of Hugging Face's networks, which are one of several outputs."""
    return getattr(outputs, "logits", outputs)


def changes_of(table: Table) -> list[tuple[str, Table, ComponentKind]]:
    """The changes that a network's table names, in the order in which they are made: place for messages, table, kind."""
    places = [
        (f"{WHERE}: {key} #{i}", change, kind)
        for key, kind in _CHANGES.items()
        for i, change in enumerate(coerce(table.get(key, []), list, f"{WHERE}: {key}"), 1)
    ]
    return [(place, coerce(change, dict, place), kind) for place, change, kind in places]


def _refuse_other_examples(table: Table, offered: Mapping[str, Any]) -> None:
    """Refuse a network of images, text or rows for data of another kind: its parameters say what it takes."""
    asks = inspect.signature(resolve(table, WHERE, MODEL)).parameters.keys()
    own = {"tokenizer": "text", "columns": "rows of a table"}
    given = next((kind for key, kind in own.items() if key in offered), "images")
    of_images = "shape" in asks and is_own(table, MODEL) and table["use"] != "mlp"
    otherwise = "images" if of_images or given == "text" else given
    reads = next((kind for key, kind in own.items() if key in asks), otherwise)
    if reads != given:
        raise SpecError(f"{WHERE}: {table['use']} reads {reads}, and [data] is {given}: choose another model")
    if reads == "images" and of_images and len(offered["shape"]) != 3:
        shape = tuple(offered["shape"])
        raise SpecError(
            f"{WHERE}: {table['use']} reads images (C, H, W), and [data] has {shape}: choose mlp, or your own"
        )
