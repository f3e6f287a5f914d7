"""What a network does with the example is read from its computation, however its code is written."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Observation, Wave
from fedgauge.attacks.engine.computation import classifier, classifier_parameters, dense_input_layer, input_layers
from fedgauge.attacks.exact.analytic import analytic
from fedgauge.attacks.exact.unmixing import spear
from fedgauge.attacks.modality.image_metrics import match, psnr
from fedgauge.client.chain import chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, lenet, mlp
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from tests.attacks.refusals import check_named

SHAPE, CLASSES = (1, 6, 6), 5
Forward = Callable[["Written", Tensor], Tensor]


class Written(nn.Module):
    """Two fully connected layers, and a forward pass that is written in some way; `late` is registered behind both."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.b, self.a = nn.Linear(100, CLASSES), nn.Linear(36, 100)  # registered in the other order
        self.late, self.other = nn.ReLU(), nn.Linear(36, 100)
        self.way = forward
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def test_the_classifier_computes_the_logits() -> None:
    assert classifier(lenet((1, 28, 28), 10), (1, 28, 28)) == "linear"
    assert classifier(mlp((1, 28, 28), 10, hidden=[4, 4]), (1, 28, 28)) == "5"
    products = Written(lambda m, x: torch.matmul(input=flat(x), other=torch.t(input=m.a.weight)).relu() @ m.b.weight.T)
    assert classifier_parameters(products, SHAPE) == ("b.weight", "")


def in_order(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 100), *middle, nn.Linear(100, CLASSES))


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


RELU: dict[str, Callable[[], nn.Module]] = {
    "nn.ReLU in order": lambda: in_order(nn.ReLU()),
    "nn.ReLU in place": lambda: in_order(nn.ReLU(inplace=True)),
    "nn.ReLU registered last": lambda: Written(lambda m, x: m.b(m.late(m.a(flat(x))))),
    "F.relu": lambda: Written(lambda m, x: m.b(F.relu(m.a(flat(x))))),
    ".relu()": lambda: Written(lambda m, x: m.b(m.a(flat(x)).relu())),
    ".relu_()": lambda: Written(lambda m, x: m.b(m.a(flat(x)).relu_())),
    "torch.relu": lambda: Written(lambda m, x: m.b(torch.relu(m.a(flat(x))))),
    "clamp": lambda: Written(lambda m, x: m.b(m.a(flat(x)).clamp(min=0))),
    "F.linear": lambda: Written(lambda m, x: m.b(F.relu(F.linear(flat(x), m.a.weight, bias=m.a.bias)))),
    "x @ W.T + b": lambda: Written(lambda m, x: m.b((flat(x) @ m.a.weight.T + m.a.bias).relu_())),
    "b + x.mm": lambda: Written(lambda m, x: m.b(F.relu(m.a.bias + flat(x).mm(m.a.weight.transpose(0, 1))))),
    "addmm": lambda: Written(lambda m, x: m.b(F.relu(torch.addmm(m.a.bias, flat(x), m.a.weight.t())))),
    "b in place": lambda: Written(lambda m, x: m.b(F.relu(torch.matmul(flat(x), m.a.weight.mT).add_(m.a.bias)))),
    "dropout before it": lambda: in_order(nn.Dropout(0.0), nn.ReLU()),
    "Sequential in Sequential": lambda: nn.Sequential(nn.Sequential(nn.Identity(), in_order(nn.Sequential(nn.ReLU())))),
    "reshape": lambda: Written(lambda m, x: m.b(m.a(x.reshape(len(x), -1)).relu())),
    "normalised inside": lambda: Written(lambda m, x: m.b(m.a(flat((x - 0.4) / 0.2)).relu())),
    "a branch beside it": lambda: Written(lambda m, x: m.b(m.a(flat(x)).relu()) + x.mean((1, 2, 3))[:, None]),
}
NO_RELU: dict[str, Callable[[], nn.Module]] = {
    "GELU": lambda: in_order(nn.GELU()),
    "leaky": lambda: in_order(nn.LeakyReLU()),
    "a ReLU that is not called": lambda: Written(lambda m, x: m.b(m.a(flat(x)).tanh())),
    "a ReLU behind another layer": lambda: in_order(nn.Linear(100, 100), nn.ReLU()),
    "a ReLU on another branch": lambda: Written(lambda m, x: m.b(m.a(flat(x)) + flat(x).relu().sum(1, keepdim=True))),
    "a ReLU beside a shortcut": lambda: Written(lambda m, x: m.b((h := m.a(flat(x))).relu() + h)),
    "batch norm between": lambda: in_order(nn.BatchNorm1d(100), nn.ReLU()),
}
NOT_READ: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), in_order(nn.ReLU())),
    "layer norm": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(36), in_order(nn.ReLU())),
    "normalised by the example": lambda: Written(lambda m, x: m.b(m.a(F.normalize(flat(x))).relu())),
    "ReLU of the example": lambda: Written(lambda m, x: m.b(m.a((flat(x) - 0.5).relu()).relu())),
    "a learnt shift": lambda: Written(lambda m, x: m.b(m.a(flat(x) + m.other.bias[:36]).relu())),
    "shuffled": lambda: Written(lambda m, x: m.b(m.a(flat(x).flip(1)).relu())),
    "applied twice": lambda: Written(lambda m, x: m.b(m.a(flat(x)).relu() + m.a(flat(x * x)).relu())),
    "frozen": lambda: Written(lambda m, x: m.b(F.linear(flat(x), m.a.weight.detach(), m.a.bias).relu())),
    "no such shape": lambda: nn.Linear(7, CLASSES),
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def observed(model: nn.Module, n: int) -> tuple[Wave, Knowledge, Batch]:
    rng = torch.Generator().manual_seed(1)
    batch = Batch(torch.rand(n, *SHAPE, generator=rng), torch.arange(n))
    known = Knowledge(model, chain(local_sgd(0.1)), SHAPE, CLASSES, n, (0.13,), (0.31,))
    params = detached_params(model)
    update = known.chain(gradient(model, normalise=known.normalise))(params, batch, None)
    return Wave.stack([Observation(1, 0, params, update)]), known, batch


