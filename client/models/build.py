"""A network from its table: its layers, its initial weights, and the changes by adapters, a defense or a malicious server."""

import inspect
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

_CHANGES = {
    "adapter": ADAPTER,
    "defense": MODEL_DEFENSE,
    "architectures": MALICIOUS,
}  # a network's table's keys for them


def build_model(
    table: Table, where: str, offered: Mapping[str, Any], seed: int, beside: Sequence[str] = ()
) -> nn.Module:
    """A network from its table, its initial weights drawn from the seed, with the changes that the table names.

    Args:
        offered: of the dataset.
        beside: other keys that the same table may have; for messages.
    """
    own = {k: v for k, v in table.items() if k not in _CHANGES}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "model"))
        _refuse_other_examples(own, where, offered)
        model: nn.Module = build(own, where, MODEL, offered, beside=(*beside, *_CHANGES))
        for place, change, kind in changes_of(table, where):
            model = build(change, place, kind, {**offered, "model": model})
    _refuse_lazy_layers(model, where, offered)
    return model


def changes_of(table: Table, where: str) -> list[tuple[str, Table, ComponentKind]]:
    """The changes that a network's table names, in the order in which they are made: place for messages, table, kind."""
    places = [
        (f"{where}: {key} #{i}", change, kind)
        for key, kind in _CHANGES.items()
        for i, change in enumerate(coerce(table.get(key, []), list, f"{where}: {key}"), 1)
    ]
    return [(place, coerce(change, dict, place), kind) for place, change, kind in places]


def _refuse_lazy_layers(model: nn.Module, where: str, offered: Mapping[str, Any]) -> None:
    """Refuse a network whose weights have no shape before its first pass: server and clients must agree on them beforehand."""
    for name, module in model.named_modules():
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            shape = ", ".join(map(str, offered.get("shape", ())))
            raise SpecError(
                f"{where}: layer {name!r} ({type(module).__name__}) has no weights before its first pass: let the factory run one "
                f"example through the network, model(torch.zeros(1, {shape})), or name the layer's input size"
            )


def _refuse_other_examples(table: Table, where: str, offered: Mapping[str, Any]) -> None:
    """Refuse a model of text for images, and the reverse: only models of text have a parameter `tokenizer`."""
    found = resolve(table, where, MODEL)
    asks = "tokenizer" in inspect.signature(found).parameters
    of_images = is_own(table, MODEL) and "shape" in inspect.signature(found).parameters and table["use"] != "mlp"
    if "columns" in offered and (of_images or asks):
        kind = "text" if asks else "images"
        raise SpecError(
            f"{where}: {table['use']} reads {kind}, and [data] is rows of a table: name mlp, embedding_mlp or ft_transformer"
        )
    if asks and "tokenizer" not in offered:
        raise SpecError(
            f"{where}: {table['use']} reads text, and [data] is images: name a model of images such as lenet"
        )
    if "columns" in inspect.signature(found).parameters and "columns" not in offered:
        raise SpecError(
            f"{where}: {table['use']} reads rows of a table, and [data] has no columns: name a network of images or of text"
        )
    if not asks and "tokenizer" in offered:
        raise SpecError(
            f"{where}: {table['use']} reads images, and [data] is text: name a model of text such as tiny_bert. A network of text "
            "of your own is a function with an argument `tokenizer` (docs/bring-your-own.md)"
        )
