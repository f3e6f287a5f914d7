"""Thumbnails show an image in a terminal's cells."""

import pytest
import torch
from rich.text import Text

from fedgauge.simulations.live import thumbnails
from tests.simulations.live.conftest import plain

RED, GREEN, BLUE, WHITE = (1.0, 0, 0), (0, 1.0, 0), (0, 0, 1.0), (1.0, 1, 1)


def image_of(*rows: list[tuple[float, float, float]]) -> torch.Tensor:
    return torch.tensor(rows).permute(2, 0, 1)


def colours(lines: list[Text]) -> list[list[tuple[str, str | None, str | None]]]:
    """Each cell: character, colour of the upper and of the lower pixel."""
    cells = []
    for line in lines:
        styles = [(line.plain[span.start : span.end], span.style) for span in line.spans]
        cells.append(
            [
                (text, style.color and style.color.name, style.bgcolor and style.bgcolor.name)  # type: ignore[union-attr]
                for text, style in styles
            ]
        )
    return cells


def test_two_pixels_share_a_cell_in_their_own_colours() -> None:
    image = image_of([RED, GREEN], [BLUE, WHITE], [(0.5, 0.5, 0.5), (2.0, -1.0, float("nan"))])
    assert colours(thumbnails.half_blocks(image)) == [
        [("▀", "#ff0000", "#0000ff"), ("▀", "#00ff00", "#ffffff")],
        [("▀", "#808080", None), ("▀", "#ff0000", None)],  # an odd number of lines ends on the terminal's own colour
    ]


@pytest.mark.parametrize(
    ("shape", "columns", "lines"),
    [((1, 28, 28), 28, 14), ((3, 32, 32), 32, 16), ((3, 64, 64), 32, 16), ((3, 64, 32), 16, 16), ((3, 500, 7), 1, 16)],
)
def test_a_thumbnail_is_as_large_as_the_image_up_to_32_pixels(
    shape: tuple[int, int, int], columns: int, lines: int
) -> None:
    for draw in (thumbnails.half_blocks, thumbnails.gray_ramp):
        drawn = draw(torch.rand(shape, generator=torch.manual_seed(0)))
        assert (len(drawn), {line.cell_len for line in drawn}) == (lines, {columns})


def test_what_is_too_large_is_averaged() -> None:
    checkers = (torch.arange(64)[:, None] + torch.arange(64)) % 2
    assert torch.equal(thumbnails.shrink(checkers[None].float()), torch.full((32, 32, 3), 128, dtype=torch.uint8))


def test_without_colours_light_is_dense() -> None:
    ramp = torch.tensor([[[0.0, 0.5, 1.0], [0.0, 0.5, 1.0], [0.0, 0.0, 1.0]]])
    # ten characters from 0 to 9: round(9 * 0.50196) = 5; the last line is its own lower half
    assert plain(thumbnails.gray_ramp(ramp)) == [" +@", "  @"]