@pytest.mark.parametrize("name", RELU)
def test_spear_reads_the_batch_and_analytic_the_example_however_the_network_is_written(name: str) -> None:
    wave, known, batch = observed(built(RELU[name]), 3)
    before = {k: t.clone() for k, t in known.model.state_dict().items()}
    (found,) = spear().reconstruct(wave, known, Budget(20), [lambda *parts: generator("spear", *parts)])
    assert found.status == "converged" and found.x is not None and found.y is not None, found.reason
    order = match(batch.x, found.x)
    assert float(psnr(batch.x, found.x[order]).min()) > 60 and torch.equal(found.y[order], batch.y)
    wave, known, batch = observed(known.model, 1)
    (one,) = analytic().reconstruct(wave, known, Budget(1), [])
    assert one.x is not None and float(psnr(batch.x, one.x)) > 60
    assert all(torch.equal(t, before[k]) for k, t in known.model.state_dict().items())


@pytest.mark.parametrize("name", NO_RELU)
def test_a_relu_that_leaves_no_zeros_is_none(name: str) -> None:
    layer = dense_input_layer(built(NO_RELU[name]), SHAPE)
    assert not layer.relu and layer.only


@pytest.mark.parametrize("name", NOT_READ)
def test_a_layer_that_reads_something_else_is_refused(name: str) -> None:
    check_named("reads|once|fails", lambda: dense_input_layer(built(NOT_READ[name]), SHAPE))


def test_of_two_layers_that_read_the_example_the_one_with_a_relu_is_taken() -> None:
    model = built(lambda: Written(lambda m, x: m.b(m.other(flat(x)) + m.a(flat(x)).relu())))
    assert [layer.name for layer in input_layers(model, SHAPE)] == ["other", "a"]
    assert dense_input_layer(model, SHAPE).name == "a"


def test_a_classifier_of_zeros_and_chance_in_forward_change_nothing() -> None:
    model = built(lambda: Written(lambda m, x: m.b(F.dropout(m.a(flat(x)).relu(), 0.5))))
    nn.init.zeros_(model.b.weight)  # type: ignore[union-attr,arg-type]  # torch types every attribute alike
    state = torch.get_rng_state()
    assert dense_input_layer(model, SHAPE).relu
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "relu"])
def test_a_stack_without_biases_is_inverted_however_its_activation_is_written(name: str) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.second = nn.Linear(100, CLASSES), nn.Linear(100, 100)
            self.first = nn.Linear(36, 100, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = getattr(torch, name)(self.first(flat(x)))
            logits: Tensor = self.out(self.second(hidden).tanh())
            return logits

    wave, known, batch = observed(built(Stack), 1)
    (found,) = analytic().reconstruct(wave, known, Budget(1), [])
    assert found.x is not None and float(psnr(batch.x, found.x)) > 80
