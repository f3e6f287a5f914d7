"""LPIPS by AlexNet and by VGG16, the papers' variant, and backbones that torchvision has downloaded."""

import warnings
from collections.abc import Callable
from pathlib import Path

import lpips
import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor

from fedgauge.attacks.modality import image_metrics as module
from fedgauge.attacks.modality.image_metrics import BACKBONES, image_metrics, lpips_metric
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.client.rng import generator

Find = Callable[[str], Path]
RELUS = {"alex": (1, 4, 7, 9, 11), "vgg": (3, 8, 15, 22, 29)}  # all five, and the last before each pooling


def weights(find: Find, net: str) -> dict[str, Tensor]:
    return load_file(find(f"weights/{BACKBONES[net].local}"))


def pair(n: int = 2, side: int = 32) -> tuple[Tensor, Tensor]:
    """Images, and the same with noise that is not everywhere alike."""
    rng = generator("pair", n)
    truth = torch.nn.functional.interpolate(torch.rand(n, 3, 6, 6, generator=rng), size=(side, side), mode="bilinear")
    noise = torch.rand(truth.shape, generator=rng) * torch.linspace(0, 1, side)
    return truth, (truth + 0.4 * noise).clamp(0, 1)


@pytest.mark.parametrize("net", BACKBONES)
def test_it_is_its_formula_on_torchvisions_layers(local_file: Find, net: str) -> None:
    """Zhang et al., 2018, eq. 1: channels of unit length, the authors' heads; built from torchvision's own layout."""
    stored = weights(local_file, net)
    with torch.device("meta"):
        features = {"alex": torchvision.models.alexnet, "vgg": torchvision.models.vgg16}[net]().features.eval()
    features.load_state_dict({k.removeprefix("features."): t for k, t in stored.items()}, assign=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lpips asks torchvision for its models in a deprecated way
        own = lpips.LPIPS(net=net, pnet_rand=True, verbose=False)
    heads = [layer.model[1].weight for layer in own.lins]
    shift = torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)
    scale = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)

    def taps(x: Tensor) -> list[Tensor]:
        x, found = (x * 2 - 1 - shift) / scale, []
        for i, layer in enumerate(features):
            x = layer(x)
            if i in RELUS[net]:
                found.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return found

    truth, guess = pair(3, 64 if net == "alex" else 32)
    expected = torch.zeros(3)
    with torch.no_grad():
        for a, b, head in zip(taps(truth), taps(guess), heads, strict=True):
            expected += ((a - b).square() * head).sum(1).mean((1, 2))
    metric = lpips_metric(net)
    assert metric is not None
    assert metric.name == f"lpips_{net}" and not MEASURED[metric.name].higher_is_better
    assert float(expected.min()) > 0.01
    torch.testing.assert_close(metric(truth, guess).float(), expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(metric(truth, truth), torch.zeros(3), rtol=0, atol=1e-6)
    assert metric.name in [m.name for m in image_metrics((3, 32, 32), truth)]


def test_building_a_backbone_draws_no_number(local_file: Find) -> None:
    weights(local_file, "alex")
    metric, state = lpips_metric("alex"), torch.get_rng_state()
    assert metric is not None
    module._lpips_network.cache_clear()
    metric(*pair())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_torchvision_has_downloaded_is_used(
    local_file: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchvision keeps it: the whole network in its own format."""
    stored = weights(local_file, "alex")
    here = lpips_metric("alex")
    assert here is not None
    expected = here(*pair())
    monkeypatch.setenv("FEDGAUGE_DATA", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    assert lpips_metric("alex") is None
    whole = {**stored, "classifier.6.bias": torch.zeros(1000)}
    name = Path(torchvision.models.AlexNet_Weights.DEFAULT.url).name
    (tmp_path / "torch" / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(whole, tmp_path / "torch" / "hub" / "checkpoints" / name)
    found = lpips_metric("alex")
    assert found is not None and found.name == "lpips_alex"
    assert lpips_metric("vgg") is None
    torch.testing.assert_close(found(*pair()), expected, rtol=0, atol=0)
