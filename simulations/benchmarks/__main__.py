"""`python -m fedgauge.simulations.benchmarks [NAME ...]`: measure, print, and save the figures in a checkout's results/."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedgauge.simulations.benchmarks.engine import engine
from fedgauge.simulations.benchmarks.intercept import intercept
from fedgauge.simulations.benchmarks.label_restoration import labels
from fedgauge.simulations.benchmarks.label_rule import label_rule
from fedgauge.simulations.benchmarks.learned_inversion import learning
from fedgauge.simulations.benchmarks.local_training import modes, proximal, training
from fedgauge.simulations.benchmarks.many_clients import load
from fedgauge.simulations.benchmarks.membership import membership
from fedgauge.simulations.benchmarks.memory_growth import memory, memory_of_flower
from fedgauge.simulations.benchmarks.page_speed import page
from fedgauge.simulations.benchmarks.quality import quality
from fedgauge.simulations.benchmarks.random_kills import kills
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Progress, cells, record
from fedgauge.simulations.benchmarks.success import success
from fedgauge.simulations.benchmarks.text_matching_cost import text
from fedgauge.simulations.experiments.reproduce_output import ProgressReporter

Benchmark = Callable[[Progress], BenchmarkReport]
FLOWER = "memory-flower"
KILLS = "kills"
ON_REQUEST = (FLOWER, KILLS, "membership")  # they take many minutes, or many processes
BENCHMARKS: Mapping[str, Benchmark] = {
    "engine": engine,
    "quality": quality,
    "labels": labels,
    "label-rule": label_rule,
    "learning": learning,
    "training": training,
    "proximal": proximal,
    "modes": modes,
    "text": text,
    "membership": membership,
    "success": success,
    "intercept": intercept,
    "memory": memory,
    "load": load,
    "page": page,
    FLOWER: memory_of_flower,
    KILLS: kills,
}
IN_CHECKOUT = (Path(__file__).parents[2] / "pyproject.toml").exists()
# an installed package is no place for results
RESULTS = Path(__file__).parent / "results" if IN_CHECKOUT else Path("benchmark-results")
PLAIN_EVERY = 10.0  # seconds between plain lines of progress


def counted(report: ProgressReporter) -> Progress:
    """Reports steps done and the time left, in plain lines now and then."""
    started = reported = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if report.console.is_terminal or now - reported >= PLAIN_EVERY:
            reported = now
            report(f"{done} of {total} steps, about {(now - started) * (total - done) / done:.0f} s left")

    return progress


def main(
    arguments: Sequence[str] | None = None, benchmarks: Mapping[str, Benchmark] = BENCHMARKS, results: Path = RESULTS
) -> int:
    """Run benchmarks by name; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m fedgauge.simulations.benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(benchmarks)}; default: all but {', '.join(ON_REQUEST)}"
    )
    parser.add_argument("--json", action="store_true", help="one object per line instead of tables")
    options = parser.parse_args(arguments)
    names = options.names or [n for n in benchmarks if n not in ON_REQUEST]
    if unknown := [n for n in names if n not in benchmarks]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(benchmarks)}")
    missed = False
    for name in names:
        with ProgressReporter(name, Console(stderr=True)) as report:
            report("starting")
            started = time.monotonic()
            result = record(name, benchmarks[name](counted(report)), time.monotonic() - started)
        keep(result, results)
        show(result, as_json=options.json)
        missed |= any(figure["met"] is False for figure in result["figures"])
    return int(missed)


def keep(result: Mapping[str, Any], folder: Path) -> None:
    """Write results/<name>.json, and the README with all results."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['benchmark']}.json").write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    stored = [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"), key=lambda path: path.name)]
    (folder / "README.md").write_text(readme(stored))


def readme(results: Sequence[Mapping[str, Any]]) -> str:
    """All saved figures as Markdown tables."""
    lines = [
        "# Benchmark results",
        "",
        "Written by `python -m fedgauge.simulations.benchmarks` (`make bench`); versions and settings in full in the JSON files.",
    ]
    for result in results:
        machine, packages = result["environment"], result["environment"]["packages"]
        versions = ", ".join(f"{p} {packages[p]}" for p in ("torch", "flwr") if p in packages)
        lines += ["", f"## {result['benchmark']}", ""]
        lines += [f"{result['date']}, {machine['cores']} x {machine['processor']}, {versions}.", ""]
        lines += [f"- {key}: {value}" for key, value in result["settings"].items()]
        lines += ["", "| figure | value | unit | target | met | note |", "|---|---:|---|---|---|---|"]
        lines += ["| " + " | ".join(cells(figure)) + " |" for figure in result["figures"]]
    return "\n".join(lines) + "\n"


def show(result: Mapping[str, Any], as_json: bool) -> None:
    """Print a result: a table in a terminal, else plain lines, or JSON on one line."""
    if as_json:
        print(*(json.dumps(line) for line in result["rows"] or [result]), sep="\n", flush=True)
        return
    console = Console()
    title = f"{result['benchmark']} ({result['seconds']:.0f} s)"
    if not console.is_terminal:
        print(title, *("  ".join(filter(None, cells(f))) for f in result["figures"]), sep="\n", flush=True)
        return
    table = Table("figure", "value", "unit", "target", "met", "note", title=title)
    for figure in result["figures"]:
        table.add_row(*cells(figure))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
