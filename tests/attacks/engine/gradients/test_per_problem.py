"""Gradients in one pass: those of plain autograd, twice differentiable, for every kind of layer or refused."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fedgauge.attacks.engine.gradients import convolution, factored, layers
from fedgauge.attacks.engine.gradients.factored import FactoredGradient, flattened
from fedgauge.attacks.engine.gradients.layers import Unsupported
from fedgauge.attacks.engine.gradients.per_problem import examples_are_independent, gradients, local_training_changes
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import convnet, detached_params, lenet, mlp, resnet20
from fedgauge.client.update import Batch, Update

SHAPE, CLASSES = (3, 12, 12), 7
pytestmark = pytest.mark.usefixtures("double")


class Shared(nn.Module):
    """One weight used twice, an in-place activation, a residual sum in place, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.GroupNorm(3, 3)
        self.idle = nn.Linear(2, 2)
        self.head = nn.Linear(3 * 144, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm(self.conv(x)))
        again = self.conv(out)
        again += out
        return self.head(again.flatten(1))


class Rows(nn.Module):
    """A fully connected layer over every row of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.head = nn.Linear(12, 5), nn.Linear(180, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.row(x).sigmoid().flatten(1))


class Overwrite(nn.Module):
    """Changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lambda: lenet(SHAPE, CLASSES),
    "mlp": lambda: mlp(SHAPE, CLASSES, (6, 5), "tanh"),
    "convnet, BatchNorm": lambda: convnet(SHAPE, CLASSES, width=2).eval(),
    "convnet, GroupNorm": lambda: convnet(SHAPE, CLASSES, width=2, norm="group"),
    "resnet20": lambda: resnet20(SHAPE, CLASSES, width=1).eval(),
    "few positions": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 5, 4), nn.Sigmoid(), nn.Conv2d(8, 32, 3, 1, 1), nn.Tanh(), nn.Flatten(), nn.Linear(128, CLASSES)
    ),
    "shared weights": Shared,
    "rows": Rows,
    "an output overwritten": lambda: nn.Sequential(nn.Flatten(), nn.Linear(432, 5), Overwrite(), nn.Linear(5, CLASSES)),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = NETWORKS[name]()
    for buffer, value in model.named_buffers():
        if buffer.endswith("running_var"):
            value.copy_(torch.rand_like(value) + 0.5)
        elif buffer.endswith("running_mean"):
            value.copy_(0.1 * torch.randn_like(value))
    return model


def oracle(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Each problem's gradient by plain autograd, with a graph."""
    named = dict(model.named_parameters())
    found = []
    for one, labels in zip(x, y, strict=True):
        loss = F.cross_entropy(model(one), labels)
        parts = torch.autograd.grad(loss, list(named.values()), create_graph=True, materialize_grads=True)
        found.append(dict(zip(named, parts, strict=True)))
    return found


@pytest.mark.product
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("problems", "size"), [(1, 1), (1, 3), (4, 1), (3, 2)])
@pytest.mark.parametrize("kept", [layers.KEPT, 0])
def test_they_are_plain_autograds_and_so_are_their_derivatives(
    name: str, problems: int, size: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "KEPT", kept)
    monkeypatch.setattr(factored, "FORM_BELOW", 1)
    model = make(name)
    params = detached_params(model)
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(problems, size, *SHAPE, generator=rng).requires_grad_()
    y = torch.randint(CLASSES, (problems, size), generator=rng)
    expected = oracle(model, x, y)
    weights = {k: torch.randn(problems, *p.shape, generator=rng) for k, p in params.items()}
    total = sum((t * weights[k][i] + t.square()).sum() for i, g in enumerate(expected) for k, t in g.items())
    assert isinstance(total, Tensor)
    (by_x,) = torch.autograd.grad(total, x)
    for factors in (True, False):
        found = gradients(model, params, x, y, -0.1, factors)
        assert list(found) == list(params)
        assert any(isinstance(t, FactoredGradient) for t in found.values()) == factors
        ours = torch.zeros(())
        for k, t in found.items():
            whole = factored.formed(t, params[k].shape)
            torch.testing.assert_close(whole, torch.stack([-0.1 * g[k] for g in expected]), rtol=1e-9, atol=1e-12)
            inner, square = t.products(weights[k]) if isinstance(t, FactoredGradient) else (t * weights[k], t.square())
            ours = ours + inner.sum() / -0.1 + square.sum() / 0.01
        (found_by_x,) = torch.autograd.grad(ours, x)
        torch.testing.assert_close(found_by_x, by_x, rtol=1e-9, atol=1e-9 * float(by_x.abs().max()))


