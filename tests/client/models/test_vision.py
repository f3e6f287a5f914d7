"""The networks, against the papers' parameter counts and published weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedgauge.client.models import vision

CIFAR = (3, 32, 32)
MNIST = (1, 28, 28)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "arguments", "count"),
    [
        ("lenet", CIFAR, {}, 15_826),  # Wu et al., 2023, section 4
        ("convnet", CIFAR, {"width": 64}, 2_904_970),  # Inverting Gradients' published code
        ("resnet20", CIFAR, {}, 269_722),  # He et al., 2016, table 6: 0.27 M
        ("lenet", MNIST, {}, 12 * 25 + 12 + 2 * (12 * 12 * 25 + 12) + 12 * 7 * 7 * 10 + 10),
        ("mlp", MNIST, {"hidden": [20, 30]}, 784 * 20 + 20 + 20 * 30 + 30 + 30 * 10 + 10),
        ("mlp", MNIST, {"hidden": []}, 7850),
    ],
)
def test_the_papers_count_the_same_parameters(
    name: str, shape: tuple[int, int, int], arguments: dict[str, Any], count: int
) -> None:
    model = getattr(vision, name)(shape, 10, **arguments)
    assert parameters(model) == count
    assert model(torch.rand(2, *shape)).shape == (2, 10)


def test_convnet_pools_after_its_sixth_and_eighth_convolution() -> None:
    """As in Inverting Gradients' published code: convolution, BatchNorm, ReLU, and the pool last."""
    kinds = [type(m).__name__ for m in vision.convnet(CIFAR, 10, width=2).children()]
    block = ["Conv2d", "BatchNorm2d", "ReLU"]
    assert kinds == [*block * 6, "MaxPool2d", *block * 2, "MaxPool2d", "Flatten", "Linear"]


def test_lenet_starts_uniform_between_minus_and_plus_one_half() -> None:
    from scipy.stats import kstest

    model = vision.lenet(CIFAR, 10)
    drawn = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    assert np.abs(drawn).max() <= 0.5
    assert kstest(drawn, "uniform", (-0.5, 1)).pvalue > 1e-3
    for name, p in model.named_parameters():  # biases too: each is far from torch's narrower default
        assert p.detach().abs().max() > 0.3, name


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 11), (1, 27, 5)])
def test_lenet_fits_any_image(shape: tuple[int, int, int]) -> None:
    assert vision.lenet(shape, 4)(torch.rand(2, *shape)).shape == (2, 4)


@pytest.mark.parametrize("name", ["convnet", "resnet20"])
@pytest.mark.parametrize(("norm", "layer"), [("batch", nn.BatchNorm2d), ("group", nn.GroupNorm), ("none", nn.Identity)])
def test_norm_chooses_the_normalisation(name: str, norm: str, layer: type[nn.Module]) -> None:
    model = getattr(vision, name)(CIFAR, 10, width=2, norm=norm)
    kinds = {type(m) for m in model.modules()} & {nn.BatchNorm2d, nn.GroupNorm, nn.Identity}
    assert kinds == {layer}
    assert bool(vision.floating_buffers(model)) == (norm == "batch")
    assert torch.isfinite(model(torch.rand(2, *CIFAR))).all()


@pytest.mark.parametrize(("activation", "function"), [("relu", F.relu), ("sigmoid", F.sigmoid), ("tanh", F.tanh)])
def test_mlp_is_its_formula(activation: Any, function: Any) -> None:
    model = vision.mlp((1, 2, 3), 4, hidden=[5, 7], activation=activation)
    x = torch.rand(3, 1, 2, 3)
    w = [p.detach() for p in model.parameters()]
    by_hand = function(function(x.flatten(1) @ w[0].T + w[1]) @ w[2].T + w[3]) @ w[4].T + w[5]
    torch.testing.assert_close(model(x), by_hand)


def test_images_that_the_pools_empty_are_refused() -> None:
    assert vision.convnet((1, 9, 9), 2, width=1)(torch.rand(2, 1, 9, 9)).shape == (2, 2)
    for name, height, width, least in (("convnet", 8, 30, 9), ("convsmall", 3, 8, 4), ("convbig", 3, 8, 4)):
        with pytest.raises(ValueError, match=f"{least} x {least} .* {height} x {width}"):
            getattr(vision, name)((1, height, width), 2)


