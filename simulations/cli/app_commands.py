"""`fedgauge app`: audit an unchanged Flower app."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from fedgauge.client import components
from fedgauge.client.files import writing
from fedgauge.server.store.scenario import apply_setting, run_command
from fedgauge.simulations.cli.options import Commands, add_gate, add_log, flag, path, positive, result_file, several
from fedgauge.simulations.run.exit_status import INAPPLICABLE


def add_to(commands: Commands) -> None:
    command = commands.add(app, with_run=False)
    path(command, "folder", "DIR", "the app's folder, with its pyproject.toml")
    command.add_argument("--rounds", type=positive, default=2, metavar="N", help="training rounds (default: 2)")
    command.add_argument("--clients", type=positive, default=2, metavar="N", help="clients to attack (default: 2)")
    several(command, "--set", "KEY=VALUE", "set one value of the app's config, e.g. learning-rate=0.01 (repeatable)")
    path(command, "--draft", "FILE", "write the drafted scenario here as well", type=result_file)
    flag(command, "--no-truth", "grade nothing, and write no ground truth")
    add_log(command)
    add_gate(command)


def app(options: argparse.Namespace) -> int:
    from fedgauge.attacks.modality.registry import MODALITIES
    from fedgauge.server.views.gate import check_thresholds
    from fedgauge.simulations.cli.main import main
    from fedgauge.simulations.cli.result_commands import chosen_thresholds, conclude_gate
    from fedgauge.simulations.rehearsal.flower_app import importing
    from fedgauge.simulations.rehearsal.rehearse import observe, rehearse

    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    settings = {"rounds": options.rounds}
    thresholds = chosen_thresholds(options)
    check_thresholds(thresholds, *MODALITIES.values())  # which it is of is known only after the training
    for setting in options.set:
        apply_setting(settings, setting)
    folder, draft = options.folder.resolve(), options.draft and options.draft.resolve()
    run, observed = observe(folder, options.runs.resolve(), settings, options.clients, console)
    with _copied(folder) as copy:
        with console.status("updates are computed again from the observed examples"):
            found = rehearse(run, observed, copy, options.clients, truth=not options.no_truth)
        for failure in observed.failed[:3]:
            console.print(f"a client failed: {failure}")
        for problem in found.draft.problems:
            console.print(f"{problem.code}: {problem}")
        if draft and found.draft.lines:
            with writing(draft) as file:
                file.write(found.draft.text().encode())
        if found.draft.fatal:
            console.print(f"the app was trained and recorded in {run.folder}; no attack fits it yet")
            return INAPPLICABLE
        console.print(found.proof)
        given = [str(run.folder), "--log", options.log, *([] if options.no_truth else ["--truth", str(found.truth)])]
        with components.allowing(found.packages, importing(copy)):
            status = main(["audit", *given])
    console.print(
        "the server of this app receives such updates too, and can attack them; only grades need the examples"
    )
    again = run_command("audit --retry all", run.folder, {}, found.packages)
    console.print(f"attack it otherwise: edit {run.folder / 'scenario.toml'}, then in {folder}: {again}")
    gated = conclude_gate(options, run, thresholds) if thresholds else 0
    return gated or status


@contextmanager
def _copied(folder: Path) -> Iterator[Path]:
    """Work in a copy of an app's folder, where its code is imported: it may write there, and read a command line without ours."""
    from fedgauge.simulations.rehearsal.flower_app import mirror

    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        with TemporaryDirectory() as copy, chdir(copy), components.allowing(()):
            mirror(folder, Path(copy))
            sys.path[:] = [place for place in sys.path if Path(place).resolve() != folder]
            yield Path(copy)
    finally:
        sys.argv = arguments