@pytest.mark.product
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "resnet20"])
@pytest.mark.parametrize(("problems", "size", "form"), [(1, 1, 1), (3, 2, 1), (3, 2, 2**15)])
@pytest.mark.parametrize("local", [local_sgd(0.5, 3), local_sgd(0.5, 2, proximal_mu=0.3)], ids=str)
def test_local_steps_are_the_clients_and_so_are_their_derivatives(
    name: str, problems: int, size: int, form: int, local: local_sgd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factored, "FORM_BELOW", form)
    model = make(name)
    params, client = detached_params(model), local(gradient(model))
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(problems, size, *SHAPE, generator=rng).requires_grad_()
    y = torch.randint(CLASSES, (problems, size), generator=rng)
    weights = {k: torch.randn(p.shape, generator=rng) for k, p in params.items()}
    expected = [client(params, Batch(x[k], y[k]), None) for k in range(problems)]
    total = sum((t * weights[k] + t.square()).sum() for change in expected for k, t in change.items())
    assert isinstance(total, Tensor)
    (by_x,) = torch.autograd.grad(total, x)
    for factors in (True, False):
        found = local_training_changes(model, params, x, y, local, factors)
        assert list(found) == list(params)
        assert any(isinstance(t, FactoredGradient) for t in found.values()) == (factors and form == 1)
        whole = {k: factored.formed(t, params[k].shape) for k, t in found.items()}
        for k, t in whole.items():
            torch.testing.assert_close(t, torch.stack([e[k] for e in expected]), rtol=1e-9, atol=1e-11)
        ours = torch.stack([(t * weights[k] + t.square()).sum() for k, t in whole.items()]).sum()
        (found_by_x,) = torch.autograd.grad(ours, x)
        torch.testing.assert_close(found_by_x, by_x, rtol=1e-9, atol=1e-9 * float(by_x.abs().max()))


