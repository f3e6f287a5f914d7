"""Adapters: clients train a small part beside a frozen network, and only that part travels.

Frozen weights become buffers outside the state_dict: server and clients build them from the same file or seed.
"""

import importlib
import math
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from fedgauge.client.models.language_parts import ModelParts, with_factors

A, B = "lora_A.default.weight", "lora_B.default.weight"  # the factors' names inside an adapted layer


def lora(
    model: nn.Module,
    rank: int = 16,
    modules: Sequence[str] = ("query", "value"),
    scale: float = 2.0,
    train: Sequence[str] = (),
) -> nn.Module:
    """LoRA (Hu et al., 2022): layers W become W + scale * B A, and clients train A and B, which the package peft adds.

    A is drawn from the federation's seed and B is zero, so the first round's gradient of A is zero.

    Args:
        rank: rows of A, columns of B; at least 1.
        modules: names, or ends of names, of the layers that get factors.
        scale: of the product, alpha / rank in peft's terms; above 0.
        train: names, or ends of names, of modules that clients train whole beside the factors, such as the classifier.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}: a factor without rows shares nothing")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be above 0, got {scale}")
    if not modules:
        raise ValueError("modules is empty, so no layer would be adapted and nothing shared: name some, such as query")
    peft = import_peft()
    layers = _named(model, modules, "modules")
    if bound := [n for n in layers if not isinstance(getattr(model.get_submodule(n), "weight", None), nn.Parameter)]:
        raise ValueError(f"modules: {bound[0]!r} has no weights of its own to adapt: name layers such as query or fc1")
    transposed = _transposed(model, layers)
    config = peft.LoraConfig(r=rank, lora_alpha=rank * scale, target_modules=layers, fan_in_fan_out=transposed)
    try:
        peft.inject_adapter_in_model(config, model)
    except ValueError as error:  # a kind of layer that it cannot adapt
        raise ValueError(f"modules: {str(error).splitlines()[0]}") from error
    _freeze(model, [*_inside(model, train, "train"), *(f"{name}.{leaf}" for name in layers for leaf in (A, B))])
    if isinstance(parts := getattr(model, "parts", None), ModelParts):  # its layers have other names now
        setattr(model, "parts", with_factors(parts, {name for name, _ in model.named_parameters()}, (A, B)))  # noqa: B010
    return model


def frozen_backbone(model: nn.Module, train: Sequence[str]) -> nn.Module:
    """A frozen network of which clients train the named parts alone, such as the classifier or the norms.

    Args:
        train: names, or ends of names, of modules or parameters.
    """
    if not train:
        raise ValueError("train is empty, so nothing would be trained or shared: name a part, such as classifier")
    _freeze(model, _inside(model, train, "train"))
    return model


def import_peft() -> Any:
    """The package peft; ValueError with the command to install it if it is missing."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ValueError("lora needs the package peft: pip install 'fedgauge[adapters]'") from error


def _named(model: nn.Module, ends: Sequence[str], argument: str) -> list[str]:
    """The modules of these names, or whose names end in them; each end must name one at least."""
    names = [name for name, _ in model.named_modules() if name]
    return _matching(names, ends, argument, model)


def _inside(model: nn.Module, ends: Sequence[str], argument: str) -> list[str]:
    """The parameters of these names, and those inside modules of these names."""
    own = [name for name, _ in model.named_parameters()]
    names = [*(name for name, _ in model.named_modules() if name), *own]
    chosen = _matching(names, ends, argument, model) if ends else []
    found = [name for name in own if any(name == part or name.startswith(f"{part}.") for part in chosen)]
    if chosen and not found:
        raise ValueError(f"{argument}: {chosen[0]!r} has no parameters, so nothing of it would be shared")
    return found


def _matching(names: Sequence[str], ends: Sequence[str], argument: str, model: nn.Module) -> list[str]:
    found = {end: [name for name in names if name == end or name.endswith(f".{end}")] for end in ends}
    if absent := [end for end, some in found.items() if not some]:
        leaves = sorted(
            {name.rpartition(".")[2] for name, m in model.named_modules() if name and not any(m.children())}
        )
        raise ValueError(
            f"{argument}: the network has no module {absent[0]!r} (its layers end in: {', '.join(leaves)})"
        )
    return list(dict.fromkeys(name for some in found.values() for name in some))


def _transposed(model: nn.Module, layers: Sequence[str]) -> bool:
    """Whether these layers store their weights as (in, out), as GPT-2's do; all of them or none."""
    kinds = {type(model.get_submodule(name)).__name__ == "Conv1D" for name in layers}
    if len(kinds) > 1:
        raise ValueError("modules: some of these layers store their weights transposed: name layers of one kind")
    return kinds.pop()


def _freeze(model: nn.Module, trained: Collection[str]) -> None:
    """Make all other parameters buffers that no state_dict holds, in every module that shares them."""
    kept = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in trained}
    for module in list(model.modules()):
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in kept:
                parameter.requires_grad_(True)  # peft wants none outside its factors
            else:
                delattr(module, leaf)
                module.register_buffer(leaf, parameter.detach(), persistent=False)
