"""`python -m fedgauge.simulations.benchmarks [NAME ...]`: measure speed, print the figures, and keep them in results/."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgauge.simulations.benchmarks.engine import engine
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, cells, record

BENCHMARKS: Mapping[str, Callable[[], BenchmarkReport]] = {"engine": engine}
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
        (results / f"{name}.json").write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
        print(
            f"{name} ({result['seconds']:.0f} s)",
            *("  ".join(filter(None, cells(f))) for f in result["figures"]),
            sep="\n",
        )
        missed |= any(figure["met"] is False for figure in result["figures"])
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
