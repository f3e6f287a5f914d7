"""True examples above their reconstructions."""

import base64
import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from fedgauge.server.views.gallery import Gallery, sampled
from fedgauge.simulations.reports.figures.style import LINE_HEIGHT, MUTED, WIDTH

EXAMPLES = 6


def gallery_figure(gallery: Gallery) -> Figure | None:
    """Draw true images above their reconstructions and scores; None without true images."""
    found = [gallery.card(*place) for place in sampled(gallery.attacked(), EXAMPLES)]
    cards = [card for card in found if card.truth is not None]
    if not cards:
        return None
    shown = {tile.attack for card in cards for tile in card.tiles}
    attacks = [attack for attack in gallery.attacks if attack in shown]
    heights = WIDTH / EXAMPLES + 2.2 * LINE_HEIGHT
    figure = Figure((max(1.5, WIDTH / EXAMPLES * len(cards)), heights * (1 + len(attacks)) + 4 * LINE_HEIGHT))
    figure.set_layout_engine("constrained", w_pad=0.01, h_pad=0.5 * LINE_HEIGHT)
    columns = figure.subplots(1 + len(attacks), len(cards), squeeze=False).T
    for card, column in zip(cards, columns, strict=True):
        _draw_tile(column[0], card.truth, f"label {card.label}", f"round {card.round}\nclient {card.client}")
        tiles = {tile.attack: tile for tile in card.tiles}
        for attack, axes in zip(attacks, column[1:], strict=True):
            own = tiles.get(attack)
            note = own.note.removesuffix(" dB") if own and own.image else "no\nimage" if own else "not\nattacked"
            _draw_tile(axes, own.image if own else None, note)
    for name, axes in zip(["truth", *(f"{a}, PSNR (dB)" for a in attacks)], columns[0], strict=True):
        heading = axes.annotate(name, (0, 1.04), xycoords="axes fraction", size=7, weight="bold")
        heading.set_in_layout(False)  # it may be wider than its column
    return figure


def _draw_tile(axes: Axes, uri: str | None, note: str, title: str = "") -> None:
    """Draw a gallery picture, which is a PNG in a data URI, with a note below it."""
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, size=7, pad=10)
    if uri is None:
        axes.text(0.5, 0.5, note, ha="center", va="center", size=7, color=MUTED, transform=axes.transAxes)
        return
    axes.set_xlabel(note, size=7, labelpad=1)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1]))))
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
