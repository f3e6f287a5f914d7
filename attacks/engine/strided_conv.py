"""Computes a strided convolution of an image without stride over more channels: the same sums, faster gradients.

Strided convolutions of one to four channels have slow input gradients on a CPU, and matching takes two in every iteration.
Moving the stride's phases into channels (Shi et al., 2016: pixel unshuffling) makes them ordinary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

CHANNELS = 4  # with more channels, torch's strided kernels are faster


class without_stride(TorchFunctionMode):
    """A context in which every strided convolution of up to four channels is computed without stride."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (_conv2d if func is F.conv2d else func)(*args, **(kwargs or {}))


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    step, margin = _square(stride), _square(padding)
    if weight.shape[1] > CHANNELS or step in (1, None) or margin is None or _square(dilation) != 1 or groups != 1:
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return _phases(x, weight, bias, step, margin)


def _phases(x: Tensor, weight: Tensor, bias: Tensor | None, step: int, margin: int) -> Tensor:
    """y_i = sum_p w_p x_(step i + p) with p = step a + b: phases b become channels, whole steps a the kernel."""
    rows, columns = ((x.shape[d] + 2 * margin - weight.shape[d]) // step for d in (-2, -1))
    height, width = (-(-weight.shape[d] // step) for d in (-2, -1))
    below = step * (rows + height) - x.shape[-2] - margin  # negative: rows that no output reads are cut off
    right = step * (columns + width) - x.shape[-1] - margin
    x = F.pad(x, (margin, right, margin, below))
    weight = F.pad(weight, (0, step * width - weight.shape[-1], 0, step * height - weight.shape[-2]))
    return F.conv2d(F.pixel_unshuffle(x, step), F.pixel_unshuffle(weight, step), bias)


def _square(value: int | str | Sequence[int]) -> int | None:
    """One number for both axes; None if they differ, or for a padding given as a string."""
    if isinstance(value, int):
        return value
    return value[0] if not isinstance(value, str) and len(set(value)) == 1 else None
