"""Registration of commands on the command line, and options that several commands share."""

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUNS = Path("runs")
NO_RUNS = "start one with: fedgauge init, then fedgauge run scenario.toml"
Command = Callable[[argparse.Namespace], int]


def tell(text: object) -> None:
    from fedgauge.server.store.run_files import printable  # not for help, which waits for nothing

    print(printable(f"fedgauge: {text}"), file=sys.stderr)


@dataclass(frozen=True)
class Commands:
    """The command line, to which one module's commands are added, with their summaries."""

    subparsers: Any
    summaries: Mapping[str, str]

    def add(self, command: Command, with_run: bool = True, name: str = "") -> argparse.ArgumentParser:
        """Register a command.

        Args:
            with_run: its first argument is a run.
            name: default: the function's.
        """
        called = name or command.__name__.replace("_", "-")
        summary = self.summaries[called]
        added: argparse.ArgumentParser = self.subparsers.add_parser(called, help=summary, description=summary)
        added.set_defaults(command=command)
        path(added, "--runs", "FOLDER", "where runs are kept (default: runs)", default=RUNS)
        several(added, "--allow", "PACKAGE", "allow components of this package of yours; its code is run (repeatable)")
        if with_run:
            path(added, "run", "RUN", "a run's folder, or its name under runs/")
        return added


def refuse(mistakes: Mapping[str, object]) -> None:
    """Raise SpecError with the first sentence that holds."""
    from fedgauge.client.components import SpecError  # not for help

    for words, holds in mistakes.items():
        if holds:
            raise SpecError(words)


def path(command: argparse.ArgumentParser, name: str, value: str, text: str | None = None, **more: Any) -> None:
    command.add_argument(*name.split(), **{"type": Path, "metavar": value, "help": text, **more})


def several(command: argparse.ArgumentParser, name: str, value: str, text: str, **more: Any) -> None:
    command.add_argument(name, action="append", default=[], metavar=value, help=text, **more)


def flag(command: argparse.ArgumentParser, name: str, text: str, **more: Any) -> None:
    command.add_argument(name, action="store_true", help=text, **more)


def add_log(command: argparse.ArgumentParser) -> None:
    text = "auto: a live line in a terminal, else lines; quiet: errors, the report and the run's folder"
    command.add_argument("--log", choices=("auto", "quiet"), default="auto", help=text)


def add_settings(command: argparse.ArgumentParser) -> None:
    several(command, "--set", "KEY=VALUE", "set one value, e.g. chain.0.max_norm=2 of the first link (repeatable)")


def add_jobs(command: argparse.ArgumentParser, default: int) -> None:
    text = f"cells at a time, one core each (default: {default})"
    command.add_argument("--jobs", "--parallel", type=positive, metavar="N", default=default, help=text)


def add_gate(command: argparse.ArgumentParser) -> None:
    """Give a command thresholds that decide its exit status, and the files that say what came of them."""
    for way in ("above", "below"):
        text = f"end with status 1 if a metric is {way} this value, 3 if not measured, 4 if a part was not attacked (repeatable)"
        several(command, f"--fail-{way}", "METRIC=VALUE", text, type=metric_value)
    path(command, "--junit", "FILE", "write the gate's results as JUnit XML", type=result_file)


def result_file(text: str) -> Path:
    """Parse the path of a file to be written, which is refused before work that would be lost."""
    file = Path(text)
    if file.is_dir() or not next(place for place in file.absolute().parents if place.exists()).is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file in a folder")
    return file


def metric_value(text: str) -> tuple[str, float]:
    """Parse a metric and a finite number: psnr=20."""
    name, _, value = text.partition("=")
    if not value:
        raise argparse.ArgumentTypeError(f"expected METRIC=VALUE, such as psnr=20, got {text!r}")
    return name, between(float, -math.inf)(value)


def between(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return a parser of numbers of this kind from `least` to `most`, without infinity."""

    expected = "a whole number" if kind is int else "a finite number"
    expected += f", at least {least}" if least > -math.inf else ""
    expected += f", at most {most}" if most < math.inf else ""

    def parsed(text: str) -> float:
        try:
            if least <= kind(text) <= most and not math.isinf(float(text)):
                return kind(text)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parsed


days, positive = between(float, 0), between(int, 1)
port = between(int, 0, 65535)  # 0: the system chooses a free one


def numbers(text: str) -> list[int]:
    return [int(between(int, 0)(part)) for part in text.split(",")]
