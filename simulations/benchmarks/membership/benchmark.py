"""The membership benchmark: single updates, rounds accumulated, FedMIA's question and comparison, and cost, as one report."""

from collections.abc import Callable, Mapping

from fedgauge.simulations.benchmarks.membership.cost import cost
from fedgauge.simulations.benchmarks.membership.fedmia_baselines import fedmia_baselines
from fedgauge.simulations.benchmarks.membership.fedmia_table import fedmia_table
from fedgauge.simulations.benchmarks.membership.over_rounds import over_rounds
from fedgauge.simulations.benchmarks.membership.single_updates import single_updates
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Progress

TABLES: Mapping[str, Callable[[Progress], BenchmarkReport]] = {
    "single updates": single_updates,
    "over rounds": over_rounds,
    "FedMIA": fedmia_table,
    "FedMIA's comparison": fedmia_baselines,
    "cost": cost,
}


def membership(progress: Progress) -> BenchmarkReport:
    """All tables, one after the other; a row and a setting say which table they belong to."""
    found: dict[str, BenchmarkReport] = {}
    for name, table in TABLES.items():
        first = len(found)

        def part(done: int, total: int, first: int = first) -> None:
            progress(first * total + done, len(TABLES) * total)

        found[name] = table(part)
    return joined(found)


def joined(tables: Mapping[str, BenchmarkReport]) -> BenchmarkReport:
    """Several tables as one report."""
    return BenchmarkReport(
        tuple(figure for report in tables.values() for figure in report.figures),
        {f"{name}: {key}": value for name, report in tables.items() for key, value in report.settings.items()},
        tuple({"table": name, **row} for name, report in tables.items() for row in report.rows),
    )
