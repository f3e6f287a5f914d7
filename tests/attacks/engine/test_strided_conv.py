"""Convolutions without their stride: the same sums, and the same gradients of gradients."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedgauge.attacks.engine.strided_conv import CHANNELS, without_stride


@settings(max_examples=150)
@given(
    size=st.tuples(st.integers(1, 13), st.integers(1, 13)),
    kernel=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    channels=st.integers(1, CHANNELS + 2),
    stride=st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(1, 3))),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 2),
    biased=st.booleans(),
    seed=st.integers(0, 999),
)
def test_a_convolution_is_the_same_without_its_stride(
    size: tuple[int, int],
    kernel: tuple[int, int],
    channels: int,
    stride: int | tuple[int, int],
    padding: int,
    dilation: int,
    biased: bool,
    seed: int,
) -> None:
    assume(all(n + 2 * padding >= dilation * (k - 1) + 1 for n, k in zip(size, kernel, strict=True)))
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, channels, *size, generator=rng, dtype=torch.float64)
    weight = torch.randn(3, channels, *kernel, generator=rng, dtype=torch.float64)
    bias = torch.randn(3, generator=rng, dtype=torch.float64) if biased else None
    expected = F.conv2d(x, weight, bias, stride, padding, dilation)
    with without_stride():
        found = F.conv2d(x, weight, bias, stride, padding, dilation)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-12)


class Strides(TorchFunctionMode):
    """Notes the stride of every convolution that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Callable[..., object], types: object, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is F.conv2d:
            self.seen.append(tuple(args[3]) if len(args) > 3 else (1, 1))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("layer", "strides"),
    [
        (nn.Conv2d(3, 4, 5, stride=2, padding=2), [(1, 1)]),
        (nn.Conv2d(CHANNELS + 1, 4, 5, stride=2, padding=2), [(2, 2)]),
        (nn.Conv2d(2, 4, 3, stride=(1, 2)), [(1, 2)]),
        (nn.Conv2d(4, 4, 3, stride=2, groups=2), [(2, 2)]),
        (nn.Conv2d(2, 4, 3, stride=2, padding=1, padding_mode="circular"), [(1, 1)]),
    ],
)
def test_only_few_channels_with_one_stride_are_rewritten(layer: nn.Conv2d, strides: list[tuple[int, int]]) -> None:
    x = torch.randn(1, layer.in_channels, 8, 8)
    with Strides() as outer, without_stride():
        layer(x)
    assert outer.seen == strides


def test_words_for_a_padding_are_left_alone() -> None:
    layer = nn.Conv2d(2, 3, 3, padding="same")
    x = torch.randn(1, 2, 6, 6)
    with without_stride():
        assert torch.equal(layer(x), layer(x))


def test_the_gradient_of_a_gradients_size_is_the_same() -> None:
    """As matching takes it: a grad within vmap, differentiated again from outside."""
    layer = nn.Conv2d(3, 4, 5, stride=2, padding=2).double()
    params = {k: p.detach() for k, p in layer.named_parameters()}
    x = torch.randn(5, 2, 3, 9, 9, dtype=torch.float64)

    def size(one: Tensor) -> Tensor:
        def loss(at: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(layer, at, (one,)).sigmoid().square().sum()

        return torch.stack([g.square().sum() for g in grad(loss)(params).values()]).sum()

    def gradient() -> Tensor:
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(vmap(size)(leaf).sum(), leaf)
        return found

    expected = gradient()
    with without_stride():
        found = gradient()
    assert expected.abs().max() > 0.1
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
