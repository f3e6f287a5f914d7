"""Ghost products: compare the gradients of many sentences with an observed one without forming the large matrices.

A linear layer's gradient is the sum over tokens of output gradient x input; its inner products follow from the two factors
(Goodfellow, 2015: per-example norms). All problems' sentences run through the model as one batch, with one copy of the
weights, and the pass can be differentiated once more by its inputs. vmap gives the same values, several times slower.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.engine.gradients.factored import FORM_BELOW, FactoredGradient, factored
from fedgauge.attacks.engine.gradients.recording import CallRecorder, Unsupported
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.update import Loss, Params, Update


class EmbeddingRows(NamedTuple):
    """A gradient (P, rows of the table, width) of embeddings with few used rows: ids (R,), values (P, R, width)."""

    ids: Tensor
    values: Tensor


Part = Tensor | FactoredGradient | EmbeddingRows


def check_differentiable(model: LanguageModel) -> None:
    """ValueError where a model was changed after it was built so that no guess can be matched to an update."""
    kind = getattr(getattr(model.net, "config", None), "_attn_implementation", "eager")
    if kind != "eager":
        raise ValueError(
            f"attention is computed by {kind!r}, whose kernels have no second derivative: set the model's attention to eager"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            raise ValueError(f"dropout is on ({name}), and only the client knows its draws: set the model to eval mode")


def gradients(
    model: LanguageModel,
    params: Params,
    x: Tensor,
    y: Tensor,
    mask: Tensor,
    loss: Loss,
    names: Collection[str],
    differentiable: bool = True,
) -> dict[str, Part]:
    """The gradients of P problems' losses by the parameters of these names.

    Args:
        x: word embeddings (P, B, L, width), which require grad; the result then requires grad, too, if differentiable.
        y: (P, B) labels, or (P, B, L) or (P, B, L, vocabulary) of next words.
        mask: which positions exist (P, B, L).
        loss: a mean over sentences.

    Raises:
        Unsupported: the model uses one of these parameters in a way that this module does not handle.
    """
    problems = len(x)
    recorder = _UseRecorder(params, names, problems * x.shape[1])
    with recorder:
        logits: Tensor = functional_call(model, params, (x.flatten(0, 1), mask.flatten(0, 1)))
    total = loss(logits, y.flatten(0, 1)) * problems
    outs = [call.out for call in recorder.calls]
    signals = torch.autograd.grad(total, outs, create_graph=differentiable, materialize_grads=True)
    grads: dict[str, Part] = {}
    with torch.set_grad_enabled(differentiable):
        for call, signal in zip(recorder.calls, signals, strict=True):
            for name, part in call.parts(signal, problems).items():
                if name in grads:
                    raise Unsupported(f"{name} is used twice")
                if name in names:
                    grads[name] = part
    unused = [name for name in names if name not in grads]
    return grads | {name: x.new_zeros(problems, *params[name].shape) for name in unused}


def formed(part: Part, shape: Sequence[int]) -> Tensor:
    """The gradient (P, ...) in full, for a parameter of this shape."""
    if isinstance(part, FactoredGradient):
        return part.form()
    if isinstance(part, EmbeddingRows):
        table = part.values.new_zeros(len(part.values), *shape)
        return table.index_copy(1, part.ids, part.values)
    return part


class ProductTable(NamedTuple):
    """For P problems and T tensors, each (P, T): <seen, expected>, |seen|^2, |expected|^2."""

    inner: Tensor
    seen: Tensor
    expected: Tensor


class ObservedGradients:
    """The observed gradients (K, ...), and their products with other gradients.

    Where an observed gradient is a product of few rows, as without a defense, its factors replace it.
    """

    def __init__(self, gradient: Update) -> None:
        self.gradient = gradient
        self._factors: dict[str, FactoredGradient | None] = {}
        self._stacks: dict[tuple[str, ...], Tensor] = {}

    @cached_property
    def squares(self) -> dict[str, Tensor]:
        """Squared norms (K,) of each tensor."""
        return {name: t.flatten(1).square().sum(1) for name, t in self.gradient.items()}

    def table(self, parts: Mapping[str, Part], owners: Tensor) -> ProductTable:
        """The products of P expected gradients with their owners' observed ones; equal owners (P,) are adjacent."""
        inner, own, names = [], [], []
        flat: dict[int, list[str]] = {}
        for name, part in parts.items():
            if isinstance(part, Tensor):
                flat.setdefault(part[0].numel(), []).append(name)
                continue
            both = (
                self._factored(name, part, owners)
                if isinstance(part, FactoredGradient)
                else self._rows(name, part, owners)
            )
            inner.append(both[0][:, None])
            own.append(both[1][:, None])
            names.append(name)
        for same in flat.values():
            mine = torch.stack([_tensor(parts[name]).flatten(1) for name in same], 1)  # (P, T, entries)
            inner.append((mine * self._stacked(tuple(same))[owners]).sum(2))
            own.append(mine.square().sum(2))
            names += same
        squares = torch.stack([self.squares[name] for name in names], 1)[owners]
        return ProductTable(torch.cat(inner, 1), squares, torch.cat(own, 1))

    def apart(self, parts: Mapping[str, Part], owners: Tensor, l1: float) -> Tensor:
        """|seen - expected|^2 + l1 |seen - expected|_1 (P,), over all tensors.

        A large gradient is formed alone and freed with its difference: only the slopes by its factors are kept.
        """
        totals = []
        for name, part in parts.items():
            seen = self.gradient[name]
            if isinstance(part, FactoredGradient):
                totals.append(_DifferenceNorms.apply(*part, seen, owners, l1, torch.is_grad_enabled()))  # type: ignore[no-untyped-call]
            else:
                difference = (formed(part, seen.shape[1:]) - seen[owners]).flatten(1)
                totals.append(difference.square().sum(1) + l1 * difference.abs().sum(1))
        return torch.stack(totals).sum(0)

    def _stacked(self, names: tuple[str, ...]) -> Tensor:
        if names not in self._stacks:
            self._stacks[names] = torch.stack([self.gradient[name].flatten(1) for name in names], 1)
        return self._stacks[names]

    def _rows(self, name: str, part: EmbeddingRows, owners: Tensor) -> tuple[Tensor, Tensor]:
        theirs = self.gradient[name][:, part.ids][owners]
        return (part.values * theirs).flatten(1).sum(1), part.values.square().flatten(1).sum(1)

    def _factored(self, name: str, part: FactoredGradient, owners: Tensor) -> tuple[Tensor, Tensor]:
        if name not in self._factors:
            self._factors[name] = factored(self.gradient[name], part.rows)
        few = self._factors[name]
        if few is not None:
            return part.products(few.of(owners))
        matrix, start, pieces = self.gradient[name], 0, []
        for owner, count in zip(*torch.unique_consecutive(owners, return_counts=True), strict=True):
            signal = part.signal[start : start + int(count)]
            pieces.append((signal.flatten(0, 1) @ matrix[owner]).view(*signal.shape[:2], -1))
            start += int(count)
        inner = (torch.cat(pieces) * part.input).flatten(1).sum(1)
        signals, inputs = (t @ t.mT for t in part)
        return inner, (signals * inputs).flatten(1).sum(1)


