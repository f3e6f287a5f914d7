"""Calls of language networks of the package transformers, such that words and their embeddings give the same logits.

Networks of one interface differ: some pool at the last position where they are given embeddings, padded or not; some read
positions off a mask of other form; some take no embeddings. Which call is right is tried on two short sentences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedgauge.client.models.tokenizer import Task, Tokenizer

SAME = 1e-3  # relative difference up to which logits are equal; other positions or another mask change them by more
WORDS = 4  # of the longer sentence


@dataclass(frozen=True)
class NetworkCall:
    """One way to call a network.

    Args:
        causal: each token sees those before it.
        added: the mask is added to the attention scores, (B, 1, L, L), built here since libraries branch on values to build
            it; else it is (B, L), and the network builds its own.
        placed: position numbers are given.
        replaced: embeddings replace the output of the word embeddings, and ids mark the existing positions.
    """

    causal: bool
    added: bool = True
    placed: bool = False
    replaced: bool = False

    def __call__(self, net: Any, x: Tensor, mask: Tensor, pad: int) -> Tensor:
        """Logits of ids (B, L) or embeddings (B, L, width) x, where mask (B, L) says which positions exist."""
        if not x.is_floating_point():
            return self._logits(net, {"input_ids": x}, mask, net.get_input_embeddings().weight.dtype)
        if not self.replaced:
            return self._logits(net, {"inputs_embeds": x}, mask, x.dtype)
        ids = torch.where(mask, int(pad == 0), pad)
        with net.get_input_embeddings().register_forward_hook(lambda *_: x):
            return self._logits(net, {"input_ids": ids}, mask, x.dtype)

    def _logits(self, net: Any, content: dict[str, Tensor], mask: Tensor, dtype: torch.dtype) -> Tensor:
        given = self._allowed(mask, dtype) if self.added else mask.long()
        places = {"position_ids": torch.arange(mask.shape[1], device=mask.device)[None]} if self.placed else {}
        logits: Tensor = net(**content, attention_mask=given, **places).logits
        return logits

    def _allowed(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        seen = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
        if self.causal:
            seen = seen & torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool, device=mask.device).tril()
        floor = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=mask.device)
        return torch.where(seen, torch.zeros_like(floor), floor)


def call_of(net: nn.Module, tokenizer: Tokenizer, task: Task, positions: int, table: Tensor) -> NetworkCall:
    """The first call by which words and their embeddings give the same logits, and padding changes none.

    Args:
        positions: the longest sentence.
        table: the word embeddings.

    Raises:
        ValueError: no call does.
    """
    causal = task == "next_token"
    others = (dict(placed=True), dict(replaced=True), dict(added=False), dict(added=False, replaced=True))
    for call in (NetworkCall(causal), *(NetworkCall(causal, **other) for other in others)):
        try:
            with torch.no_grad():
                if _fits(call, net, tokenizer, task, positions, table):
                    return call
        except Exception:  # a network may raise anything where it is called in another way than its own
            continue
    raise ValueError(
        f"{type(net).__name__} returns different logits for token ids than for their embeddings, or for padded input, so it "
        "cannot be attacked: make `inputs_embeds` and `attention_mask` work as in transformers"
    )


def _fits(call: NetworkCall, net: nn.Module, tokenizer: Tokenizer, task: Task, positions: int, table: Tensor) -> bool:
    """Try a call on two sentences, one of them padded."""
    length, pad = min(WORDS, positions), tokenizer.pad
    words = [i for i in range(tokenizer.size) if i not in tokenizer.special][:length] or [int(pad == 0)]
    ids = torch.tensor([(words * length)[:length], (words[::-1] * length)[:length]], device=table.device)
    ids[1, length - 1 :] = pad if length > 1 else ids[1, length - 1 :]
    mask = ids != pad
    by_words = every = call(net, ids, mask, pad)
    by_embeddings = call(net, table[ids], mask, pad)
    alone = call(net, ids[1:, mask[1]], mask[1:, mask[1]], pad)
    padded = by_words[1:]
    if task == "next_token":
        by_words, by_embeddings, alone = by_words[mask], by_embeddings[mask], alone[0]
        padded = by_words[-len(alone) :]
    changed = ids.clone()
    changed[0, -1] = words[0]
    ahead = call.causal and length > 1 and not _same(call(net, changed, mask, pad)[0, :-1], every[0, :-1])
    return _same(by_words, by_embeddings) and _same(padded, alone) and not ahead


def _same(a: Tensor, b: Tensor) -> bool:
    gap = (a - b).abs().max()
    return bool(gap <= SAME * torch.maximum(a.abs().max(), b.abs().max()))
