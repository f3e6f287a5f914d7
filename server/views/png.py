"""Private images and what attacks made of them, as pictures a browser shows."""

import base64
import io
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import TapeError

SMALL = 96  # pixels a side of a picture among many


def png(x: Tensor, most: int | None = None) -> str:
    """An image (C, H, W), one or three channels, in [0, 1] or uint8, as the data URI of a PNG.

    Args:
        most: pixels a side; larger ones are made smaller by averaging.
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
    """What an attack kept of one observation, or in a word why there is nothing: missing, damaged."""
    path = run.reconstruction(round, client, attack)
    if path.resolve().parent != (run.folder / "reconstructions").resolve():  # a ledger from elsewhere may say anything
        return "damaged"
    try:
        return run.read_reconstruction(round, client, attack)
    except TapeError:  # deleted or damaged: the scores remain, and the picture's place says that it does not
        return "damaged" if path.exists() else "missing"
