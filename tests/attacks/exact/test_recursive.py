"""The recursive attack reads one example off a chain of layers, and names what is no such chain."""

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.exact.recursive import recursive, stages_of
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.attacks.problem import Unattackable
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import Activation, convnet, detached_params, lenet, mlp, resnet20
from fedgauge.client.update import Batch
from fedgauge.defenses.clip import clip
from tests.zoo.networks import Network, networks

CLASSES, MEAN, STD = 10, 0.13, 0.31
BARE = chain(local_sgd(0.1))


def smooth(seed: int, shape: tuple[int, ...]) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, shape[0], 6, 6, generator=rng)
    return Batch(F.interpolate(coarse, shape[1:], mode="bicubic").clamp(0, 1), torch.tensor([seed % CLASSES]))


def normalise(x: Tensor) -> Tensor:
    return (x - MEAN) / STD


def attack(
    model: nn.Module, batch: Batch, links: Chain = BARE, noise: float = 0.0, auxiliary: Batch | None = None
) -> Reconstruction:
    """The attack's result on a gradient with noise of this standard deviation."""
    params = detached_params(model)
    update = links(gradient(model, normalise=normalise))(params, batch, None)
    rng = torch.Generator().manual_seed(9)
    update = {k: t + 0.1 * noise * torch.randn(t.shape, generator=rng).to(t) for k, t in update.items()}
    shape = tuple(batch.x.shape[1:])
    known = Knowledge(
        model, links, shape, CLASSES, len(batch.x), (MEAN,) * shape[0], (STD,) * shape[0], auxiliary=auxiliary
    )
    return recursive().reconstruct(Wave.stack([Observation(1, 0, params, update)]), known, Budget(1), [])[0]


def check(result: Reconstruction, batch: Batch, least: float) -> None:
    assert result.status == "converged", result.reason
    assert result.x is not None and result.y is not None
    assert float(psnr(batch.x, result.x)) >= least
    assert result.y.tolist() == batch.y.tolist()


def trained(model: nn.Module, shape: tuple[int, ...], rounds: int) -> nn.Module:
    examples = [smooth(seed, shape) for seed in range(100, 110)]
    x, y = normalise(torch.cat([b.x for b in examples])), torch.cat([b.y for b in examples])
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(rounds):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model


CLIPPED = chain(local_sgd(0.1), clip(1e-2))


@pytest.mark.parametrize(
    ("shape", "links", "n"),
    [((1, 20, 20), BARE, 3), ((1, 20, 20), CLIPPED, 1), pytest.param((3, 20, 20), CLIPPED, 3, marks=pytest.mark.full)],
    ids=["bare", "clipped", "in colour"],
)
def test_lenet_is_read_to_60_db(shape: tuple[int, ...], links: Chain, n: int) -> None:
    torch.manual_seed(1)
    check(attack(lenet(shape, CLASSES), smooth(n, shape), links), smooth(n, shape), 60.0)


@pytest.mark.full
def test_lenet_after_training_is_read_to_60_db() -> None:
    torch.manual_seed(2)
    shape = (1, 20, 20)
    check(attack(trained(lenet(shape, CLASSES), shape, 30), smooth(4, shape)), smooth(4, shape), 60.0)


@pytest.mark.full
@pytest.mark.parametrize(("noise", "least"), [(1e-4, 70.0), (1e-2, 31.0)])
def test_noise_costs_what_its_size_says(noise: float, least: float) -> None:
    torch.manual_seed(1)
    shape = (1, 20, 20)
    check(attack(lenet(shape, CLASSES), smooth(3, shape), noise=noise), smooth(3, shape), least)


@pytest.mark.full
def test_auxiliary_images_help_under_noise() -> None:
    torch.manual_seed(1)
    shape = (1, 12, 12)
    model, batch = lenet(shape, CLASSES), smooth(3, shape)
    others = [smooth(seed, shape) for seed in range(100, 400)]
    auxiliary = Batch(torch.cat([b.x for b in others]), torch.cat([b.y for b in others]))
    plain, helped = attack(model, batch, noise=1e-2), attack(model, batch, noise=1e-2, auxiliary=auxiliary)
    assert plain.x is not None and helped.x is not None
    assert float(psnr(batch.x, helped.x)) > float(psnr(batch.x, plain.x)) + 1