def test_local_steps_of_a_wide_convolution_are_refused() -> None:
    model = make("resnet20")
    x, y = torch.randn(2, 1, *SHAPE).requires_grad_(), torch.zeros(2, 1, dtype=torch.int64)
    assert local_training_changes(model, detached_params(model), x, y, local_sgd(0.1), False), (
        "one step has one copy of the weights"
    )
    with pytest.raises(Unsupported):
        local_training_changes(model, detached_params(model), x, y, local_sgd(0.1, 2), False)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Python looks for no cycles of references."""
    gc.collect()
    gc.freeze()  # what is there already is no garbage and is not counted
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.usefixtures("no_collector")
def test_an_iteration_leaves_no_reference_cycle(name: str) -> None:
    model = make(name)
    params, y = detached_params(model), torch.zeros(2, 1, dtype=torch.int64)
    local = local_sgd(0.1, 1 if name == "resnet20" else 2)

    def iterate() -> int:
        x = torch.randn(2, 1, *SHAPE).requires_grad_()
        found = local_training_changes(model, params, x, y, local, False)
        parts = flattened({k: t for k, t in found.items() if isinstance(t, Tensor)})
        torch.autograd.grad(torch.stack([t.square().sum() for t in parts]).sum(), x)
        del x, found, parts
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    assert iterate() == iterate() == iterate()


def test_soft_labels_get_their_derivative() -> None:
    model = make("lenet")
    params, rng = detached_params(model), torch.Generator().manual_seed(1)
    x = torch.randn(3, 2, *SHAPE, generator=rng).requires_grad_()
    logits = torch.randn(3, 2, CLASSES, generator=rng).requires_grad_()
    found = gradients(model, params, x, logits.softmax(2), 1.0, False)
    mapped: Update = vmap(lambda x, y: gradient(model)(params, Batch(x, y), None))(x, logits.softmax(2))
    for k, t in mapped.items():
        torch.testing.assert_close(found[k], t, rtol=1e-9, atol=1e-12)
    ours, theirs = (sum(t.square().sum() for t in g.values() if isinstance(t, Tensor)) for g in (found, mapped))
    assert isinstance(ours, Tensor)
    assert isinstance(theirs, Tensor)
    torch.testing.assert_close(torch.autograd.grad(ours, logits)[0], torch.autograd.grad(theirs, logits)[0])


@settings(max_examples=60)
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    channels=st.integers(1, 5),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    biased=st.booleans(),
    cache=st.sampled_from([1, 200, 2**18]),
    kept=st.sampled_from([0, 2**21]),
    seed=st.integers(0, 999),
)
def test_any_geometry_of_a_convolution(
    size: tuple[int, int],
    kernel: tuple[int, int],
    channels: int,
    stride: tuple[int, int],
    padding: tuple[int, int],
    biased: bool,
    cache: int,
    kept: int,
    seed: int,
) -> None:
    assume(all(n + 2 * m >= k for n, m, k in zip(size, padding, kernel, strict=True)))
    torch.manual_seed(seed)
    conv = nn.Conv2d(channels, 2, kernel, stride, padding, bias=biased)
    with torch.no_grad():
        features = conv(torch.zeros(1, channels, *size)).numel()
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))
    x, y = torch.randn(3, 2, channels, *size).requires_grad_(), torch.randint(3, (3, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "CACHE", cache)
        patch.setattr(layers, "KEPT", kept)
        found = gradients(model, detached_params(model), x, y, 1.0, False)
        (ours,) = torch.autograd.grad(sum(t.square().sum() for t in found.values() if isinstance(t, Tensor)), x)
    expected = oracle(model, x, y)
    for k, t in found.items():
        torch.testing.assert_close(t, torch.stack([g[k] for g in expected]), rtol=1e-9, atol=1e-12)
    (theirs,) = torch.autograd.grad(sum(t.square().sum() for g in expected for t in g.values()), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)
    windows = convolution.Windows((6, channels, *size), kernel, stride, padding)
    rows = windows.of(x.detach().flatten(0, 1), 3)
    assert torch.equal(make_fx(lambda t: windows.summed(t))(rows)(rows), windows.summed(rows)), (
        "recorded, to be compiled"
    )


class Odd(nn.Module):
    """Uses its parameter in a way of its own."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 432))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x.flatten(1), self.weight)


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "a parameter in a product": lambda: Odd(lambda x, w: x @ w.T),
    "a parameter's copy": lambda: Odd(lambda x, w: F.linear(x, w.clone())),
    "train-mode BatchNorm": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(432, CLASSES)),
    "a grouped convolution": lambda: nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.Flatten(), nn.Linear(300, CLASSES)),
    "a parameter among others": lambda: Odd(lambda x, w: F.linear(x, torch.cat([w]))),
    "a layer that gives several tensors": lambda: Several(),
    "an embedding's norm": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(432), nn.Linear(432, CLASSES)),
}


class Several(nn.Module):
    """Attention gives its output and its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(12, 2, batch_first=True), nn.Linear(432, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1).view(len(x), -1, 12)
        return self.last(self.attention(rows, rows, rows)[0].flatten(1))


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_layers_are_refused(name: str) -> None:
    model = UNKNOWN[name]()
    x, y = torch.randn(2, 1, *SHAPE).requires_grad_(), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(Unsupported):
        gradients(model, detached_params(model), x, y, 1.0, False)


def test_a_model_that_mixes_examples_is_seen() -> None:
    x = torch.randn(3, 2, *SHAPE)
    plain = make("lenet")
    assert examples_are_independent(plain, detached_params(plain), x)
    mixing = nn.Sequential(nn.Flatten(), nn.Linear(432, CLASSES), Centre())
    assert not examples_are_independent(mixing, detached_params(mixing), x)


class Centre(nn.Module):
    """Subtracts the batch's mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)
