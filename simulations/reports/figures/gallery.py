"""True examples above what each attack reconstructed of them."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from fedgauge.server.views.gallery import Card, Gallery
from fedgauge.simulations.reports.figures.style import INK, LINE_HEIGHT, MUTED, WIDTH
from fedgauge.simulations.reports.sampling import sample_examples

EXAMPLES = 6
LETTER_WIDTH = 0.0505  # inches: one monospaced letter of 6 points
MONOSPACED: dict[str, Any] = {"ha": "left", "va": "top", "family": "monospace", "size": 6}


def gallery_figure(gallery: Gallery) -> Figure | None:
    """True examples above each attack's reconstructions, with the PSNR below; None if no true example is on this machine."""
    found = [card for some in sample_examples(gallery, EXAMPLES).cards(gallery).values() for card in some]
    cards = [card for card in found if card.truth is not None or card.truth_words is not None][:EXAMPLES]
    if not cards:
        return None
    if gallery.kind == "text":
        return _sentences_figure(cards)
    shown = {tile.attack for card in cards for tile in card.tiles}
    attacks = [attack for attack in gallery.attacks if attack in shown]  # a test of membership shows nothing
    truths = [_pixels(card.truth) for card in cards if card.truth is not None]
    tile = WIDTH / EXAMPLES
    height, width, _ = truths[0].shape
    tile_height = 0.92 * tile * height / width
    header_height = (2.2 + 2 * any(card.why for card in cards)) * LINE_HEIGHT
    row = tile_height + 2.3 * LINE_HEIGHT
    figure = Figure((max(1.5, tile * len(cards)), header_height + row * (1 + len(attacks))))
    for i, card in enumerate(cards):
        notes = [f"round {card.round}", f"client {card.client}", *card.why.replace(" ", "\n").splitlines()]
        _write(figure, (i + 0.5) * tile, header_height - 0.3 * LINE_HEIGHT, "\n".join(notes), ha="center", va="bottom")
        tiles = {t.attack: t for t in card.tiles}
        _draw_tile(figure, i * tile, header_height + LINE_HEIGHT, tile, tile_height, truths[i], f"label {card.label}")
        for k, attack in enumerate(attacks, 1):
            tile_found = tiles.get(attack)
            image: NDArray[np.uint8] | str = "no\nimage" if tile_found else "not\nattacked"
            note = ""
            if tile_found and tile_found.image:
                image, note = _pixels(tile_found.image), tile_found.note.removesuffix(" dB")
            _draw_tile(figure, i * tile, header_height + LINE_HEIGHT + k * row, tile, tile_height, image, note)
    for k, name in enumerate(["truth", *(f"{a}, PSNR (dB)" for a in attacks)]):
        y = header_height + k * row + 0.9 * LINE_HEIGHT
        _write(figure, 0.04 * tile, y, name, ha="left", va="bottom", weight="bold")
    return figure


def _sentences_figure(cards: Sequence[Card]) -> Figure:
    """True sentences above each attack's, whose words are marked right, misplaced (underlined) or wrong (grey)."""
    lines: list[tuple[str, Sequence[tuple[str, str]]]] = []
    for card in cards:
        lines.append((f"client {card.client}, round {card.round}", [(w, "right") for w in card.truth_words or ()]))
        lines += [(f"{tile.attack}: {tile.note}", tile.words or ()) for tile in card.tiles]
    figure = Figure((WIDTH, (2 * len(lines) + 1) * LINE_HEIGHT))
    for i, (name, words) in enumerate(lines):
        top = (2 * i + 0.5) * LINE_HEIGHT
        _write(figure, 0.05, top, name, ha="left", va="top", size=5, color=MUTED)
        left = 0.05
        for word, mark in words:
            if left + len(word) * LETTER_WIDTH > WIDTH:
                _write(figure, WIDTH - 0.05, top + 0.8 * LINE_HEIGHT, "…", ha="right", va="top")
                break
            color = MUTED if mark == "wrong" else INK
            _write(figure, left, top + 0.8 * LINE_HEIGHT, word, **MONOSPACED, color=color)
            if mark == "misplaced":
                _write(figure, left, top + 0.95 * LINE_HEIGHT, "_" * len(word), **MONOSPACED)
            left += (len(word) + 1) * LETTER_WIDTH
    return figure


def _pixels(uri: str) -> NDArray[np.uint8]:
    """Return the pixels (H, W, C) of a gallery picture, which is a PNG in a data URI."""
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1]))))
    return found[:, :, None] if found.ndim == 2 else found


def _draw_tile(
    figure: Figure, left: float, top: float, width: float, height: float, image: NDArray[np.uint8] | str, note: str
) -> None:
    """Draw one image with a note below it; lengths are in inches from the figure's upper left corner."""
    across, down = figure.get_size_inches()
    place = ((left + 0.04 * width) / across, 1 - (top + height) / down, 0.92 * width / across, height / down)
    axes = figure.add_axes(place, xticks=[], yticks=[])
    axes.grid(False)
    if isinstance(image, str):
        axes.text(0.5, 0.5, image, ha="center", va="center", size=7, color=MUTED, transform=axes.transAxes)
    else:
        gray = image.shape[2] == 1
        axes.imshow(image[:, :, 0] if gray else image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    _write(figure, left + width / 2, top + height + 0.1 * LINE_HEIGHT, note, ha="center", va="top")


def _write(figure: Figure, x: float, y: float, words: str, **how: Any) -> None:
    across, down = figure.get_size_inches()
    figure.text(x / across, 1 - y / down, words, **{"size": 7, **how})
