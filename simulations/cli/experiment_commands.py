"""`fedgauge sweep`: a grid of defenses, attacks and seeds in a TOML file."""

import argparse

from fedgauge.simulations.cli.options import Commands, add_jobs, path


def add_to(commands: Commands) -> None:
    grid = commands.add(sweep, with_run=False)
    path(grid, "sweep", "SWEEP.toml")
    path(grid, "--output -o", "FOLDER", "default: the file's name under runs/")
    add_jobs(grid, 2)


def sweep(options: argparse.Namespace) -> int:
    from fedgauge.simulations.experiments.sweep import sweep_of_file

    return sweep_of_file(options.sweep, options.output or options.runs / options.sweep.stem, options.jobs)
