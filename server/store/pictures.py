"""Images as PNG data URIs, and reconstructions on disk."""

import base64
import io
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgauge.server.store.run import Run
from fedgauge.server.store.run_files import LedgerError
from fedgauge.server.store.tape import TapeError

SMALL = 96  # pixels per side of an image among many


def png(x: Tensor, most: int | None = None) -> str:
    """Encode an image (C, H, W), one or three channels, in [0, 1] or uint8, as the data URI of a PNG.

    Args:
        most: pixels per side; larger images are averaged.
    """
    from PIL import Image

    pixels = x.float() / 255 if x.dtype == torch.uint8 else x.clamp(0, 1)
    if most is not None and max(pixels.shape[1:]) > most:
        factor = math.ceil(max(pixels.shape[1:]) / most)
        pixels = F.avg_pool2d(pixels, factor, ceil_mode=True)
    values = (pixels * 255).round().byte().permute(1, 2, 0).numpy()  # (H, W, C)
    file = io.BytesIO()
    Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def reconstruction(run: Run, round: int, client: int, attack: str) -> dict[str, Tensor] | str:
    """Read a reconstruction in the order of its scores' examples; "missing" or "damaged" without one."""
    try:
        return _by_example(run.read_reconstruction(round, client, attack))
    except (TapeError, LedgerError) as error:
        return "missing" if isinstance(error.__cause__, FileNotFoundError) else "damaged"


def _by_example(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sort reconstructions by the example numbers that grading by a later truth added."""
    if "example" not in tensors:
        return tensors
    example = tensors["example"]
    size, some = int(example.max()) + 1, example >= 0
    placed = dict(tensors)
    for name, t in tensors.items():
        if name in ("x", "y", "confidence"):
            placed[name] = t.new_zeros((size, *t.shape[1:]))
            placed[name][example[some]] = t[some]
    return placed
