"""Ghost products: compare the gradients of many sentences with an observed one without forming the large matrices.

A linear layer's gradient is the sum over tokens of output gradient x input; its inner products follow from the two factors
(Goodfellow, 2015: per-example norms). All problems' sentences run through the model as one batch, with one copy of the
weights, and the pass can be differentiated once more by its inputs. vmap gives the same values, several times slower.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.engine.gradient_distances import InnerProducts
from fedgauge.attacks.engine.gradients.factored import FORM_BELOW, FactoredGradient, Gradients, apply, factored, plus
from fedgauge.attacks.engine.gradients.layers import CallRecorder, Unsupported
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.update import Loss, Params, Update


class SentenceGuess(NamedTuple):
    """P problems' batches of sentences.

    Args:
        x: word embeddings (P, B, L, width).
        y: labels (P, B), or next words' probabilities (P, B, L, vocabulary).
        mask: which positions exist (P, B, L).
        owners: (P,) each problem's observation; equal ones are adjacent.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    owners: Tensor


def gradients(
    model: LanguageModel, params: Params, guess: SentenceGuess, loss: Loss, names: Collection[str], slopes: bool = True
) -> Gradients:
    """The gradients of P problems' losses by the parameters of these names.

    Args:
        guess: its embeddings require grad; the result then also requires grad, if slopes are wanted.
        loss: a mean over sentences.

    Raises:
        Unsupported: the model uses one of these parameters in a way that this module does not handle.
    """
    x, problems = guess.x, len(guess.x)
    recorder = _UseRecorder(params, names, problems * x.shape[1])
    with recorder:
        logits: Tensor = functional_call(model, params, (x.flatten(0, 1), guess.mask.flatten(0, 1)))
    total = loss(logits, guess.y.flatten(0, 1)) * problems
    outs = [out for out, _ in recorder.uses]
    signals = torch.autograd.grad(total, outs, create_graph=slopes, materialize_grads=True)
    grads: Gradients = {}
    with torch.set_grad_enabled(slopes):
        for (_, parts), signal in zip(recorder.uses, signals, strict=True):
            for name, part in parts(signal, problems).items():
                grads[name] = plus(part, grads.get(name), 1, params[name].shape)  # added up if it is used twice
    return grads | {name: x.new_zeros(problems, *params[name].shape) for name in names if name not in grads}


