"""Inputs of one linear map inside a language model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgauge.client.models.language import LanguageModel


class _InputsReached(Exception):
    """The wanted inputs are captured: the rest of the forward pass is unnecessary."""


def layer_inputs(
    model: LanguageModel, params: Mapping[str, Tensor], part: nn.Module, ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    """A module's inputs (B, L, width) for sentences (B, L).

    Args:
        mask: which positions exist; default: those without padding.
    """
    captured: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        captured.append(arguments[0])
        raise _InputsReached

    try:
        with part.register_forward_pre_hook(keep), torch.no_grad():
            device = next(iter(params.values())).device
            functional_call(model, dict(params), (ids.to(device), None if mask is None else mask.to(device)))
    except _InputsReached:
        return captured[0]
    raise ValueError(f"the model's forward pass never calls {type(part).__name__}")


def module_of_weight(model: LanguageModel, weight: str) -> nn.Module:
    """The module whose weight has this name."""
    return model.get_submodule(weight.rpartition(".")[0])


def head(model: LanguageModel) -> nn.Module:
    """The module that computes the words' logits; with tied embeddings the weight has another module's name."""
    net: Any = model.net
    module: nn.Module = net.get_output_embeddings()
    return module
