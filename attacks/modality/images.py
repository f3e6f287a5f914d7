"""Images as private data."""

from typing import ClassVar

import torch
from torch import Tensor

from fedgauge.attacks.learned.auxiliary import Auxiliary
from fedgauge.attacks.modality.base import MainMetric, Measured, Modality
from fedgauge.attacks.modality.image_metrics import PSNR_CAP, Metric, image_metrics, match

MARGIN = 10.0  # dB: a tenth of the squared error


class ImageModality(Modality):
    """Images (C, H, W) in [0, 1], paired and compared by their squared errors."""

    main = MainMetric("psnr", "PSNR", "dB", MARGIN, "at a tenth of every baseline's error or less", "image", PSNR_CAP)
    measured: ClassVar = {
        "psnr": Measured("PSNR (dB)"),
        "ssim": Measured("SSIM"),
        "mse": Measured("MSE (lower leaks more)", False),
        "identified": Measured("identified (part of the images)"),
        "label_accuracy": Measured("label accuracy"),
        "lpips_alex": Measured("LPIPS, AlexNet (lower leaks more)", False),
        "lpips_vgg": Measured("LPIPS, VGG16 (lower leaks more)", False),
        "psnr_augmented": Measured("PSNR (dB) to what was trained on"),
        "ssim_augmented": Measured("SSIM to what was trained on"),
        "mse_augmented": Measured("MSE to what was trained on (lower leaks more)", False),
    }
    baselines: ClassVar = {"mean_image": "mean_image", "random_image": "random_image"}
    limits = ("bayes_limit",)
    attacks = ("fedgauge.attacks", "fedgauge.decoders")
    shown_as = "image"
    blank_name = "grey"

    @classmethod
    def holds(cls, x: Tensor) -> bool:
        return x.dim() == 4 and x.shape[1] in (1, 3) and (x.is_floating_point() or x.dtype == torch.uint8)

    def metrics(self, gallery: Tensor) -> list[Metric]:
        return image_metrics(self.dataset.shape, gallery)

    def pairing(self, truth: Tensor, guess: Tensor) -> Tensor:
        return match(truth, guess)

    def blank(self, truth: Tensor) -> Tensor:
        return torch.full_like(truth, 0.5)

    def condition(self, lengths: str) -> str:
        return "normalisation known"

    def auxiliary(self, chosen: Auxiliary, size: int) -> str:
        if chosen.size is None and chosen.classes:
            return f"all fitting {chosen}"
        return f"{chosen.size or size} {chosen}"
