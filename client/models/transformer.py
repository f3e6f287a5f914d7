"""The small transformer of Decepticons (Fowl et al., 2023), which LTI also attacks."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Transformer(nn.Module):
    """Post-norm blocks with ReLU, with the interface of the package transformers."""

    positions = 1024

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        if width % heads or width % 2:
            raise ValueError(f"width must be even and divide among the heads, got {width} and {heads}")
        self.config = SimpleNamespace(num_attention_heads=heads, max_position_embeddings=self.positions)
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_PostNormBlock(width, heads, hidden) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        for weight in (self.words.weight, self.head.weight):
            nn.init.uniform_(weight, -0.1, 0.1)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> SimpleNamespace:
        x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        x = x * math.sqrt(x.shape[-1]) + self._placed(x)
        for block in self.blocks:
            x = block(x, attention_mask)
        return SimpleNamespace(logits=self.head(x))

    def _placed(self, x: Tensor) -> Tensor:
        """The positions' vectors (L, width): sines and cosines."""
        places = torch.arange(x.shape[1], device=x.device)
        rates = torch.exp(torch.arange(0, x.shape[-1], 2, device=x.device) * (-math.log(1e4) / x.shape[-1]))
        angles = places[:, None] * rates
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(x.dtype)


class Block(nn.Module):
    """Attention that can be differentiated twice, with separate projections, and the layers of a block."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1: nn.Module = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def attended(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """The attention's output (B, L, width); added: to the scores."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = (scores if added is None else scores + added).softmax(-1)
        out: Tensor = self.out((weights @ v).transpose(1, 2).flatten(-2))
        return out


class _PostNormBlock(Block):
    """nn.TransformerEncoderLayer."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__(width, heads, hidden)
        for linear in (self.query, self.key, self.value):  # as nn.MultiheadAttention draws its three as one
            nn.init.uniform_(linear.weight, -math.sqrt(6 / (4 * width)), math.sqrt(6 / (4 * width)))
        for linear in (self.query, self.key, self.value, self.out):
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, added: Tensor | None) -> Tensor:
        x = self.norm1(x + self.attended(x, added))
        out: Tensor = self.norm2(x + self.narrow(F.relu(self.wide(x))))
        return out