class _DifferenceNorms(Function):
    """Squares plus l1 times magnitudes (P,) of the difference between products of rows and matrices (K, out, in)."""

    @staticmethod
    def forward(
        ctx: Any, signal: Tensor, input: Tensor, seen: Tensor, owners: Tensor, l1: float, slopes: bool
    ) -> Tensor:
        totals, by_signal, by_input = [], torch.empty_like(signal), torch.empty_like(input)
        apart, signs = torch.empty_like(seen[0]), torch.empty_like(seen[0])
        for p, owner in enumerate(owners.tolist()):
            # few passes over matrices, so that they stay in the cache: memory traffic dominates the cost
            torch.mm(signal[p].T, input[p], out=apart).sub_(seen[owner])
            torch.sign(apart, out=signs)
            flat = apart.view(-1)
            totals.append(torch.dot(flat, flat) + l1 * torch.dot(flat, signs.view(-1)))
            if slopes:
                half = torch.add(apart, signs, alpha=l1 / 2, out=signs)
                by_signal[p] = 2 * torch.mm(half, input[p].T).T
                by_input[p] = 2 * torch.mm(signal[p], half)
        ctx.save_for_backward(by_signal, by_input)
        return torch.stack(totals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_value: Tensor) -> tuple[Tensor | None, ...]:
        by_signal, by_input = ctx.saved_tensors
        return by_value[:, None, None] * by_signal, by_value[:, None, None] * by_input, None, None, None, None