SMALL = (2, 10, 10)
TINY = (2, 6, 6)
RISING = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "leaky": lambda: nn.LeakyReLU(0.2),
    "softplus": nn.Softplus,
    "elu": nn.ELU,
}


@settings(max_examples=6, deadline=None)
@given(
    width=st.integers(6, 8), activation=st.sampled_from(sorted(RISING)), stride=st.integers(1, 2),
    dilation=st.integers(1, 2), layers=st.integers(1, 2), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_small_chains_with_enough_equations_come_back_to_1e_6(
    width: int, activation: str, stride: int, dilation: int, layers: int, seed: int
) -> None:
    torch.manual_seed(seed)
    steps: list[nn.Module] = []
    for i in range(layers):
        first = i == 0
        settings_ = {"stride": stride if first else 1, "padding": 2, "dilation": 1 if first else dilation}
        steps += [nn.Conv2d(TINY[0] if first else width, width, 3, **settings_), RISING[activation]()]
    body = nn.Sequential(*steps, nn.Flatten())
    model = nn.Sequential(body, nn.Linear(body(torch.zeros(1, *TINY)).numel(), CLASSES)).double()
    batch = Batch(smooth(seed, TINY).x.double(), smooth(seed, TINY).y)
    result = attack(model, batch)
    assert result.x is not None, result.reason
    assume("stay open" not in result.reason)
    assert float((result.x - batch.x).abs().max()) < 1e-6


def bent_in_place(x: Tensor) -> Tensor:
    x.tanh_()
    return x


@pytest.mark.parametrize("activation", [torch.tanh, nn.ELU(inplace=True), F.leaky_relu_, bent_in_place])
def test_norms_pools_and_functions_are_read_in_the_order_of_the_computation(
    activation: Callable[[Tensor], Tensor],
) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8 * 25, CLASSES, bias=False)
            self.norm = nn.BatchNorm2d(8).eval()
            self.conv = nn.Conv2d(2, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(activation(F.avg_pool2d(self.norm(self.conv(x)), 2)).view(x.size(0), -1))

    model = Network().eval()
    assert [stage.name for stage in stages_of(model, SMALL)] == ["conv", "head"]
    check(attack(model, smooth(3, SMALL)), smooth(3, SMALL), 60.0)


@pytest.mark.parametrize("seed", [0, 1])
def test_units_that_a_relu_switched_off_are_recognised(seed: int) -> None:
    torch.manual_seed(seed)
    steps: list[nn.Module] = []
    for channels, stride in ((1, 2), (12, 2), (12, 1)):
        steps += [nn.Conv2d(channels, 12, 5, stride, padding=2), nn.ReLU()]
    batch = smooth(seed, (1, 16, 16))
    check(attack(nn.Sequential(*steps, nn.Flatten(), nn.Linear(12 * 16, CLASSES)), batch), batch, 100.0)


def test_a_fully_connected_network_is_read() -> None:
    model = mlp(SMALL, CLASSES, [40, 30], "tanh")
    check(attack(model, smooth(3, SMALL)), smooth(3, SMALL), 80.0)


class Residual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, activation: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.short = nn.Conv2d(channels, width, 1, stride) if channels != width else nn.Identity()
        self.act = RISING[activation]()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))) + self.short(x))


def same(channels: int, width: int, groups: int = 1) -> nn.Module:
    return nn.Conv2d(channels, width, 3, padding=1, groups=groups)


BENT = {
    **{f"shortcut, {name}": partial(Residual, 8, 8, 1, name) for name in RISING},
    "projection": lambda: Residual(8, 16, 2, "tanh"),
    "gelu": lambda: nn.Sequential(same(8, 8), nn.GELU()),
    "silu": lambda: nn.Sequential(same(8, 8), nn.SiLU()),
    "group norm": lambda: nn.Sequential(same(8, 8), nn.GroupNorm(2, 8), nn.Tanh()),
    "depthwise": lambda: nn.Sequential(same(8, 8, groups=8), nn.Tanh()),
}


