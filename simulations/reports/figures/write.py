"""Figures for papers: each plot of a run as PNG and SVG, one column wide, the same bytes for the same ledger."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import write_bytes
from fedgauge.server.views.compare import distinct
from fedgauge.simulations.reports.figures.canaries import canaries_figure
from fedgauge.simulations.reports.figures.clients import clients_figure, worst_case_by_client
from fedgauge.simulations.reports.figures.data import RunResults
from fedgauge.simulations.reports.figures.gallery import gallery_figure
from fedgauge.simulations.reports.figures.leakage import leakage_figure
from fedgauge.simulations.reports.figures.style import PaperFigure, own_style
from fedgauge.simulations.reports.figures.success import success_figure
from fedgauge.simulations.reports.figures.tradeoff import tradeoff_figures

KINDS: tuple[Literal["png", "svg"], ...] = ("png", "svg")


def write_figures(runs: Sequence[Run], folder: Path) -> tuple[list[Path], list[str]]:
    """Write every figure of the runs and of their comparison, each file atomically and readable for its owner only.

    Returns the paths, and sentences on what could not be drawn. One run's files go into the folder itself, those of several
    runs into a folder each.
    """
    all_results = [RunResults.read(run) for run in {run.folder.absolute(): run for run in runs}.values()]
    run_folders = (
        [folder] if len(all_results) == 1 else [folder / name for name in distinct(s.run.name for s in all_results)]
    )
    paths, missing = [], []
    with own_style():
        for results, run_folder in zip(all_results, run_folders, strict=True):
            if not len(results.scores):
                missing.append(f"{results.run.name}: no attack has a score yet, so there is nothing to draw")
            for figure in run_figures(results):
                paths += _save(figure, run_folder)
        if len(all_results) > 1:
            comparison = tradeoff_figures(all_results)
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


def run_figures(results: RunResults) -> Iterator[PaperFigure]:
    about = f"{results.run.name}. {results.knowledge}"
    for metric, leaks in results.leaks.items():
        if any(leak.round is not None and leak.mean is not None for leak in leaks):
            yield PaperFigure(f"leakage-{metric}", leakage_figure(results, metric, leaks), about)
    if results.curve:
        yield PaperFigure("success", success_figure(results), about)
    worst, measure = worst_case_by_client(results.scores), results.scores.measure
    if worst:
        yield PaperFigure("clients", clients_figure(worst, measure), about)
    if results.canaries["rows"]:
        yield PaperFigure("canaries", canaries_figure(results.canaries), about)
    if results.cards:
        yield PaperFigure("gallery", gallery_figure(results), about)
