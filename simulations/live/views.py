"""Which view of a run at work its user gets."""

from rich.console import Console

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.live.json_log import Events
from fedgauge.simulations.live.progress import RunProgress
from fedgauge.simulations.live.terminal import LiveDisplay
from fedgauge.simulations.live.view import Lines, Log, View


def view_of(
    run: Run, ledger: Ledger, scenario: Scenario, console: Console, log: Log = "auto", training: bool = True
) -> View:
    """The view that was asked for; auto: a live picture in a terminal that can show one, plain lines elsewhere."""

    standing = RunProgress(ledger, scenario, training)
    if log == "json":
        return Events(standing, run)
    if log == "quiet":
        return View(standing)
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(standing, run, console) if live else Lines(standing)
