"""`python -m tests.theory NAME -o FILE.json`: compute a world's figures again, as docs/papers show them (minutes)."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fedgauge.simulations.experiments.results import ResultsFile
from fedgauge.simulations.reproduction.figures import head_of
from fedgauge.simulations.reproduction.measures import ComparedFigure
from fedgauge.simulations.reproduction.paper_tables import PaperTable
from tests.theory.canary_world import canary_world
from tests.theory.gaussian_world import bayes_fig4, gaussian_world
from tests.theory.one_run_world import one_run_world
from tests.theory.text_world import text_world

World = Callable[[int, int, int], list[ComparedFigure]]
WORLDS: Mapping[str, tuple[World, int, int, str]] = {
    "gaussian_world": (gaussian_world, 512, 400, "iterations at most"),
    "bayes_fig4": (bayes_fig4, 256, 200, "iterations at most"),
    "canary": (canary_world, 100, 128, "canaries"),
    "one_run": (one_run_world, 1000, 2000, "canaries"),
    "text_loops": (text_world, 8, 100, "iterations"),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.theory", description=__doc__)
    parser.add_argument("name", choices=WORLDS)
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", required=True)
    options = parser.parse_args()
    world, n, iterations, unit = WORLDS[options.name]
    table = PaperTable(options.name, f"{options.name}, a world of tests/theory", "", 0)
    file = ResultsFile(options.output, ComparedFigure, head_of(table))
    file.write([replace(row, budget=f"n {n}, {unit} {iterations}") for row in world(n, 0, iterations)])
