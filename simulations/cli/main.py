"""The command line: `fedgauge COMMAND ...`."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from fedgauge.client import components, registry
from fedgauge.client.components import SpecError
from fedgauge.client.local_data import data_folder
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import RunBusy
from fedgauge.server.store.tape import TapeError
from fedgauge.simulations.cli import (
    deploy_commands,
    experiment_commands,
    housekeeping_commands,
    result_commands,
    run_commands,
    scenario_commands,
)
from fedgauge.simulations.cli.options import MISTAKE, Command, Commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a user's mistake is printed as one sentence, with status 2."""
    options = _parser().parse_args(arguments)
    command: Command = options.command
    try:
        data_folder()  # a FEDGAUGE_DATA that does not exist is refused before anything starts
        with _own_packages(options):
            return command(options)
    except (SpecError, LedgerError, TapeError, RunBusy) as error:
        print(f"fedgauge: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("fedgauge: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"fedgauge: {error}", file=sys.stderr)
        return MISTAKE


def _own_packages(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Allow the user's own packages, which lie in FEDGAUGE_ALLOW_PATH, beside the scenario, or in the current folder."""
    names = [*registry.allowed(), *options.allow, *getattr(options, "allow_too", [])]
    if not names:
        return nullcontext()
    beside = [Path(file).parent for key in ("scenario", "sweep") if (file := getattr(options, key, None))]
    beside += [options.folder] if "folder" in options else []  # a deployment's folder holds its scenario
    further = [Path(p) for p in os.environ.get(components.ALLOW_PATH, "").split(os.pathsep) if p]
    return components.allowing(names, [*further, *beside, Path.cwd()])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedgauge", description="Run a real federation whose server is curious, and see what it can reconstruct."
    )
    commands = Commands(parser)
    for group in (
        run_commands,
        result_commands,
        experiment_commands,
        deploy_commands,
        housekeeping_commands,
        scenario_commands,
    ):
        group.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
