"""Save the language model that an app trains, with its tokenizer, as the networks `encoder` and `decoder` read them."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedgauge.server.store import run_files
from fedgauge.simulations.rehearsal.observer import Training, unwrapped


def save_language(trained: Sequence[Training], folder: Path) -> Mapping[str, Any] | None:
    """Save the trained network of the package transformers; None if there is none that reads token ids.

    Returns:
        Its folder, the id that pads sentences, the length of the longest one, whether it predicts each next word and the app's
        tokenizer was found, and peft's adapter.
    """
    transformers: Any = sys.modules.get("transformers")
    ids = [x for seen in trained for x in seen.x if not x.is_floating_point() and x.dim() == 2]
    network: Any = next((unwrapped(seen.network) for seen in trained if seen.network is not None), None)
    base: Any = network.get_base_model() if hasattr(network, "get_base_model") else network
    if transformers is None or not ids or not isinstance(base, transformers.PreTrainedModel):
        return None
    size, pads = int(base.get_input_embeddings().num_embeddings), [s.pad for s in trained if s.pad is not None]
    pad = pads[0] if pads else base.config.pad_token_id
    if pad is None:
        used = set(torch.cat([x.flatten() for x in ids]).tolist())
        pad = next((i for i in range(size) if i not in used), 0)
    base.config.save_pretrained(folder)
    run_files.write(folder / "model.safetensors", save(_without_adapter(base), {"format": "pt"}))
    found = _tokenizer([t for seen in trained for t in seen.tokenizers if len(t) <= size], pad)
    words = found or transformers.PreTrainedTokenizerFast(**_numbers(size, pad, ids))
    words.save_pretrained(folder)
    adapter = _adapter(network, base) if hasattr(network, "peft_config") else None
    own = {"folder": str(folder), "pad": pad, "length": max(x.shape[1] for x in ids)}
    return own | {"next_token": base.can_generate(), "tokenizer": found is not None, "adapter": adapter}


def _without_adapter(base: nn.Module) -> dict[str, Tensor]:
    """Return the weights by the names that they had before peft."""
    kept = {k: t for k, t in base.state_dict().items() if "lora_" not in k and ".modules_to_save." not in k}
    return {
        k.replace(".base_layer.", ".").replace(".original_module.", "."): t.clone().contiguous()
        for k, t in kept.items()
    }


def _tokenizer(found: Sequence[Any], pad: int) -> Any:
    """Return the app's tokenizer, the one with this padding."""
    own = (t.eos_token_id if t.pad_token_id is None else t.pad_token_id for t in found)
    return next((t for t, padding in zip(found, own, strict=True) if padding == pad and t.is_fast), None)


def _numbers(size: int, pad: int, ids: Sequence[Tensor]) -> Mapping[str, Any]:
    """Return the settings of a tokenizer that writes ids as numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(i): i for i in range(size)}, unk_token=str(pad)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rows = [row[row != pad] for x in ids for row in x]
    ends = {(int(row[0]), int(row[-1])) for row in rows if len(row)}
    first, last = ends.pop() if len(ends) == 1 else (pad, pad)
    frame = {"cls_token": str(first), "sep_token": str(last)} if first != last else {}
    return {"tokenizer_object": words, "pad_token": str(pad), "unk_token": str(pad), **frame}


def _adapter(network: Any, base: nn.Module) -> Mapping[str, Any]:
    """Return the settings of `lora` for an adapted network; without a rank for another kind of adapter."""
    modules = dict(base.named_modules())
    layers = {name: m for name, m in modules.items() if "default" in getattr(m, "lora_A", {})}
    whole = [name for name, m in modules.items() if "modules_to_save" in m._modules]
    if not layers:
        return {"kind": str(next(iter(network.peft_config.values())).peft_type)}
    one: Any = next(iter(layers.values()))
    leaves = sorted({name.rpartition(".")[2] for name in layers})
    alike = [name for name in modules if name.rpartition(".")[2] in leaves]
    settings = {"rank": one.r["default"], "modules": leaves if len(alike) == len(layers) else sorted(layers)}
    settings["scale"] = float(one.scaling["default"])
    return settings | ({"train": whole} if whole else {})
