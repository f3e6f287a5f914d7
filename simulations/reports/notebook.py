"""Runs in a notebook, after `%load_ext fedgauge.simulations.reports.notebook`.

A `Run` shows its verdict and figures, `figures(run)` each figure, `Report(run)` the whole report.
"""

import base64
import html
from dataclasses import dataclass
from typing import Any

from fedgauge.server.store.run import Run
from fedgauge.server.views.formatting import scenario_line
from fedgauge.server.views.notices import notices
from fedgauge.server.views.reading import read_once
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.reports.figures import PaperFigure, own_style, run_figures
from fedgauge.simulations.reports.report import fill_template, write_report

HEIGHT = 800  # pixels of a report's frame


def figures(run: Run) -> dict[str, PaperFigure]:
    """Draw every figure of a run, by name, such as leakage-psnr or gallery."""
    with read_once(run) as reading, own_style():
        return {figure.name: figure for figure in run_figures(reading)}


@dataclass(frozen=True)
class Report:
    """New report of a run in a sandboxed frame."""

    run: Run

    def _repr_html_(self) -> str:
        page = write_report(self.run).read_text()
        frame = f'sandbox="allow-scripts" style="width: 100%; height: {HEIGHT}px; border: 0"'
        return f'<iframe {frame} srcdoc="{html.escape(page)}"></iframe>'


def run_html(run: Run) -> str:
    """Show a run's verdict, notices, curve over rounds, and gallery."""
    with read_once(run) as reading, own_style():
        shown = (f"leakage-{reading.scores.measure.metric}", "gallery")
        drawn = [(figure.name, *figure._repr_png_()) for figure in run_figures(reading) if figure.name in shown]
        pictures = [
            {"name": name, "width": size["width"], "data": base64.b64encode(data).decode()}
            for name, data, size in drawn
        ]
        facts, verdict, told = scenario_line(reading.tables), verdict_of(reading), notices(reading)
    content = {"name": run.name, "facts": facts, "verdict": verdict, "notices": told, "pictures": pictures}
    return fill_template("notebook.html", content)


def load_ipython_extension(shell: Any) -> None:
    """Let every Run show itself; IPython calls this for `%load_ext`."""
    shell.display_formatter.formatters["text/html"].for_type(Run, run_html)
