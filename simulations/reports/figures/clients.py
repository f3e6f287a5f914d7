"""A heat map of the worst leak of each client in each round."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from numpy.typing import NDArray

from fedgauge.attacks.modality.base import MainMetric
from fedgauge.server.views.clients import heat_map
from fedgauge.server.views.scores import Scores, capped
from fedgauge.simulations.reports.figures.style import INK, MUTED, new_axes

RASTER_FROM = 2000  # table entries from which the heat map is a bitmap even in SVG


def worst_case_by_client(scores: Scores) -> dict[tuple[int, int], float]:
    """For each attacked (client, round), the value of any attack that leaks most, capped; NaN if none has one."""
    rows, sign = scores.of_metric(scores.measure.metric), scores.measure.sign
    rows = rows.where(rows.by_attacks)
    worst: dict[tuple[int, int], float] = {}
    values = capped(scores.measure.metric, rows.value)
    for client, round, value in zip(rows.client.tolist(), rows.round.tolist(), values.tolist(), strict=True):
        worst[client, round] = sign * float(np.fmax(sign * worst.get((client, round), np.nan), sign * value))
    return worst


def clients_figure(worst: Mapping[tuple[int, int], float], measure: MainMetric) -> Figure:
    """The brightest leaks most, whichever way the metric leaks; of very many clients those that leak most are shown."""
    most: dict[int, float] = {}
    for (client, _), value in worst.items():
        most[client] = float(np.fmax(most.get(client, -np.inf), measure.sign * value))
    clients, rounds = heat_map(sorted(most, key=lambda c: (-most[c], c)), sorted({round for _, round in worst}))
    table = np.array([[worst.get((client, round), np.nan) for round in rounds] for client in clients])
    figure, axes = new_axes(height=min(6.0, max(1.75, 0.8 + 0.17 * len(clients))))
    axes.grid(False)
    axes.set_facecolor("white")
    axes.patch.set(hatch="////", edgecolor=MUTED)  # where nothing was graded
    values_shown = np.ma.masked_invalid(table)
    colours = "cividis" if measure.higher_is_better else "cividis_r"
    mesh = axes.pcolormesh(values_shown, cmap=colours, rasterized=table.size > RASTER_FROM, edgecolors="none")
    if len(rounds) <= 10 and len(clients) <= 30:
        _write_values(axes, table, mesh)
    figure.colorbar(mesh, ax=axes, label=f"worst {measure.label}", pad=0.02)
    axes.invert_yaxis()
    _number_axis(axes.xaxis, rounds, 10)
    _number_axis(axes.yaxis, clients, 16)
    axes.set(xlabel="attacked round", ylabel="client")
    return figure


def _write_values(axes: Axes, table: NDArray[np.float64], mesh: Any) -> None:
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            red, green, blue, _ = mesh.to_rgba(value)
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            axes.text(
                column + 0.5, row + 0.5, f"{value:.0f}", ha="center", va="center", size=7,
                color="white" if dark else INK,
            )  # fmt: skip


def _number_axis(axis: Axis, names: Sequence[int], most: int) -> None:
    """Label evenly spaced rows or columns with their numbers, at their middle."""
    places = np.unique(np.linspace(0, len(names) - 1, min(most, len(names))).round().astype(int))
    axis.set_major_locator(FixedLocator((places + 0.5).tolist()))
    axis.set_ticklabels([str(names[i]) for i in places])
    axis.set_tick_params(length=0)
