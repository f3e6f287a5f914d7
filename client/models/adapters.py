"""Adapters: clients train a small part of a frozen network and send only that part.

Frozen weights become buffers outside the state_dict: server and clients build them from the same file or seed.
"""

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from fedgauge.client.components import Count, Positive
from fedgauge.client.models.language_parts import ModelParts, with_factors
from fedgauge.client.models.libraries import import_library
from fedgauge.client.models.vision import into_buffers

A, B = "lora_A.default.weight", "lora_B.default.weight"  # the factors' names inside an adapted layer


def lora(
    model: nn.Module,
    rank: Count = 16,
    modules: Sequence[str] = ("query", "value"),
    scale: Positive = 2.0,
    train: Sequence[str] = (),
) -> nn.Module:
    """LoRA (Hu et al., 2022): clients train the factors A and B of W + scale * B A.

    A is drawn from the federation's seed and B is zero, so the first round's gradient of A is zero.

    Args:
        rank: rows of A, columns of B; at least 1.
        modules: names, or ends of names, of the layers that get factors.
        scale: of the product, alpha / rank in peft's terms; above 0.
        train: names, or ends of names, of modules that clients train whole in addition to the factors, such as the classifier.

    Raises:
        ValueError: peft cannot adapt a layer.
    """
    peft = import_library("peft", "adapters")
    layers = _matching(dict(model.named_modules()), modules)
    # GPT-2 stores its weights (in, out)
    transposed = any(type(model.get_submodule(name)).__name__ == "Conv1D" for name in layers)
    config = peft.LoraConfig(r=rank, lora_alpha=rank * scale, target_modules=layers, fan_in_fan_out=transposed)
    try:
        peft.inject_adapter_in_model(config, model)
    except ValueError as error:  # a kind of layer that it cannot adapt
        raise ValueError(f"modules: {str(error).splitlines()[0]}") from error
    _freeze(model, [*_inside(model, train), *(f"{name}.{leaf}" for name in layers for leaf in (A, B))])
    if isinstance(parts := getattr(model, "parts", None), ModelParts):  # its layers have other names now
        setattr(model, "parts", with_factors(parts, {name for name, _ in model.named_parameters()}, (A, B)))  # noqa: B010
    return model


def frozen_backbone(model: nn.Module, train: Sequence[str]) -> nn.Module:
    """A frozen network except for the named parts, such as the classifier or the norms.

    Args:
        train: names, or ends of names, of modules or parameters.

    Raises:
        ValueError: train names no parameter.
    """
    trained = _inside(model, train)
    if not trained:
        raise ValueError("train names no parameters, so nothing would be shared: name a part, such as classifier")
    _freeze(model, trained)
    return model


def _inside(model: nn.Module, ends: Sequence[str]) -> list[str]:
    """The parameters of these names, and those inside modules of these names."""
    own = [name for name, _ in model.named_parameters()]
    chosen = _matching([*dict(model.named_modules()), *own], ends)
    return [name for name in own if any(name == part or name.startswith(f"{part}.") for part in chosen)]


def _matching(names: Iterable[str], ends: Sequence[str]) -> list[str]:
    """The names that are, or end in, one of these; each end must match one at least."""
    found = {end: [name for name in names if name == end or name.endswith(f".{end}")] for end in ends}
    if absent := [end for end, some in found.items() if not some]:
        leaves = sorted({name.rpartition(".")[2] for name in names} - {""})
        raise ValueError(f"the network has no module {absent[0]!r} (its modules end in: {', '.join(leaves)})")
    return list(dict.fromkeys(name for some in found.values() for name in some))


def _freeze(model: nn.Module, trained: Collection[str]) -> None:
    """Make all other parameters buffers that no state_dict holds."""
    kept = {id(p): p for name, p in model.named_parameters(remove_duplicate=False) if name in trained}
    into_buffers(model, {id(p) for p in model.parameters()} - kept.keys(), persistent=False)
    for parameter in kept.values():
        parameter.requires_grad_(True)  # peft wants none outside its factors
