"""`python -m fedgauge.simulations.benchmarks`: measure the engine's speed, print the figures, and keep them in results/."""

import sys
import time
from pathlib import Path

from fedgauge.simulations.benchmarks.engine import SETTINGS, engine
from fedgauge.simulations.benchmarks.reporting import keep

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    started, figures = time.monotonic(), list(engine())
    print(*figures, sep="\n")
    sys.exit(keep(RESULTS / "engine.json", "engine", started, figures, SETTINGS))
