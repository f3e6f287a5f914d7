"""What is computed inside a language model: the inputs of one of its linear maps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgauge.client.models.language import LanguageModel


class _InputsReached(Exception):
    """The wanted inputs are there: the rest of the network need not be computed."""


def layer_inputs(
    model: LanguageModel, params: Mapping[str, Tensor], part: nn.Module, ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    """What a part of the model is fed for sentences (B, L), (B, L, width).

    Args:
        mask: which positions exist; default: those that hold no padding.
    """
    found: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[0])
        raise _InputsReached

    handle = part.register_forward_pre_hook(keep)
    try:
        with torch.no_grad():
            functional_call(model, dict(params), (ids, mask))
    except _InputsReached:
        return found[0]
    finally:
        handle.remove()
    raise ValueError(f"{type(part).__name__} is no part that the model computes")


def module_of_weight(model: LanguageModel, weight: str) -> nn.Module:
    """The module whose weight has this name."""
    return model.get_submodule(weight.rpartition(".")[0])


def head(model: LanguageModel) -> nn.Module:
    """The module that makes the words' logits: of tied embeddings not the one whose name the weight bears."""
    net: Any = model.net
    found: nn.Module = net.get_output_embeddings()
    return found
