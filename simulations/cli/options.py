"""How a command registers itself on the command line, and the options that several commands share."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from fedgauge.simulations.live.log import Log, with_errors

RUNS = Path("runs")
NO_RUNS = "start one with: fedgauge init, then fedgauge run scenario.toml"
Command = Callable[[argparse.Namespace], int]


class Commands:
    """The commands of the command line, in the order in which help lists them."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def mention(self, name: str, summary: str) -> None:
        """List a command in the help without its options."""
        self.commands.add_parser(name, help=summary)

    def add(self, command: Command, with_run: bool = True, name: str = "") -> argparse.ArgumentParser:
        """Register a command; its help is what its docstring says after the colon.

        Args:
            with_run: whether its first argument is a run.
            name: default: the function's.
        """
        summary = (command.__doc__ or "").split(": ", 1)[1]
        called = name or command.__name__.replace("_", "-")
        added = self.commands.add_parser(called, help=summary, description=summary)
        added.set_defaults(command=command)
        added.add_argument(
            "--runs", type=Path, default=RUNS, metavar="FOLDER", help="where runs are kept (default: runs)"
        )
        text = "allow components from this package of your own; its code is run (repeatable)"
        added.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help=text)
        if with_run:
            added.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or its name under runs/")
        return added


def add_log(command: argparse.ArgumentParser) -> None:
    """Give a command --log."""
    text = "auto: a live display in a terminal, else lines; quiet: errors and results only; json: one event per line"
    command.add_argument("--log", choices=get_args(Log), default="auto", help=text)
    command.set_defaults(command=with_errors(command.get_default("command")))


def add_settings(command: argparse.ArgumentParser) -> None:
    """Give a command --set."""
    text = "set one value, e.g. chain.0.max_norm=2 (repeatable)"
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def add_gate(command: argparse.ArgumentParser) -> None:
    """Give a command thresholds that decide its exit status, and the files that say what came of them."""
    for way in ("above", "below"):
        text = (
            f"end with status 1 if a metric lies {way} this value, with 3 if it was not measured, with 4 if part of the plan "
            "was never attacked (repeatable)"
        )
        command.add_argument(
            f"--fail-{way}", action="append", default=[], type=metric_value, metavar="METRIC=VALUE", help=text
        )
    command.add_argument("--junit", type=Path, metavar="FILE", help="write the gate's results as JUnit XML")


# -------------------------------------------------------------------------------------------------- values of options


def metric_value(text: str) -> tuple[str, float]:
    """A metric and a finite number: psnr=20."""
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a metric and a number, psnr=20, got {text!r}")
    return name, number


def port(text: str) -> int:
    """A TCP port; 0 asks the system for a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 65535, got {text!r}")
    return int(text)


def days(text: str) -> float:
    """A number of days, 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of days, got {text!r}")
    return number


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas between, 1,2,3, got {text!r}") from None


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)
