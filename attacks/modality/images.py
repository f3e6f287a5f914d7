"""Images as private data."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedgauge.attacks.learned.auxiliary import Auxiliary
from fedgauge.attacks.modality.base import DISTANCE, MainMetric, Measured, Modality
from fedgauge.attacks.modality.image_metrics import PSNR_CAP, Metric, image_metrics, match

# beyond 40 dB the eye sees no difference
PSNR: Mapping[str, Any] = {"unit": "dB", "digits": 1, "cap": PSNR_CAP, "ceiling": 40.0}
IMAGE_ATTACKS, DECODERS = "fedgauge.attacks", "fedgauge.decoders"  # groups of the registry


class ImageModality(Modality):
    """Images (C, H, W) in [0, 1], paired and compared by their squared errors."""

    main = MainMetric(
        "PSNR (dB)", **PSNR, metric="psnr", name="PSNR", private="image",
        margin=10.0, beyond="with at most a tenth of every baseline's error",
    )  # fmt: skip
    measured: ClassVar = {
        "psnr": main,
        "ssim": Measured("SSIM"),
        "mse": Measured("MSE (lower leaks more)", **DISTANCE, digits=None),
        "identified": Measured("identified (part of the images)", fraction=True, rate=True),
        "label_accuracy": Measured("label accuracy", fraction=True, of_batch=True),
        "label_f1": Measured("multi-label F1", fraction=True, of_batch=True),
        "label_error": Measured("label error in standard deviations (lower leaks more)", **DISTANCE, of_batch=True),
        "mask_iou": Measured("mask's overlap (IoU)", fraction=True, of_batch=True),
        "lpips_alex": Measured("LPIPS, AlexNet (lower leaks more)", **DISTANCE),
        "lpips_vgg": Measured("LPIPS, VGG16 (lower leaks more)", **DISTANCE),
        "psnr_augmented": Measured("PSNR (dB) to what was trained on", **PSNR),
        "ssim_augmented": Measured("SSIM to what was trained on"),
        "mse_augmented": Measured("MSE to what was trained on (lower leaks more)", **DISTANCE, digits=None),
    }
    baselines: ClassVar = {name: name for name in ("mean_image", "class_mean_image", "random_image")}
    given_labels = ("class_mean_image",)
    limits = ("bayes_limit", "candidate_bound")
    attacks: ClassVar[tuple[str, ...]] = (IMAGE_ATTACKS, DECODERS)
    shown_as = "image"
    parts = "pixels"
    bounds = (0.0, 1.0)
    condition = "normalisation known"

    @classmethod
    def holds(cls, x: Tensor) -> bool:
        return x.dim() == 4 and x.shape[1] in (1, 3) and (x.is_floating_point() or x.dtype == torch.uint8)

    def metrics(self, gallery: Tensor) -> list[Metric]:
        return image_metrics(self.dataset.shape, gallery)

    def pairing(self, truth: Tensor, guess: Tensor) -> Tensor:
        return match(truth, guess)

    def arranged(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) in [0, 1], from (B, H, W) or (B, H, W, C), also from uint8."""
        shape = self.dataset.shape
        x = x[:, None] if x.dim() == 3 else x
        if tuple(x.shape[1:]) != shape and x.dim() == 4 and (x.shape[3], *x.shape[1:3]) == shape:
            x = x.permute(0, 3, 1, 2)
        if x.dtype == torch.uint8 and x.any() and int(x.max()) == 1:
            raise ValueError("pixels of 0 and 1 as uint8, where white is 255: write floats, or 0 and 255")
        x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
        if len(x) and not (float(x.min()) >= 0 and float(x.max()) <= 1):
            raise ValueError(
                f"expected pixels as uint8 or in [0, 1], before any normalisation, got {float(x.min()):.3g} to {float(x.max()):.3g}"
            )
        return x

    def auxiliary(self, chosen: Auxiliary, size: int) -> str:
        if chosen.size is None and chosen.classes:
            return f"all fitting {chosen}"
        return f"{chosen.size or size} {chosen}"
