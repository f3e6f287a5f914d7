"""The command line: `fedgauge COMMAND ...`."""

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from fedgauge.simulations.cli.options import Command, Commands, refuse, tell

REPRODUCTION = "reproduction.commands"  # in a clone only: an audit does not need it, so no wheel has it
ONLY_IN_A_CLONE = (
    "reproduce and compare need a clone of the repository: run `make install` there, and its .venv/bin/fedgauge"
)
# Each module with its commands, as help lists them. Only the module of the command that is run is imported: torch and
# Flower take seconds, which help, --version and a misspelt command need not wait for.
GROUPS: dict[str, dict[str, str]] = {
    "cli.app_commands": {"app": "run a Flower app unchanged, observe its training, and attack what its server sees."},
    "cli.run_commands": {
        "run": "train a federation and attack it, or continue a run that was interrupted.",
        "audit": "attack the recorded updates, by the run's plan or another attack; continues where it stopped.",
    },
    "cli.result_commands": {
        "watch": "show running and finished runs in the browser; Ctrl-C ends it.",
        "report": "write the HTML report of each run, optionally with figures, and compare several.",
        "gate": "compare a run's metrics with thresholds; the exit status says whether all are kept.",
        "export": "write every score as CSV.",
    },
    REPRODUCTION: {
        "reproduce": "repeat a paper's attacks, and print its figures next to ours (needs a clone).",
        "compare": "show the figures of several files of the same table in columns (needs a clone).",
    },
    "cli.deploy_commands": {
        "deploy": "write the folder of a federation in containers, each client its own with a key."
    },
    "cli.housekeeping_commands": {
        "runs": "list the runs under runs/, newest first.",
        "stop": "end a run's training and finish the running attacks; `fedgauge audit` can continue it.",
        "prune": "delete updates, reconstructions and reports older than --days or retention_days; keep scores.",
    },
    "cli.scenario_commands": {
        "init": "write a commented scenario to start from.",
        "list": "list every component by kind, with those of installed plug-ins.",
        "schema": "print the JSON schema of a scenario, for completion and checks in an editor.",
        "preflight": "estimate in seconds, before any training, what would leak and what to change.",
        "doctor": "check this machine, a scenario or a client's file, and report what is missing or wrong.",
        "sweep": "train and attack a grid of defenses, attacks and seeds in memory; continues where it stopped.",
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a user's mistake is printed as one sentence, with status 2."""
    try:
        return _carried_out(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:  # also while libraries are imported, which takes seconds
        tell("stopped")
        return 130


def _carried_out(given: Sequence[str]) -> int:
    if not given:
        _parser().print_help()
        return 0
    if given[0] in GROUPS[REPRODUCTION] and find_spec("fedgauge.simulations.reproduction") is None:
        tell(ONLY_IN_A_CLONE)
        return 2
    options = _parser(given[0]).parse_args(given)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name from elsewhere may be no text
    from fedgauge.client.components import SpecError, users_errors
    from fedgauge.client.data_folder import data_folder
    from fedgauge.server.store.ledger_file import LedgerError
    from fedgauge.server.store.run import RunBusy
    from fedgauge.server.store.tape import TapeError
    from fedgauge.simulations.run.exit_status import FAILED, MISTAKE
    from fedgauge.simulations.run.launch import TrainingFailed

    command: Command = options.command
    try:
        data_folder()  # a FEDGAUGE_DATA that does not exist is refused before anything starts
        with _own_packages(options), users_errors():
            return command(options)
    except (SpecError, LedgerError, TapeError, RunBusy) as error:
        tell(error)
        return MISTAKE
    except TrainingFailed as error:
        tell(error)
        return FAILED
    except (BrokenPipeError, SystemExit) as error:  # the reader of our output (head, less) has closed it: rich exits
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        of_a_file = error.filename is not None and error.strerror is not None
        tell(f"{error.filename}: {error.strerror}: name another place, or change what is there" if of_a_file else error)
        return MISTAKE if of_a_file and error.errno != errno.ENOSPC else FAILED


def _own_packages(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Allow the user's packages, found in FEDGAUGE_ALLOW_PATH, the scenario's folder or the current folder."""
    from fedgauge.client import components, entry_points

    names = [*entry_points.allowed(), *options.allow, *getattr(options, "allow_too", [])]
    if not names:
        return nullcontext()
    beside = [Path(file).parent for key in ("scenario", "sweep") if (file := getattr(options, key, None))]
    beside += [options.folder] if "folder" in options else []  # a deployment's folder holds its scenario
    further = [Path(p) for p in os.environ.get(components.ALLOW_PATH, "").split(os.pathsep) if p]
    folders = [*further, *beside, Path.cwd()]
    asked = [name for name in options.allow if name.isidentifier() and name not in sys.modules]
    lost = [name for name in asked if not (find_spec(name) or PathFinder.find_spec(name, [*map(str, folders)]))]
    places = ", ".join(map(str, folders))
    refuse({f"--allow {', '.join(lost)}: no such package, neither on Python's path nor in {places}": lost})
    return components.allowing(names, folders)


def _parser(command: str = "") -> argparse.ArgumentParser:
    """A parser that knows the options of one command, and the names of all."""
    about = "Run a real federation with a curious server, and see what the server can reconstruct."
    parser = argparse.ArgumentParser(prog="fedgauge", description=about)
    parser.add_argument("--version", action="version", version=f"fedgauge {metadata.version('fedgauge')}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for module, summaries in GROUPS.items():
        if command in summaries:
            import_module(f"fedgauge.simulations.{module}").add_to(Commands(subparsers, summaries))
        else:
            for name, summary in summaries.items():
                subparsers.add_parser(name, help=summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
