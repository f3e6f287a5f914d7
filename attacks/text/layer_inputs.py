"""Inputs of linear maps inside a language model, and its logits along a step of its weights."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgauge.client.models.language import LanguageModel
from fedgauge.client.update import Params, Update

CHUNK = 256  # words or sentences whose inputs are computed at once


class _InputsReached(Exception):
    """The wanted inputs are captured: the rest of the forward pass is unnecessary."""


def layer_inputs(
    model: LanguageModel, params: Params, parts: Sequence[nn.Module | str], x: Tensor, mask: Tensor | None = None
) -> list[Tensor]:
    """The inputs (B, L, width) of modules, or of those of weights, for ids (B, L) or embeddings (B, L, width).

    Args:
        parts: in the order of the forward pass.
        mask: which positions exist; default: those without padding.

    Raises:
        ValueError: the forward pass never calls a module.
    """
    captured: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        captured.append(arguments[0])
        if len(captured) == len(parts):
            raise _InputsReached

    device = next(iter(params.values())).device
    with ExitStack() as hooks:
        for part in parts:
            module = model.get_submodule(part.rpartition(".")[0]) if isinstance(part, str) else part
            hooks.enter_context(module.register_forward_pre_hook(keep))
        try:
            functional_call(model, params, (x.to(device), None if mask is None else mask.to(device)))
        except _InputsReached:
            return captured
    raise ValueError(f"the model's forward pass never calls {parts[-1]}")


@torch.no_grad()
def first_inputs(model: LanguageModel, params: Params, words: Tensor, places: int) -> Tensor:
    """The first attention block's inputs (C, places, width) of words (C,), each in all positions."""
    ids = words[:, None].expand(-1, places).contiguous()
    parts = [model.parts.layers[0].query.weight]
    return layer_inputs(model, params, parts, ids, torch.ones_like(ids, dtype=torch.bool))[0]


def logits_along(
    model: LanguageModel,
    params: Params,
    step: Update,
    ids: Tensor,
    of: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Tensor:
    """The derivative of a function of the logits of sentences (B, L), as the weights begin to move along a step."""
    leaves = {name: params[name].detach().requires_grad_() for name in step}
    with torch.enable_grad():
        values = of(functional_call(model, {**params, **leaves}, (ids,)))
        signal = torch.zeros_like(values, requires_grad=True)
        slopes = torch.autograd.grad(values, list(leaves.values()), signal, create_graph=True)
        # linear in the signal: its derivative by the signal is the values' derivative along the step
        (derivative,) = torch.autograd.grad(slopes, signal, list(step.values()))
    return derivative
