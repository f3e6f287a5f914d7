"""LPIPS by VGG16, the papers' variant, and backbones that torchvision has downloaded; AlexNet's formula is in test_metrics."""

from pathlib import Path

import lpips
import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor

from attacks import metrics
from attacks.metrics import BACKBONES, image_metrics, lpips_metric, lpips_weights
from client.rng import generator


def weights(folder: Path, net: str) -> dict[str, Tensor]:
    path = folder / "weights" / BACKBONES[net].local
    if not path.exists():
        pytest.skip(f"needs {path.name} in the local data folder (FEDLEAK_DATA)")
    return load_file(path)


def pair(n: int = 2) -> tuple[Tensor, Tensor]:
    """Images, and the same with noise that is not everywhere alike."""
    rng = generator("pair", n)
    truth = torch.nn.functional.interpolate(torch.rand(n, 3, 6, 6, generator=rng), size=(32, 32), mode="bilinear")
    noise = torch.rand(truth.shape, generator=rng) * torch.linspace(0, 1, 32)
    return truth, (truth + 0.4 * noise).clamp(0, 1)


def test_by_vgg_it_is_its_formula_on_torchvisions_layers(local_data: Path) -> None:
    """Zhang et al., 2018, eq. 1: the five layers before each pooling, their channels of unit length, the authors' heads."""
    stored = weights(local_data, "vgg")
    with torch.device("meta"):
        features = torchvision.models.vgg16().features.eval()
    features.load_state_dict({k.removeprefix("features."): t for k, t in stored.items()}, assign=True)
    path = Path(lpips.__file__).parent / "weights" / "v0.1" / "vgg.pth"
    heads = torch.load(path, weights_only=True, map_location="cpu")  # lpips ships its heads only so; tensors alone
    shift = torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)
    scale = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)

    def taps(x: Tensor) -> list[Tensor]:
        x, found = (x * 2 - 1 - shift) / scale, []
        for i, layer in enumerate(features):
            x = layer(x)
            if i in (3, 8, 15, 22, 29):  # the last ReLU before each pooling
                found.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return found

    truth, guess = pair()
    expected = torch.zeros(2)
    with torch.no_grad():
        for i, (a, b) in enumerate(zip(taps(truth), taps(guess), strict=True)):
            expected += ((a - b).square() * heads[f"lin{i}.model.1.weight"]).sum(1).mean((1, 2))
    metric = lpips_metric("vgg")
    assert metric is not None
    assert metric.name == "lpips_vgg" and metric.higher_is_better is False
    assert float(expected.min()) > 0.01
    torch.testing.assert_close(metric(truth, guess).float(), expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(metric(truth, truth), torch.zeros(2), rtol=0, atol=1e-6)
    assert "lpips_vgg" in [m.name for m in image_metrics((3, 32, 32), None)]


def test_building_a_backbone_draws_no_number(local_data: Path) -> None:
    weights(local_data, "alex")
    metric, state = lpips_metric("alex"), torch.get_rng_state()
    assert metric is not None
    metrics._lpips_network.cache_clear()
    metric(*pair())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_torchvision_has_downloaded_is_used(
    local_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchvision keeps it: the whole network in its own format."""
    stored = weights(local_data, "alex")
    here = lpips_metric("alex")
    assert here is not None
    expected = here(*pair())
    monkeypatch.setenv("FEDLEAK_DATA", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    assert lpips_metric("alex") is None
    whole = {**stored, "classifier.6.bias": torch.zeros(1000)}
    name = Path(torchvision.models.AlexNet_Weights.DEFAULT.url).name
    (tmp_path / "torch" / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(whole, tmp_path / "torch" / "hub" / "checkpoints" / name)
    metrics._downloaded.cache_clear()
    found = lpips_metric("alex")
    assert found is not None and found.name == "lpips_alex"
    assert lpips_metric("vgg") is None
    torch.testing.assert_close(found(*pair()), expected, rtol=0, atol=0)


def test_a_download_that_fails_is_told_and_leaves_the_metric_out(
    no_local_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a port on which nobody listens: no network is asked."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert lpips_weights("alex") is None
    monkeypatch.setenv("FEDLEAK_LPIPS", "download")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.warns(UserWarning, match="lpips_alex is unavailable: https://.*was not downloaded"):
        assert lpips_weights("alex") is None
    assert lpips_weights("alex") is None, "and is not asked for again"
    assert list((tmp_path / "hub" / "checkpoints").iterdir()) == []
