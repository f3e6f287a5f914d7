"""The tables of docs/defenses.md: the kept sweeps of defenses."""

import json
from pathlib import Path

from fedgauge.simulations.experiments.sweep_file import Sweep
from fedgauge.simulations.experiments.sweep_rows import SweepRow, markdown, summary

SIMULATIONS = Path(__file__).parents[2] / "simulations"


def block(name: str) -> str:
    """Return the kept rows of a sweep with a line for each defense."""
    rows = json.loads((SIMULATIONS / "results" / name / "sweep.json").read_text())
    promises = {cell.defense: cell.promise for cell in Sweep.load(SIMULATIONS / f"{name}.toml").cells}
    return markdown(summary([SweepRow(**row) for row in rows], promises))