def _tensor(part: Part) -> Tensor:
    assert isinstance(part, Tensor)
    return part


# ------------------------------------------------------------------------------------------------------------- layers


@dataclass(frozen=True, eq=False)
class _ParameterUse:
    """One use of a parameter: a layer's output, and the function from the loss's derivative there to the gradients."""

    out: Tensor
    parts: Callable[[Tensor, int], dict[str, Part]]


class _UseRecorder(CallRecorder):
    """Runs a model on P problems' sentences, recording what every use of a parameter needs for its gradient."""

    def __init__(self, params: Params, wanted: Collection[str], sentences: int) -> None:
        super().__init__({id(t): name for name, t in params.items() if name in wanted}, _LAYERS)
        self.sentences = sentences
        self.calls: list[_ParameterUse] = []

    def keep(self, out: Tensor, parts: Callable[[Tensor, int], dict[str, Part]]) -> Tensor:
        self.calls.append(_ParameterUse(out, parts))
        return out

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.product(input, F.linear(input, weight, bias), self.name(weight), self.name(bias), False)

    def addmm(self, bias: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        """GPT-2's linear layer, whose weight is (in, out)."""
        return self.product(input, torch.addmm(bias, input, weight), self.name(weight), self.name(bias), True)

    def product(self, input: Tensor, out: Tensor, weight: str | None, bias: str | None, transposed: bool) -> Tensor:
        def parts(signal: Tensor, problems: int) -> dict[str, Part]:
            grads: dict[str, Part] = {}
            rows = signal.reshape(problems, -1, signal.shape[-1])
            if weight is not None:
                own = input.reshape(problems, -1, input.shape[-1])
                both = FactoredGradient(own, rows) if transposed else FactoredGradient(rows, own)
                large = own.shape[2] * rows.shape[2] >= FORM_BELOW and FactoredGradient.fewer(
                    rows.shape[1], own.shape[2], rows.shape[2]
                )
                grads[weight] = both if large else both.form()
            if bias is not None:
                grads[bias] = rows.sum(1)
            return grads

        return self.keep(out, parts)

    def layer_norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        if weight is None or bias is None:
            raise Unsupported("a layer norm with only one of weight and bias")
        normal = F.layer_norm(input, normalized_shape, None, None, eps)
        names = self.name(weight), self.name(bias)

        def parts(signal: Tensor, problems: int) -> dict[str, Part]:
            by_name = (names[0], signal * normal), (names[1], signal)
            return {n: t.reshape(problems, -1, t.shape[-1]).sum(1) for n, t in by_name if n is not None}

        return self.keep(torch.addcmul(bias, normal, weight), parts)

    def embedding(self, input: Tensor, weight: Tensor, *settings: Any, **more: Any) -> Tensor:
        """Embeddings of positions or segments: ids (L,), (1, L) or (P * B, L), the same for all problems."""
        name = self.names[id(weight)]
        ids = input if input.dim() == 2 else input[None]
        if len(ids) > 1 and not bool((ids == ids[0]).all()):
            raise Unsupported("embeddings that differ from sentence to sentence")
        used, places = ids[0].unique(return_inverse=True)
        # each sentence gets its own copy: a shared one's derivative would be the sum over all problems
        out = F.embedding(ids[0], weight).expand(self.sentences, -1, -1).clone().requires_grad_()

        def parts(signal: Tensor, problems: int) -> dict[str, Part]:
            summed = signal.view(problems, -1, *signal.shape[1:]).sum(1)  # (P, L, width)
            values = summed.new_zeros(problems, len(used), summed.shape[2]).index_add(1, places, summed)
            return {name: EmbeddingRows(used, values)}

        return self.keep(out, parts)


_LAYERS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _UseRecorder.linear,
    torch.addmm: _UseRecorder.addmm,
    F.layer_norm: _UseRecorder.layer_norm,
    F.embedding: _UseRecorder.embedding,
}