@settings(max_examples=8, deadline=None)
@given(kind=st.sampled_from(sorted(BENT)), inner=st.sampled_from(["gelu", "tanh"]), seed=st.integers(0, 10**6))
def test_bent_equations_come_back_to_1e_6_or_are_named(kind: str, inner: str, seed: int) -> None:
    torch.manual_seed(seed)
    body = nn.Sequential(same(2, 8), nn.GELU() if inner == "gelu" else nn.Tanh(), BENT[kind](), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(body(torch.zeros(1, *TINY)).numel(), CLASSES)).double()
    batch = Batch(smooth(seed, TINY).x.double(), smooth(seed, TINY).y)
    result = attack(model, batch)
    assert result.x is not None, result.reason
    assume("not solved" not in result.reason and "stay open" not in result.reason)
    assert float((result.x - batch.x).abs().max()) < 1e-6


@pytest.mark.parametrize("kind", sorted(BENT))
def test_each_kind_of_bent_equations_can_be_solved(kind: str) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(same(2, 8), nn.Tanh(), BENT[kind](), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(body(torch.zeros(1, *TINY)).numel(), CLASSES))
    check(attack(model, smooth(3, TINY)), smooth(3, TINY), 60.0)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_a_lenet_for_colour_images_would_take_minutes(activation: Activation) -> None:
    with pytest.raises(Unattackable) as raised:
        stages_of(lenet((3, 32, 32), CLASSES, activation=activation), (3, 32, 32))
    assert "3,072" in str(raised.value)


@pytest.mark.full
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_lenet_is_read_through_gelu_and_silu(activation: Activation) -> None:
    torch.manual_seed(1)
    shape = (1, 20, 20)
    check(attack(lenet(shape, CLASSES, activation=activation), smooth(3, shape)), smooth(3, shape), 100.0)


class Swapped(nn.Module):
    """Values of a tuple are not followed."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(108, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.flatten(1).chunk(2, 1)
        logits: Tensor = self.head(x.flatten(1).tanh() + torch.cat([second, first], 1))
        return logits


@pytest.mark.parametrize(
    ("model", "side", "named", "open_"),
    [
        (convnet((3, 18, 18), CLASSES, 2, "none"), 18, "max_pool2d", None),
        (resnet20((3, 16, 16), CLASSES).eval(), 16, "linear", "960 of 1,024"),  # a mean over 4 x 4 of 64 channels
        (nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(108, 9)), 6, "dropout", None),
        (Swapped(), 6, "forward", None),
    ],
)
def test_other_networks_are_declined_with_the_operation(
    model: nn.Module, side: int, named: str, open_: str | None
) -> None:
    shape = (3, side, side)
    with pytest.raises(Unattackable) as raised:
        stages_of(model, shape)
    assert named in raised.value.problem.where
    assert open_ is None or open_ in raised.value.problem.why
    assert attack(model, smooth(3, shape)).status == "not_applicable"


class Particular(nn.Linear):
    """Takes no input at all, as timm's networks say of a side that is no multiple of their patches."""

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("input should be divisible by patch size")


def test_a_network_that_fails_is_declined_whatever_it_raises() -> None:
    with pytest.raises(Unattackable, match="AssertionError"):
        stages_of(Particular(4, 4), SMALL)


def test_batches_are_declined() -> None:
    batch = Batch(torch.rand(2, *SMALL), torch.tensor([1, 2]))
    assert attack(mlp(SMALL, CLASSES, [20]), batch).status == "not_applicable"


@pytest.mark.parametrize("width", [1, 8])
def test_the_reason_names_the_layer_whose_input_is_not_determined(width: int) -> None:
    """A layer of 1 channel has 25 outputs and 18 gradient entries for 200 pixels; one of 8 channels has enough."""
    conv = nn.Conv2d(2, width, 3, padding=1, stride=2)
    result = attack(nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(25 * width, CLASSES)), smooth(3, SMALL))
    assert result.x is not None
    assert (float(psnr(smooth(3, SMALL).x, result.x)) > 60) is (width == 8)
    assert ("'0'" in result.reason) is (width == 1)


ZOO = networks()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("network", [pytest.param(n, id=k) for k, n in ZOO.items() if n.quick and not n.declined])
def test_networks_of_the_zoo_are_chains_or_declined(network: Network) -> None:
    pytest.importorskip(network.package)
    with contextlib.suppress(Unattackable):
        assert stages_of(network.build(), network.shape)
