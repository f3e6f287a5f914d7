"""Metrics of a reconstruction: pure, one value an example, on images in [0, 1] paired one to one with the truth."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from client.data import data_folder
from client.metrics import PSNR_CAP as PSNR_CAP  # handed on: all metrics are found here
from client.metrics import match as match
from client.metrics import mse_of as mse_of
from client.metrics import psnr_of as psnr_of

AUGMENTED = "_augmented"  # ends the name of a metric against the examples as a defense made them before training

# by name, in the order in which tables and figures show them
HIGHER_IS_BETTER = {
    "psnr": True,
    "ssim": True,
    "mse": False,
    "identified": True,
    "label_accuracy": True,
    "lpips_alex": False,
    "psnr_augmented": True,
    "ssim_augmented": True,
    "mse_augmented": False,
}
LPIPS_PIXELS = 32  # from which on: AlexNet pools 28 away


@dataclass(frozen=True)
class Metric:
    """(truth (B, C, H, W), guess (B, C, H, W)) -> (B,), with what a larger value means and its unit."""

    name: str
    unit: str
    compute: Callable[[Tensor, Tensor], Tensor]

    @property
    def higher_is_better(self) -> bool:
        """From the attacker's side."""
        return HIGHER_IS_BETTER[self.name]

    def __call__(self, truth: Tensor, guess: Tensor) -> Tensor:
        if truth.shape != guess.shape:
            raise ValueError(f"expected a guess of the truth's shape {tuple(truth.shape)}, got {tuple(guess.shape)}")
        values = self.compute(truth, guess)
        assert values.shape == (len(truth),)
        return values


def ssim_of(truth: Tensor, guess: Tensor) -> Tensor:
    """Structural similarity (Wang et al., 2004), Gaussian window of 11 pixels, range 1; from 11 pixels on."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    guess, truth = guess.float(), truth.float()
    # windows that reach over the border, which torchmetrics fills by reflection, do not count with the authors
    _, windows = structural_similarity_index_measure(
        guess, truth, data_range=1.0, reduction="none", return_full_image=True
    )
    return torch.as_tensor(windows[..., 5:-5, 5:-5]).flatten(1).mean(1)


mse = Metric("mse", "", mse_of)
psnr = Metric("psnr", "dB", psnr_of)
ssim = Metric("ssim", "", ssim_of)


def identified(gallery: Tensor) -> Metric:
    """1 where the true image is nearer to the reconstruction than every image of a gallery (N, C, H, W), else 0."""

    def compute(truth: Tensor, guess: Tensor) -> Tensor:
        own = (truth - guess).square().flatten(1).mean(1)
        others = torch.cdist(guess.flatten(1), gallery.flatten(1)).square().amin(1) / guess[0].numel()
        return (own < others).double()

    return Metric("identified", "", compute)


def lpips_metric() -> Metric | None:
    """LPIPS with AlexNet's real weights (Zhang et al., 2018), or None where no weights are found: a random net is no metric."""
    weights = lpips_weights()
    if weights is None:
        return None

    def compute(truth: Tensor, guess: Tensor) -> Tensor:
        network = _lpips_network(str(weights))
        x, y = (t.float().expand(-1, 3, -1, -1) * 2 - 1 for t in (truth, guess))
        with torch.no_grad():
            return torch.as_tensor(network(x, y)).reshape(len(truth))

    return Metric("lpips_alex", "", compute)


def lpips_weights() -> Path | None:
    """The file of AlexNet's convolutions in the local data folder."""
    folder = data_folder()
    path = folder / "weights" / "alexnet_features_torchvision.safetensors" if folder else None
    return path if path is not None and path.exists() else None


@lru_cache(maxsize=1)
def _lpips_network(weights: str) -> Callable[[Tensor, Tensor], Tensor]:
    import warnings

    import lpips
    from safetensors.torch import load_file

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lpips asks torchvision for its models in a deprecated way
        network = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False).eval()
    stored = load_file(weights)
    with torch.no_grad():
        for sequence in network.net.children():
            for name, module in sequence.named_children():
                if isinstance(module, torch.nn.Conv2d):
                    module.weight.copy_(stored[f"features.{name}.weight"])
                    assert module.bias is not None
                    module.bias.copy_(stored[f"features.{name}.bias"])
    return lambda x, y: network(x, y)


def image_metrics(shape: tuple[int, int, int], gallery: Tensor | None) -> list[Metric]:
    """Every metric that applies: SSIM from 11 pixels on, LPIPS from 32 with weights, identification with a gallery."""
    chosen = [mse, psnr]
    if min(shape[1:]) >= 11:
        chosen.append(ssim)
    if gallery is not None and len(gallery) > 0:
        chosen.append(identified(gallery))
    perceptual = lpips_metric() if min(shape[1:]) >= LPIPS_PIXELS else None
    return [*chosen, perceptual] if perceptual else chosen


def label_accuracy(truth: Tensor, guess: Tensor) -> float:
    """The part of a batch's labels that were restored, as multisets: order does not count, repeats do."""
    classes = int(max(truth.max(), guess.max())) + 1
    common = torch.minimum(torch.bincount(truth, minlength=classes), torch.bincount(guess, minlength=classes))
    return float(common.sum()) / len(truth)
