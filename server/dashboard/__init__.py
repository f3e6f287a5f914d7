"""The live page: it shows runs from their ledgers and reconstructions, and writes nothing."""

from pathlib import Path

import fedgauge.client  # noqa: F401  (mends torchvision before anything can import it)

STATIC = Path(__file__).parent / "static"
# the scripts that draw a run, in the order in which they load; the live page adds its own, and reports contain these
DRAWING = ("format.js", "tree.js", "plot.js", "controls.js", "tables.js", "figures.js", "gallery.js", "comparison.js")
