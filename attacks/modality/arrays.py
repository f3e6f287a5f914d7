"""Arrays of floats as private data: windows of sensors, volumes, vectors, images that an app has normalised."""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from fedgauge.attacks.modality.base import Measured, Modality
from fedgauge.attacks.modality.image_metrics import Metric, correlation, identified, mse, psnr
from fedgauge.attacks.modality.images import IMAGE_ATTACKS, ImageModality


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
    # private examples may lie outside the public ones' range by as much as that
    bounds = (-1.0, 2.0)
    condition = "range of public arrays known"

    @classmethod
    def holds(cls, x: Tensor) -> bool:
        return x.dim() >= 2 and x.is_floating_point()

    def metrics(self, gallery: Tensor) -> list[Metric]:
        return [mse, psnr, correlation, identified(gallery)]

    def arranged(self, x: Tensor) -> Tensor:
        return self.dataset.in_units(x.float())

    auxiliary = Modality.auxiliary
