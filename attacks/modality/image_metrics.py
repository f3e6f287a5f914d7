"""Metrics of a reconstruction: one value per example, on images in [0, 1] paired one to one with the truth."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from fedgauge.client.data_folder import data_folder
from fedgauge.client.psnr import PSNR_CAP as PSNR_CAP  # re-exported: all metrics are importable from here
from fedgauge.client.psnr import match as match
from fedgauge.client.psnr import mse_of as mse_of
from fedgauge.client.psnr import psnr_of as psnr_of

AUGMENTED = "_augmented"  # suffix of metrics against the examples as a defense changed them before training

LPIPS_PIXELS = 32  # smallest image: AlexNet pools 28 pixels down to nothing


@dataclass(frozen=True)
class Metric:
    """A metric from truth and guess, both (B, C, H, W) or, for text, (B, L), to values (B,)."""

    name: str
    compute: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, truth: Tensor, guess: Tensor) -> Tensor:
        return self.compute(truth, guess)


def ssim_of(truth: Tensor, guess: Tensor) -> Tensor:
    """Structural similarity (Wang et al., 2004) with a Gaussian window of 11 pixels and range 1; needs 11 pixels."""
    x, y = guess.float(), truth.float()
    window = torch.exp(-((torch.arange(-5.0, 6.0, device=x.device) / 1.5) ** 2) / 2)
    window = window / window.sum()
    kernel = torch.outer(window, window).expand(x.shape[1], 1, -1, -1)
    moments = conv2d(torch.cat((x, y, x * x, y * y, x * y)), kernel, groups=x.shape[1])
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = moments.split(len(x))
    square_x, square_y, product = mean_x.pow(2), mean_y.pow(2), mean_x * mean_y
    variances = (mean_xx - square_x).clamp(min=0) + (mean_yy - square_y).clamp(min=0)
    above = (2 * product + 0.01**2) * (2 * (mean_xy - product) + 0.03**2)
    similar: Tensor = above / ((square_x + square_y + 0.01**2) * (variances + 0.03**2))
    return similar.flatten(1).mean(1)


def correlation_of(truth: Tensor, guess: Tensor) -> Tensor:
    """Pearson's correlation over an example's values; 0 for a constant one."""
    truth, guess = (t.double().flatten(1) - t.double().flatten(1).mean(1, keepdim=True) for t in (truth, guess))
    return torch.cosine_similarity(truth, guess, 1)


mse = Metric("mse", mse_of)
correlation = Metric("correlation", correlation_of)
psnr = Metric("psnr", psnr_of)
ssim = Metric("ssim", ssim_of)


def identified(gallery: Tensor) -> Metric:
    """1 where the true image is nearer to the reconstruction than every image of a gallery (N, C, H, W), else 0."""

    def compute(truth: Tensor, guess: Tensor) -> Tensor:
        own = (truth - guess).square().flatten(1).mean(1)
        others = torch.cdist(guess.flatten(1), gallery.flatten(1)).square().amin(1) / guess[0].numel()
        return (own < others).double()

    return Metric("identified", compute)


class Backbone(NamedTuple):
    """The feature network of LPIPS."""

    local: str  # file of its convolutions in the folder weights/ of the local data
    torchvision: str  # name of torchvision's weights
    cached: str  # file in torchvision's cache


BACKBONES = {
    "alex": Backbone("alexnet_features_torchvision.safetensors", "AlexNet_Weights", "alexnet-owt-7be5be79.pth"),
    "vgg": Backbone("vgg16_features_torchvision.safetensors", "VGG16_Weights", "vgg16-397923af.pth"),
}


def lpips_metric(net: str) -> Metric | None:
    """LPIPS with a backbone's trained weights (Zhang et al., 2018), or None without them: a random net is no metric."""
    weights = lpips_weights(net)
    if weights is None:
        return None

    def compute(truth: Tensor, guess: Tensor) -> Tensor:
        network = _lpips_network(net, weights)
        x, y = (t.float().expand(-1, 3, -1, -1) * 2 - 1 for t in (truth, guess))
        with torch.no_grad():
            return torch.as_tensor(network(x, y)).reshape(len(truth))

    return Metric(f"lpips_{net}", compute)


def lpips_weights(net: str) -> Path | None:
    """The file of a backbone's convolutions: in the local data folder, else in torchvision's cache."""
    backbone, folder = BACKBONES[net], data_folder()
    local = [folder / "weights" / backbone.local] if folder else []
    places = [*local, Path(torch.hub.get_dir()) / "checkpoints" / backbone.cached]
    return next((path for path in places if path.exists()), None)


@lru_cache
def _lpips_network(net: str, weights: Path) -> nn.Module:
    import lpips
    import torchvision
    from safetensors.torch import load_file

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # lpips asks torchvision for its models in a deprecated way
        network: nn.Module = lpips.LPIPS(net=net, pnet_rand=True, verbose=False).eval()
    if weights.suffix == ".safetensors":
        stored = load_file(weights)
    else:
        published = getattr(torchvision.models, BACKBONES[net].torchvision).DEFAULT
        stored = published.get_state_dict(progress=False, weights_only=True)  # tensors alone
    for sequence in network.get_submodule("net").children():
        for name, module in sequence.named_children():
            if isinstance(module, nn.Conv2d):
                module.load_state_dict({part: stored[f"features.{name}.{part}"] for part in ("weight", "bias")})
    return network


def image_metrics(shape: tuple[int, ...], gallery: Tensor) -> list[Metric]:
    """Every metric that applies: SSIM from 11 pixels, LPIPS from 32 pixels with weights."""
    chosen = [mse, psnr, *([ssim] if min(shape[1:]) >= 11 else []), identified(gallery)]
    perceptual = [lpips_metric(net) for net in BACKBONES] if min(shape[1:]) >= LPIPS_PIXELS else []
    return chosen + [metric for metric in perceptual if metric is not None]
