"""Thumbnails: an image in a terminal's cells, two pixels a cell."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from rich.color import Color
from rich.style import Style
from rich.text import Text
from torch import Tensor

SIDE = 32  # pixels of the longer side, at most
RAMP = " .:-=+*#%@"  # from dark to light
Colour = tuple[int, int, int]


def size(height: int, width: int) -> tuple[int, int]:
    """(height, width) in pixels of an image's thumbnail."""
    scale = min(1.0, SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def lines_of(height: int) -> int:
    """How many lines a thumbnail of this height in pixels takes."""
    return (height + 1) // 2


def shrink(image: Tensor) -> Tensor:
    """Colours (h, w, 3) uint8 of an image (C, H, W) in [0, 1]; a larger image is averaged over areas."""
    seen = image.detach().float().nan_to_num(0.0).clamp(0, 1)
    if len(seen) != 3:  # not three channels: show their mean as grey
        seen = seen.mean(0, keepdim=True).expand(3, -1, -1)
    small = F.adaptive_avg_pool2d(seen, size(*seen.shape[1:]))
    return (small * 255).round().to(torch.uint8).permute(1, 2, 0)


def half_blocks(image: Tensor) -> list[Text]:
    """Lines of upper half blocks: the foreground is the upper pixel, the background the lower one."""
    rows = shrink(image).tolist()
    below = [*rows[1::2], *[None] * (len(rows) % 2)]
    return [_line(upper, lower) for upper, lower in zip(rows[::2], below, strict=True)]


def _line(upper: list[list[int]], lower: list[list[int]] | None) -> Text:
    line = Text(no_wrap=True)
    for x, (r, g, b) in enumerate(upper):
        line.append("▀", _style((r, g, b), None if lower is None else (lower[x][0], lower[x][1], lower[x][2])))
    return line


@lru_cache(maxsize=4096)
def _style(upper: Colour, lower: Colour | None) -> Style:
    return Style(color=Color.from_rgb(*upper), bgcolor=None if lower is None else Color.from_rgb(*lower))


def gray_ramp(image: Tensor) -> list[Text]:
    """Lines of characters, denser where the image is lighter, for a terminal without colours."""
    gray = shrink(image).float().mean(2) / 255  # (h, w)
    if len(gray) % 2:
        gray = torch.cat([gray, gray[-1:]])
    cells = (gray[::2] + gray[1::2]) / 2
    return [Text("".join(RAMP[round(v * (len(RAMP) - 1))] for v in row), no_wrap=True) for row in cells.tolist()]
