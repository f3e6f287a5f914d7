"""Replacements for layers without a second derivative in torch.

Hard sigmoid and hard swish by clamping; weighted embedding bags by embeddings; attention by its formula instead of fused
kernels; recurrent layers without cuDNN. Values and first derivatives stay the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """A context in which these layers have a second derivative."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _Composed(), sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Composed(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _COMPOSED.get(func, func)(*args, **(kwargs or {}))


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return _given((input + 3).clamp(0, 6) / 6, input, inplace)


def _hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    before = input.clone() if inplace else input
    return _given(before * _hardsigmoid(before), input, inplace)


def _given(found: Tensor, input: Tensor, inplace: bool) -> Tensor:
    return input.copy_(found) if inplace else found


def _embedding_bag(input: Tensor, weight: Tensor, *further: Any, **settings: Any) -> Tensor:
    """Bags that are the rows of a matrix; anything else by the original."""
    left = {k: v for k, v in settings.items() if k not in ("mode", "per_sample_weights")}
    plain = not any(v for v in (*further, *left.values()) if not isinstance(v, float)) and input.dim() == 2
    mode, weights = settings.get("mode", "mean"), settings.get("per_sample_weights")
    if not plain or mode not in ("sum", "mean"):
        found: Tensor = F.embedding_bag(input, weight, *further, **settings)
        return found
    rows = F.embedding(input, weight)
    rows = rows if weights is None else rows * weights[..., None]
    return rows.sum(1) if mode == "sum" else rows.mean(1)


_COMPOSED: dict[Any, Callable[..., Any]] = {
    F.hardsigmoid: _hardsigmoid,
    F.hardswish: _hardswish,
    F.embedding_bag: _embedding_bag,
}
