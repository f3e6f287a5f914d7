"""The parts of a language model, found by the types and names of its modules, never by their position."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fedgauge.client.models.tokenizer import Task

_PROJECTIONS = {
    "query": ("query", "q_lin", "q_proj"),
    "key": ("key", "k_lin", "k_proj"),
    "value": ("value", "v_lin", "v_proj"),
}
_FUSED = "c_attn"  # query, key and value side by side, in this order


@dataclass(frozen=True)
class Projection:
    """The location of the weights of a linear map.

    Args:
        weight, bias: names of parameters.
        start, stop: its outputs within a fused map; stop None: all.
        transposed: the weight is stored as (in, out).
        factors: names of LoRA's factors A (rank, in) and B (out, rank) of a frozen weight; None: the map has none.
    """

    weight: str
    bias: str | None
    start: int = 0
    stop: int | None = None
    transposed: bool = False
    factors: tuple[str, str] | None = None

    def of(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Weight (..., out, in) and bias (..., out) out of weights, an update, or several stacked."""
        weight = tensors[self.weight]
        weight = weight.mT if self.transposed else weight
        bias = (
            None if self.bias is None or self.bias not in tensors else tensors[self.bias][..., self.start : self.stop]
        )
        return weight[..., self.start : self.stop, :], bias


@dataclass(frozen=True)
class BlockParts:
    """One block: its attention's projections, and the names of the weights and biases of its norms."""

    query: Projection
    key: Projection
    value: Projection
    norms: tuple[str, ...]


@dataclass(frozen=True)
class ModelParts:
    """Names of a language model's parameters by their function, with frozen ones."""

    word: str
    position: str | None
    head: tuple[str, str | None]
    layers: tuple[BlockParts, ...]

    @property
    def tied(self) -> bool:
        """Check that the head's rows are the word embeddings."""
        return self.head[0] == self.word

    @property
    def key_biases(self) -> frozenset[str]:
        """Biases of keys: their gradient is zero up to rounding, since the softmax cancels them."""
        return frozenset(layer.key.bias for layer in self.layers if layer.key.bias and layer.key.stop is None)


def with_factors(parts: ModelParts, shared: Collection[str], names: tuple[str, str]) -> ModelParts:
    """Rename the weights of projections that got LoRA's factors.

    Args:
        shared: the model's parameters.
        names: of the factors A and B inside an adapted layer.
    """

    def adapted(projection: Projection) -> Projection:
        layer, _, leaf = projection.weight.rpartition(".")
        factors = (f"{layer}.{names[0]}", f"{layer}.{names[1]}")
        if factors[0] not in shared:
            return projection
        base = f"{layer}.base_layer"
        return replace(projection, weight=f"{base}.{leaf}", bias=projection.bias and f"{base}.bias", factors=factors)

    layers = (BlockParts(adapted(b.query), adapted(b.key), adapted(b.value), b.norms) for b in parts.layers)
    return replace(parts, layers=tuple(layers))


class PartFinder:
    """Finds the parts of a network by the types and names of its modules."""

    def __init__(self, net: Any, task: Task) -> None:
        self.net, self.task = net, task
        # of a tied parameter, the first of its names
        self.name = {id(p): f"net.{name}" for name, p in net.named_parameters()}
        self.modules: dict[str, Any] = dict(net.named_modules())  # torch types every attribute of a module alike
        blocks = self._blocks()
        words = net.get_input_embeddings()
        placed = [
            module
            for name, module in self.modules.items()
            if isinstance(module, nn.Embedding)
            and module is not words
            and ("position" in (leaf := name.rpartition(".")[2]) or leaf == "wpe")
        ]
        rows = placed[-1] if placed else None
        # RoBERTa's positions start behind the row of the padding
        reserved = -1 if rows is None or rows.padding_idx is None else int(rows.padding_idx)
        # OPT's table has two rows more than positions
        most = int(getattr(getattr(net, "config", None), "max_position_embeddings", 2**31))
        self.positions = most if rows is None else min(int(rows.num_embeddings) - reserved - 1, most)
        self.parts = ModelParts(
            word=self.name[id(words.weight)],
            position=None if rows is None else self.name[id(rows.weight)],
            head=self._head(),
            layers=tuple(self._layer(name) for name in blocks),
        )
        inside = [name for name, _ in net.named_parameters() if name.startswith(tuple(f"{b}." for b in blocks))]
        self.biases = frozenset(f"net.{name}" for name in inside if name.rpartition(".")[2] == "bias")

    def _blocks(self) -> list[str]:
        """The stacked blocks: the first list of modules in which each has projections of its own."""
        for name, module in self.modules.items():
            if not isinstance(module, nn.ModuleList) or not len(module):
                continue
            children = [f"{name}.{child}" for child, _ in module.named_children()]
            if all(self._projections(child) for child in children):
                return children
        raise ValueError(f"{type(self.net).__name__} has no blocks with query, key and value named as in BERT or GPT-2")

    def _projections(self, block: str) -> dict[str, str]:
        """The modules for query, key and value of a block; empty unless all three are there."""
        inside = {name: name.rpartition(".")[2] for name in self.modules if name.startswith(block + ".")}
        if fused := [name for name, leaf in inside.items() if leaf == _FUSED]:
            return dict.fromkeys(_PROJECTIONS, fused[0])
        found = {what: [n for n, leaf in inside.items() if leaf in names] for what, names in _PROJECTIONS.items()}
        return {what: names[0] for what, names in found.items()} if all(found.values()) else {}

    def _layer(self, block: str) -> BlockParts:
        query, key, value = (self._projection(name, i) for i, name in enumerate(self._projections(block).values()))
        norms = [
            self.name[id(p)]
            for name, module in self.modules.items()
            if name.startswith(block + ".") and isinstance(module, nn.LayerNorm)
            for p in module.parameters()
        ]
        return BlockParts(query, key, value, tuple(norms))

    def _projection(self, name: str, place: int) -> Projection:
        """A module's linear map, or its place-th third if the module computes query, key and value together."""
        module = self.modules[name]
        if module.weight.dim() != 2:
            raise ValueError(f"layer {name!r} of {type(self.net).__name__} is no matrix")
        weight, bias = self.name[id(module.weight)], getattr(module, "bias", None)
        transposed = not isinstance(module, nn.Linear)
        third = int(module.weight.shape[1 if transposed else 0]) // 3
        fused = name.rpartition(".")[2] == _FUSED
        start, stop = (place * third, (place + 1) * third) if fused else (0, None)
        return Projection(weight, None if bias is None else self.name[id(bias)], start, stop, transposed)

    def _head(self) -> tuple[str, str | None]:
        if self.task == "next_token":
            head: Any = self.net.get_output_embeddings()
        else:
            body = getattr(self.net, "base_model", self.net)  # some networks register their classifier before it
            inside = set() if body is self.net else set(body.modules())
            head = [m for m in self.modules.values() if isinstance(m, nn.Linear) and m not in inside][-1]
        bias = head.bias
        return self.name[id(head.weight)], None if bias is None else self.name[id(bias)]
