"""A training gives the same bits under observation: each is run bare and observed, in processes of their own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.simulations.rehearsal.observer import Observer, Training
from tests.forks import CLEAN_FORK


@contextmanager
def one_step() -> Iterator[tuple[nn.Linear, Tensor, Tensor]]:
    """A network, inputs and labels; afterwards, a step of SGD."""
    torch.manual_seed(0)
    net = nn.Linear(8, 3)
    yield net, torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    torch.optim.SGD(net.parameters(), lr=1.0).step()


def taught_by_a_transformer() -> Tensor:
    with one_step() as (net, x, _):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        teacher = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        with torch.no_grad():
            wanted = teacher(x[:, None])[:, 0, :3]
        F.mse_loss(net(x), wanted).backward()
    return net.weight.detach()


def compiled_as_one_graph() -> Tensor:
    with one_step() as (net, x, y):
        loss = torch.compile(lambda x, y: nn.CrossEntropyLoss()(net(x), y), backend="aot_eager", fullgraph=True)
        loss(x, y).backward()
    return net.weight.detach()


def scripted_loss() -> Tensor:
    with one_step() as (net, x, y):
        torch.jit.script(nn.CrossEntropyLoss())(net(x), y).backward()
    return net.weight.detach()


class Scaled(Tensor):
    """A tensor with a loss of its own, as torch's page on extending it registers functions."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        value = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * value.as_subclass(Tensor) if func is F.cross_entropy else value


def own_tensor() -> Tensor:
    with one_step() as (net, x, y):
        F.cross_entropy(net(x.as_subclass(Scaled)), y).backward()
    return net.weight.detach()


def send(train: Callable[[], Tensor], observed: bool, to: Connection) -> None:
    if observed:
        with Observer().training():
            result = train()
    else:
        result = train()
    to.send_bytes(result.numpy().tobytes())


@cache
def trained(train: Callable[[], Tensor], observed: bool, context: BaseContext = CLEAN_FORK) -> bytes:
    """The weights of a training in a process of its own."""
    here, there = context.Pipe()
    process = context.Process(target=send, args=(train, observed, there))  # type: ignore[attr-defined]
    process.start()
    there.close()
    weights = here.recv_bytes()
    process.join()
    return weights


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(taught_by_a_transformer),
        pytest.param(own_tensor),
        pytest.param(scripted_loss, marks=pytest.mark.full),
        pytest.param(compiled_as_one_graph, marks=pytest.mark.full),
    ],
)
def test_an_observed_training_gives_the_same_bits(train: Callable[[], Tensor]) -> None:
    assert trained(train, observed=True) == trained(train, observed=False)


@pytest.mark.full
def test_a_training_that_imports_the_compiler_under_observation_gives_the_same_bits() -> None:
    """A clean fork has imported it; a fresh process has not."""
    assert trained(compiled_as_one_graph, True, get_context("spawn")) == trained(compiled_as_one_graph, observed=False)


def test_a_network_that_is_not_called_with_one_tensor_is_noted() -> None:
    one, noted = torch.ones(1, 2), list[bool]()
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Tensor]]] = [
        (lambda x, mask=None, *more: x, (one,), {}),
        (lambda x, labels=None: x, (), {"labels": one, "x": one}),
        (lambda *, x: x, (), {"x": one}),
        (lambda batch: batch, ({"image": one},), {}),
        (lambda x, alpha: alpha * x, (one, 0.5), {}),
    ]
    for forward, args, kwargs in calls:
        net, now = nn.Linear(2, 1), Training()
        net.forward = forward  # type: ignore[method-assign]
        now.enters(net, args, kwargs)
        noted.append("inputs" in now.notes)
    assert noted == [False, False, True, True, True]
