"""`python -m fedgauge.simulations.benchmarks [NAME ...]`: measure speed, print the figures, and keep them in results/."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgauge.simulations.benchmarks.engine import engine
from fedgauge.simulations.benchmarks.intercept import intercept
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, cells, record

BENCHMARKS: Mapping[str, Callable[[], BenchmarkReport]] = {"engine": engine, "intercept": intercept}
RESULTS = Path(__file__).parent / "results"


def main(
    arguments: Sequence[str] | None = None,
    benchmarks: Mapping[str, Any] = BENCHMARKS,
    results: Path = RESULTS,
) -> int:
    """Run benchmarks by name; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m fedgauge.simulations.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(benchmarks)}; default: all")
    names = parser.parse_args(arguments).names or list(benchmarks)
    if unknown := [n for n in names if n not in benchmarks]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(benchmarks)}")
    missed = False
    for name in names:
        started = time.monotonic()
        result = record(name, benchmarks[name](), time.monotonic() - started)
        keep(result, results)
        print(
            f"{name} ({result['seconds']:.0f} s)",
            *("  ".join(filter(None, cells(f))) for f in result["figures"]),
            sep="\n",
        )
        missed |= any(figure["met"] is False for figure in result["figures"])
    return int(missed)


def keep(result: Mapping[str, Any], folder: Path) -> None:
    """Write results/<name>.json, and the README with all results."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['benchmark']}.json").write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    stored = [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"), key=lambda path: path.name)]
    (folder / "README.md").write_text(readme(stored))


def readme(results: Sequence[Mapping[str, Any]]) -> str:
    """Return all saved figures as Markdown tables."""
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


if __name__ == "__main__":
    sys.exit(main())
