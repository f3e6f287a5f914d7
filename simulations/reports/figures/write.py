"""Figures for papers: each plot of a run as PNG and SVG, one column wide."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import write_bytes
from fedgauge.server.views.compare import named_readings, utility_figure
from fedgauge.server.views.figures import membership_figure, rounds_figures, success_figure
from fedgauge.server.views.gallery import Gallery
from fedgauge.server.views.reading import Reading, read_once
from fedgauge.server.views.roles import is_baseline
from fedgauge.simulations.reports.figures.draw import draw
from fedgauge.simulations.reports.figures.gallery import gallery_figure
from fedgauge.simulations.reports.figures.style import PaperFigure, own_style

KINDS: tuple[Literal["png", "svg"], ...] = ("png", "svg")


def write_figures(runs: Sequence[Run], folder: Path) -> tuple[list[Path], list[str]]:
    """Write every figure of the runs and of their comparison.

    Returns:
        The paths, and the reasons for missing figures. Several runs have a folder each.
    """
    paths, missing = [], []
    with ExitStack() as stack, own_style():
        distinct = {run.folder.absolute(): run for run in runs}
        named = named_readings([stack.enter_context(read_once(run)) for run in distinct.values()])
        for name, reading in named.items():
            if not len(reading.scores):
                missing.append(f"{reading.run.name}: no attack has a score yet, so there is nothing to draw")
            for figure in run_figures(reading):
                paths += _save(figure, folder if len(named) == 1 else folder / name)
        if len(named) > 1:
            comparison = list(_comparison(named))
            for figure in comparison:
                paths += _save(figure, folder)
            if not comparison:
                missing.append("the runs are not compared: fewer than two have both accuracy and leakage")
    return paths, missing


def _save(figure: PaperFigure, folder: Path) -> list[Path]:
    paths = []
    for kind in KINDS:
        paths.append(folder / f"{figure.name}.{kind}")
        write_bytes(paths[-1], figure.rendered(kind))
    return paths


def run_figures(reading: Reading) -> Iterator[PaperFigure]:
    """Draw every figure of a run with a score."""
    if not len(reading.scores):
        return
    others = success_figure(reading), membership_figure(reading)
    about = f"{reading.run.name}. {_knowledge(reading)}"
    for spec in filter(None, (*rounds_figures(reading), *others)):
        yield PaperFigure(spec.name, draw(spec), about)
    if (strip := gallery_figure(Gallery(reading))) is not None:
        yield PaperFigure("gallery", strip, about)


def _comparison(named: Mapping[str, Reading]) -> Iterator[PaperFigure]:
    """Draw leakage against accuracy for each metric of two runs."""
    about = ". ".join(f"{i}: {r.run.name}. {_knowledge(r)}" for i, r in enumerate(named.values(), 1))
    for metric in MEASURED:
        spec = utility_figure(named, metric)
        if spec is not None and sum(bool(series.label) for series in spec.series) > 1:
            yield PaperFigure(spec.name, draw(spec), about)


def _knowledge(reading: Reading) -> str:
    """Return the knowledge of each attacker for a figure's metadata."""
    return ". ".join(f"{row['name']}: {row['knowledge']}" for row in reading.attacks if not is_baseline(row["name"]))
