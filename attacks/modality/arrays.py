"""Arrays of floats as private data: windows of sensors, volumes, vectors, images that an app has normalised."""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.modality.base import Measured, Modality
from fedgauge.attacks.modality.image_metrics import Metric, correlation, identified, mse, psnr
from fedgauge.attacks.modality.images import IMAGE_ATTACKS, ImageModality

BEYOND = 1.0  # part of the public examples' range by which private ones may lie outside of it


class ArrayModality(ImageModality):
    """Arrays (C, ...) in units of the public examples' range, compared by the squared error over this range."""

    main = replace(ImageModality.main, private="array", stored="psnr of arrays")
    measured: ClassVar = {
        **ImageModality.measured,
        "psnr": main,
        "correlation": Measured("correlation with the private values"),
    }
    baselines: ClassVar = {
        "mean_array": "mean_image",
        "class_mean_array": "class_mean_image",
        "random_array": "random_image",
    }
    given_labels = ("class_mean_array",)
    attacks = (IMAGE_ATTACKS,)
    parts = "numbers"

    @classmethod
    def holds(cls, x: Tensor) -> bool:
        return x.dim() >= 2 and x.is_floating_point()

    def metrics(self, gallery: Tensor) -> list[Metric]:
        return [mse, psnr, correlation, identified(gallery)]

    def arranged(self, x: Tensor) -> Tensor:
        return self.dataset.in_units(x.float())

    def possible(self, x: Tensor) -> Tensor:
        return x.clamp(-BEYOND, 1 + BEYOND)

    def informed(self, known: Knowledge) -> Knowledge:
        return replace(known, low=-BEYOND, high=1 + BEYOND)

    def condition(self, lengths: str) -> str:
        return "range of public arrays known"

    auxiliary = Modality.auxiliary
