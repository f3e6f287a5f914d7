"""Chooses the view of a run at work."""

from rich.console import Console

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.live.json_log import Events
from fedgauge.simulations.live.log import Log
from fedgauge.simulations.live.progress import RunProgress
from fedgauge.simulations.live.terminal import LiveDisplay
from fedgauge.simulations.live.view import Lines, View


def view_of(
    run: Run, ledger: Ledger, scenario: Scenario, console: Console, log: Log = "auto", training: bool = True
) -> View:
    """The view that was asked for; auto: the live display in a terminal that can show it, plain lines elsewhere."""
    run_progress = RunProgress(ledger, scenario, training)
    if log == "json":
        return Events(run_progress, run)
    if log == "quiet":
        return View(run_progress)
    live = console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only
    return LiveDisplay(run_progress, console) if live else Lines(run_progress)
