"""A network from its table: its layers, its initial weights, and the changes that a defense or a malicious server makes."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedgauge.client.components import ComponentKind, SpecError, Table, build, coerce, resolve
from fedgauge.client.rng import seed_of

MODEL = ComponentKind("a model", ("fedgauge.models",), nn.Module, annotated=False)
MODEL_DEFENSE = ComponentKind("a defense of the model", ("fedgauge.model_defenses",), nn.Module)
# clients build it as if they had agreed to it
MALICIOUS = ComponentKind("an architecture of a malicious server", ("fedgauge.architectures",), nn.Module)


def build_model(
    table: Table, where: str, offered: Mapping[str, Any], seed: int, beside: Sequence[str] = ()
) -> nn.Module:
    """A network from its table, its initial weights drawn from the seed, with the changes that the table names.

    Args:
        offered: of the dataset.
        beside: other keys that the same table may have; for messages.
    """
    changes = {"defense": MODEL_DEFENSE, "architectures": MALICIOUS}
    own = {k: v for k, v in table.items() if k not in changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "model"))
        _refuse_other_examples(own, where, offered)
        model: nn.Module = build(own, where, MODEL, offered, beside=(*beside, *changes))
        for key, kind in changes.items():
            for i, change in enumerate(coerce(table.get(key, []), list, f"{where}: {key}"), 1):
                place = f"{where}: {key} #{i}"
                model = build(coerce(change, dict, place), place, kind, {**offered, "model": model})
    return model


def _refuse_other_examples(table: Table, where: str, offered: Mapping[str, Any]) -> None:
    """Refuse a model of text for images, and the reverse: only models of text have a parameter `tokenizer`."""
    asks = "tokenizer" in inspect.signature(resolve(table, where, MODEL)).parameters
    if asks and "tokenizer" not in offered:
        raise SpecError(
            f"{where}: {table['use']} reads text, and [data] is images: name a model of images such as lenet"
        )
    if not asks and "tokenizer" in offered:
        raise SpecError(
            f"{where}: {table['use']} reads images, and [data] is text: name a model of text such as tiny_bert"
        )