class ObservedGradients:
    """The observed gradients (K, ...), and their products with other gradients.

    Where an observed gradient is a product of few rows, as without a defense, its factors replace it.

    Args:
        visible: only the entries of other gradients count that are not exactly zero in the observed one.
    """

    def __init__(self, gradient: Update, visible: bool) -> None:
        self.gradient, self.visible = gradient, visible
        self._factors: dict[str, FactoredGradient | None] = {}

    @cached_property
    def squares(self) -> dict[str, Tensor]:
        """Squared norms (K,) of each tensor."""
        return {name: t.flatten(1).square().sum(1) for name, t in self.gradient.items()}

    def products(self, parts: Mapping[str, Tensor | FactoredGradient], owners: Tensor) -> InnerProducts:
        """The products (P, T) of P expected gradients with their owners' observed ones; equal owners (P,) are adjacent."""
        both = [self._products(name, part, owners) for name, part in parts.items()]
        inner, expected = (torch.stack(column, 1) for column in zip(*both, strict=True))
        return InnerProducts(inner, torch.stack([self.squares[name] for name in parts], 1)[owners], expected)

    def apart(self, parts: Mapping[str, Tensor | FactoredGradient], owners: Tensor, l1: float) -> Tensor:
        """|seen - expected|^2 + l1 |seen - expected|_1 (P,), over all tensors."""
        totals = []
        for name, part in parts.items():
            if isinstance(part, FactoredGradient):
                totals.append(self._norms(part, name, owners, True, l1))
            else:
                difference = (self._shown(name, part, owners) - self.gradient[name][owners]).flatten(1)
                totals.append(difference.square().sum(1) + l1 * difference.abs().sum(1))
        return torch.stack(totals).sum(0)

    def _shown(self, name: str, part: Tensor, owners: Tensor) -> Tensor:
        return part * (self.gradient[name][owners] != 0) if self.visible else part

    def _norms(self, part: FactoredGradient, name: str, owners: Tensor, apart: bool, l1: float) -> Tensor:
        settings = (self.gradient[name], owners, apart, self.visible, l1, torch.is_grad_enabled())
        return apply(_Norms, *part, *settings)

    def _products(self, name: str, part: Tensor | FactoredGradient, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Inner products (P,) with the observed gradient, and squared norms (P,)."""
        seen = self.gradient[name]
        if isinstance(part, Tensor):
            part = self._shown(name, part, owners)
            return (part * seen[owners]).flatten(1).sum(1), part.square().flatten(1).sum(1)
        if name not in self._factors:
            self._factors[name] = None if self.visible else factored(seen, part.rows)
        few = self._factors[name]
        if few is not None:
            return part.products(few.of(owners))
        # one large matrix after the other, without a copy for each problem
        counts = torch.unique_consecutive(owners, return_counts=True)[1].tolist()
        signals = zip(owners[torch.tensor(counts).cumsum(0) - 1].tolist(), part.signal.split(counts), strict=True)
        inner = (torch.cat([signal @ seen[owner] for owner, signal in signals]) * part.input).flatten(1).sum(1)
        if self.visible:
            return inner, self._norms(part, name, owners, False, 0.0)
        rows, columns = (t @ t.mT for t in part)
        return inner, (rows * columns).flatten(1).sum(1)


class _Norms(Function):
    """Squares plus l1 times magnitudes (P,) of products of rows, or of their difference from matrices (K, out, in).

    A large product is formed by itself and freed; visible: where the matrix is zero, it does not count.
    """

    @staticmethod
    def forward(
        ctx: Any,
        signal: Tensor,
        input: Tensor,
        seen: Tensor,
        owners: Tensor,
        apart: bool,
        visible: bool,
        l1: float,
        slopes: bool,
    ) -> Tensor:
        totals, by_signal, by_input = [], torch.empty_like(signal), torch.empty_like(input)
        matrix, signs = torch.empty_like(seen[0]), torch.empty_like(seen[0])
        for p, owner in enumerate(owners.tolist()):
            # few passes over matrices, so that they stay in the cache: memory traffic dominates the cost
            torch.mm(signal[p].T, input[p], out=matrix)
            if visible:
                matrix.mul_(seen[owner] != 0)
            if apart:
                matrix.sub_(seen[owner])
            torch.sign(matrix, out=signs)
            flat = matrix.view(-1)
            totals.append(torch.dot(flat, flat) + l1 * torch.dot(flat, signs.view(-1)))
            if slopes:
                half = torch.add(matrix, signs, alpha=l1 / 2, out=signs)
                by_signal[p] = 2 * torch.mm(half, input[p].T).T
                by_input[p] = 2 * torch.mm(signal[p], half)
        ctx.save_for_backward(by_signal, by_input)
        return torch.stack(totals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_value: Tensor) -> tuple[Tensor | None, ...]:
        by_signal, by_input = ctx.saved_tensors
        return by_value[:, None, None] * by_signal, by_value[:, None, None] * by_input, *[None] * 6


Parts = Callable[[Tensor, int], Gradients]  # the loss's derivative by a layer's output, problems -> gradients


class _UseRecorder(CallRecorder):
    """Runs a model on P problems' sentences, recording what every use of a parameter needs for its gradient."""

    def __init__(self, params: Params, wanted: Collection[str], sentences: int) -> None:
        super().__init__({id(t): name for name, t in params.items() if name in wanted}, _LAYERS)
        self.sentences = sentences
        self.uses: list[tuple[Tensor, Parts]] = []  # a layer's output, and what follows from the derivative there

    def keep(self, out: Tensor, parts: Parts) -> Tensor:
        self.uses.append((out, parts))
        return out

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.product(input, F.linear(input, weight, bias), self.name(weight), self.name(bias), False)

    def addmm(self, bias: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        """GPT-2's linear layer with a weight of (in, out)."""
        return self.product(input, torch.addmm(bias, input, weight), self.name(weight), self.name(bias), True)

    def product(self, input: Tensor, out: Tensor, weight: str | None, bias: str | None, transposed: bool) -> Tensor:
        def parts(signal: Tensor, problems: int) -> Gradients:
            grads: Gradients = {}
            rows, own = (t.reshape(problems, -1, t.shape[-1]) for t in (signal, input))
            if weight is not None:
                both = FactoredGradient(own, rows) if transposed else FactoredGradient(rows, own)
                wide, high = own.shape[2], rows.shape[2]
                large = wide * high >= FORM_BELOW and FactoredGradient.fewer(both.rows, wide, high)
                grads[weight] = both if large else both.form()
            if bias is not None:
                grads[bias] = rows.sum(1)
            return grads

        return self.keep(out, parts)

    def layer_norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        normal = F.layer_norm(input, normalized_shape, None, None, eps)
        names = self.name(weight), self.name(bias)

        def parts(signal: Tensor, problems: int) -> Gradients:
            by_name = (names[0], signal * normal), (names[1], signal)
            return {n: t.reshape(problems, -1, t.shape[-1]).sum(1) for n, t in by_name if n is not None}

        return self.keep(normal * weight if bias is None else torch.addcmul(bias, normal, weight), parts)

    def embedding(self, input: Tensor, weight: Tensor, *settings: Any, **more: Any) -> Tensor:
        """Embeddings of positions or segments: ids (L,), (1, L) or (P * B, L), the same for all problems."""
        name = self.names[id(weight)]
        ids = input if input.dim() == 2 else input[None]
        if len(ids) > 1 and not bool((ids == ids[0]).all()):
            raise Unsupported("embeddings that differ from sentence to sentence")
        # each sentence gets its own copy: a shared one's derivative would be the sum over all problems
        out = F.embedding(ids[0], weight).expand(self.sentences, -1, -1).clone().requires_grad_()

        def parts(signal: Tensor, problems: int) -> Gradients:
            summed = signal.view(problems, -1, *signal.shape[1:]).sum(1)  # (P, L, width)
            return {name: summed.new_zeros(problems, *weight.shape).index_add(1, ids[0], summed)}

        return self.keep(out, parts)


_LAYERS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _UseRecorder.linear,
    torch.addmm: _UseRecorder.addmm,
    F.layer_norm: _UseRecorder.layer_norm,
    F.embedding: _UseRecorder.embedding,
}
