"""The report: one self-contained HTML file with figures, tables and pictures of a run."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fedgauge.client.files import writing
from fedgauge.server.dashboard import DRAWING, STATIC
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run
from fedgauge.server.views.compare import Comparison
from fedgauge.server.views.formatting import many, number, percent
from fedgauge.server.views.gallery import Gallery, Page, sample_of
from fedgauge.server.views.leak_tables import clients
from fedgauge.server.views.overview import Overview
from fedgauge.server.views.snapshot import RunSnapshot, read_once
from fedgauge.server.views.tables import in_json


def write_report(run: Run) -> Path:
    """Write report.html into the run folder, for its owner only, and return its path."""
    with read_once(run) as reading:
        content = _content(reading)
    return _write(run.folder / "report.html", "report.html", content, in_run=True)


def write_comparison(runs: Sequence[Run], path: Path) -> Path:
    """Write one HTML file that compares several runs, for its owner only, and return its path."""
    with ExitStack() as stack:
        distinct = {run.folder.absolute(): run for run in runs}
        readings = [stack.enter_context(read_once(run)) for run in distinct.values()]
        first = Comparison(readings)  # by the main measure
        comparisons = [first, *(Comparison(readings, name) for name, _ in first.metrics if name != first.metric)]
    return _write(path, "comparison.html", {"data": in_json(comparisons), "names": comparisons[0].runs})


def _write(path: Path, template: str, content: Mapping[str, Any], in_run: bool = False) -> Path:
    from plotly.offline import get_plotlyjs

    style = Markup((STATIC / "style.css").read_text("utf-8"))
    drawing = Markup("\n".join((STATIC / name).read_text("utf-8") for name in DRAWING))
    page = fill_template(template, {**content, "style": style, "drawing": drawing, "plotly": Markup(get_plotlyjs())})
    with run_files.replacing(path) if in_run else writing(path) as file:
        file.write(page.encode(errors="replace"))
    return path


def fill_template(name: str, content: Mapping[str, Any]) -> str:
    """Fill a template of this folder with escaped values without control codes."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"number": number, "percent": percent, "many": many}
    return environment.get_template(name).render(**content)


def _shown(value: object) -> object:
    return run_files.printable(value.encode(errors="replace").decode()) if type(value) is str else value


def _content(reading: RunSnapshot) -> Mapping[str, object]:
    """Return the values of the template: the live page's, and a sample of examples."""
    gallery = Gallery(reading)
    page, cards = Overview(reading), [gallery.card(*place) for place in sample_of(gallery)]
    return {
        "o": page,
        "clients": clients(reading),
        "shown": len(cards),
        "attacked": len(gallery.attacked()),
        "truth_shown": gallery.shards is not None or "truth" in reading.meta,
        "data": in_json(
            {
                "overview": page,
                "gallery": Page(
                    kind=gallery.kind,
                    noun=reading.scores.measure.private,
                    rounds=sorted({card.round for card in cards}),
                    clients=sorted({card.client for card in cards}),
                    cards=cards,
                ),
            }
        ),
    }