def test_resnet20_has_the_published_names_and_its_weights_classify_cifar10(local_file: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file

    published, images = (
        load_file(local_file("weights/resnet20-12fca82f.safetensors")),
        local_file("cifar10-test-first5k.npz"),
    )
    model = vision.resnet20(CIFAR, 10).eval()
    trained = {k: t for k, t in published.items() if "running" not in k and "num_batches" not in k}
    assert {k: t.shape for k, t in trained.items()} == {k: p.shape for k, p in model.named_parameters()}
    assert vision.floating_buffers(model).keys() == {k for k in published if "running" in k}
    missing, unexpected = model.load_state_dict(published, strict=False)
    assert all(k.endswith("num_batches_tracked") for k in missing)
    assert unexpected == []
    with np.load(images, allow_pickle=False) as stored:
        pixels, y = stored["images"][:500], torch.from_numpy(stored["labels"][:500])
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        right = (model((x - mean) / std).argmax(1) == y).float().mean()
    assert right > 0.90, f"the authors report 91.73 % on the whole test set, here {right:.1%}"


def basic(fan_in: int, width: int, stride: int) -> int:
    project = fan_in * width + 2 * width if stride > 1 or fan_in != width else 0
    return 9 * fan_in * width + 9 * width * width + 4 * width + project


def test_resnets_of_inverting_gradients_count_as_by_hand() -> None:
    """ResNet20-4: three stages of three blocks from 64 channels; and torchvision's ResNet-18 but for its first layer."""
    stages = [
        basic(64, 64, 1) * 3,
        basic(64, 128, 2) + 2 * basic(128, 128, 1),
        basic(128, 256, 2) + 2 * basic(256, 256, 1),
    ]
    by_hand = 27 * 64 + 128 + sum(stages) + 256 * 10 + 10
    assert parameters(vision.resnet(CIFAR, 10, depth=20, width=64)) == by_hand
    torchvision = pytest.importorskip("torchvision")
    for depth in (18, 34, 50):
        theirs = getattr(torchvision.models, f"resnet{depth}")(num_classes=10)
        stem = 3 * 64 * (49 - 9)
        assert parameters(vision.resnet(CIFAR, 10, depth=depth)) == parameters(theirs) - stem


@pytest.mark.parametrize("depth", [18, 20, 32, 34, 50])
def test_resnets_of_every_depth_compute_and_keep_their_scale(depth: Any) -> None:
    model = vision.resnet(CIFAR, 7, depth=depth, width=4)
    assert sum(
        isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1) or isinstance(m, nn.Linear) for m in model.modules()
    ) == (depth if depth != 50 else 18)
    assert model.train()(torch.rand(4, *CIFAR)).std() < 10
    assert model.eval()(torch.rand(2, *CIFAR)).shape == (2, 7)


def test_a_resnet_of_torchvisions_weights_computes_torchvisions_block() -> None:
    """A stage's first block, with its projecting shortcut, against the reference implementation."""
    resnet = pytest.importorskip("torchvision").models.resnet
    for depth, kind, fan_in in ((18, resnet.BasicBlock, 4), (50, resnet.Bottleneck, 16)):
        ours = vision.resnet(CIFAR, 10, depth=depth, width=4).get_submodule("layer2.0").train()
        fan_out = 8 * kind.expansion
        down = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride=2, bias=False), nn.BatchNorm2d(fan_out))
        theirs = kind(fan_in, 8, stride=2, downsample=down).train()
        theirs.load_state_dict({k.replace("shortcut", "downsample"): t for k, t in ours.state_dict().items()})
        x = torch.randn(3, fan_in, 9, 9)
        torch.testing.assert_close(ours(x), theirs(x))


def test_convsmall_is_its_formula_and_starts_as_flax_does() -> None:
    model = vision.convsmall(CIFAR, 10)
    assert parameters(model) == 28 * 32 + (9 * 32 + 1) * 64 + (64 * 64 + 1) * 100 + 1010
    assert parameters(vision.convsmall(MNIST, 10)) == 10 * 32 + (9 * 32 + 1) * 64 + (64 * 49 + 1) * 100 + 1010
    w = {k: p.detach() for k, p in model.named_parameters()}
    x = torch.rand(2, *CIFAR)
    h = F.avg_pool2d(F.conv2d(x, w["conv1.weight"], padding=1).relu(), 2)
    h = F.avg_pool2d(F.conv2d(h, w["conv2.weight"], padding=1).relu(), 2)
    by_hand = (h.flatten(1) @ w["linear1.weight"].T).relu() @ w["linear2.weight"].T
    torch.testing.assert_close(model(x), by_hand)  # biases start at zero
    for name, fan_in in (("conv2.weight", 288), ("linear1.weight", 4096)):
        assert float(w[name].var()) * fan_in == pytest.approx(1, rel=0.05)
        assert w[name].abs().max() <= 2 / 0.8796 / fan_in**0.5


def test_convbig_has_the_layers_that_soteria_was_attacked_on() -> None:
    layers = {k: tuple(p.shape) for k, p in vision.convbig(CIFAR, 10).named_parameters() if k.endswith("weight")}
    assert layers == {
        "conv1.weight": (32, 3, 3, 3),
        "conv2.weight": (64, 32, 1, 1),
        "linear1.weight": (2000, 5184),
        "linear2.weight": (1000, 2000),
        "linear3.weight": (10, 1000),
    }
    assert vision.convbig(MNIST, 10)(torch.rand(2, *MNIST)).shape == (2, 10)
