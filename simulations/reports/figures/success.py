"""The fraction of examples that is reconstructed to each PSNR or better."""

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.success import THRESHOLDS
from fedgauge.simulations.reports.figures.data import RunResults
from fedgauge.simulations.reports.figures.style import (
    FRACTION_LIMITS,
    LONG_DASH,
    PURPLE,
    add_legend,
    display_name,
    new_axes,
    percent_axis,
)


def success_figure(results: RunResults) -> Figure:
    figure, axes = new_axes()
    handles: list[Artist] = []
    for attack, rates in results.curve.items():
        style = results.line_styles[attack]
        part = [rate.fraction or 0.0 for rate in rates]
        if is_attack(attack):
            low, high = zip(*(rate.interval for rate in rates), strict=True)
            axes.fill_between(THRESHOLDS, low, high, color=style.color, alpha=0.15, linewidth=0)
        handles += axes.plot(
            THRESHOLDS, part, **style.line, marker=style.marker if is_attack(attack) else "",
            markevery=10, label=display_name(attack),
        )  # fmt: skip
    if results.certified:
        handles += axes.plot(
            THRESHOLDS, results.certified, color=PURPLE, ls=LONG_DASH, label="certified (ReRo), one round"
        )
    axes.set(xlim=(THRESHOLDS[0], THRESHOLDS[-1]), xlabel="PSNR of at least (dB)")
    axes.set(ylabel="part of the examples", ylim=FRACTION_LIMITS)
    percent_axis(axes.yaxis)
    add_legend(figure, handles)
    return figure
