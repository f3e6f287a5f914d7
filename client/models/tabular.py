"""Networks for rows of tables with embedded categories; for one-hot rows there is `mlp` of vision.py."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedgauge.client.components import Count
from fedgauge.client.models.columns import Columns
from fedgauge.client.models.transformer import Block
from fedgauge.client.models.vision import mlp


class _Categories(nn.Module):
    """The vectors of a row's categories. One-hot entries times a matrix: the same as a lookup, and with a derivative by the row."""

    def __init__(self, columns: Columns, dimension: int) -> None:
        super().__init__()
        pairs = [(c, part) for c, part in zip(columns, columns.slices, strict=True) if not c.numeric]
        self.parts = [part for _, part in pairs]
        self.tables = nn.ModuleList(nn.Linear(c.entries, dimension, bias=False) for c, _ in pairs)
        for weight in self.tables.parameters():
            nn.init.normal_(weight, std=1 / math.sqrt(dimension))
        self.register_buffer("centre", columns.centre.float(), persistent=False)
        self.register_buffer("scale", columns.scale.float(), persistent=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        assert isinstance(self.scale, Tensor) and isinstance(self.centre, Tensor)
        natural = x * self.scale + self.centre
        return [table(natural[:, part]) for table, part in zip(self.tables, self.parts, strict=True)]


def _number_places(columns: Columns) -> list[int]:
    """The entries of numbers, and those that say that one is missing."""
    parts = [part for c, part in zip(columns, columns.slices, strict=True) if c.numeric]
    return [i for part in parts for i in range(part.start, part.stop)]


class embedding_mlp(nn.Module):
    """Each category has a vector; vectors and scaled numbers go through fully connected layers with ReLU.

    Args:
        dimension: of the vectors, at least 1.
        hidden: widths of the layers.
    """

    def __init__(self, columns: Columns, classes: int, dimension: Count = 8, hidden: Sequence[Count] = (64,)) -> None:
        super().__init__()
        self.categories = _Categories(columns, dimension)
        self.places = _number_places(columns)
        self.layers = mlp((len(self.places) + dimension * len(self.categories.parts),), classes, hidden)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(torch.cat([x[:, self.places], *self.categories(x)], -1))
        return logits


class ft_transformer(nn.Module):
    """A small FT-Transformer (Gorishniy et al., NeurIPS 2021): each feature is a token; pre-norm blocks and a class token.

    Args:
        dimension: of tokens, which heads divides.
        blocks: at least 1.
        hidden: width of a block's two layers, with ReLU in place of the paper's ReGLU.

    Raises:
        ValueError: dimension is no multiple of heads.
    """

    def __init__(
        self,
        columns: Columns,
        classes: int,
        dimension: Count = 32,
        blocks: Count = 2,
        heads: Count = 4,
        hidden: Count = 64,
    ) -> None:
        super().__init__()
        if dimension % heads:
            raise ValueError(f"dimension ({dimension}) must be a multiple of heads ({heads})")
        self.categories = _Categories(columns, dimension)
        self.places = _number_places(columns)
        self.numbers = nn.ModuleList(nn.Linear(1, dimension) for _ in self.places)
        # the class token, and the biases of the categories' tokens, as one layer that takes a constant
        self.constants = nn.Linear(1, dimension * (1 + len(self.categories.parts)), bias=False)
        self.blocks = nn.ModuleList(_PreNormBlock(dimension, heads, hidden, first=i == 0) for i in range(blocks))
        self.norm, self.head = nn.LayerNorm(dimension), nn.Linear(dimension, classes)

    def forward(self, x: Tensor) -> Tensor:
        constants = self.constants(torch.ones_like(x[:, :1])).unflatten(-1, (1 + len(self.categories.parts), -1))
        numbers = [linear(x[:, i : i + 1]) for linear, i in zip(self.numbers, self.places, strict=True)]
        categories = [vector + constants[:, i] for i, vector in enumerate(self.categories(x), 1)]
        tokens = torch.stack([constants[:, 0], *numbers, *categories], 1)
        for block in self.blocks:
            tokens = block(tokens)
        logits: Tensor = self.head(self.norm(tokens[:, 0]).relu())
        return logits


class _PreNormBlock(Block):
    """Attention and two layers, each with a norm before it; the first attention has none (section 3.3)."""

    def __init__(self, width: int, heads: int, hidden: int, first: bool) -> None:
        super().__init__(width, heads, hidden)
        if first:
            self.norm1 = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attended(self.norm1(x))
        out: Tensor = x + self.narrow(self.wide(self.norm2(x)).relu())
        return out
