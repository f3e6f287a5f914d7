"""Live display of a run in a terminal: bars of rounds and attacks, and results of each attack."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.run_files import printable
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.formatting import in_unit, is_exact
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.strength import best_of
from fedgauge.simulations.live.json_log import Events
from fedgauge.simulations.live.log import Log
from fedgauge.simulations.live.progress import RunProgress
from fedgauge.simulations.live.view import Lines, View, progress_line


class LiveDisplay(View):
    """Live display with a constant number of lines."""

    def __init__(self, run_progress: RunProgress, console: Console) -> None:
        super().__init__(run_progress)
        columns = TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bars = Progress(*columns, console=console)
        last = run_progress.scenario.protocol.rounds
        self._rounds = self._bars.add_task("rounds", total=last, visible=run_progress.training)
        self._jobs = self._bars.add_task("attacks")
        self._live = Live(self, console=console, auto_refresh=False, transient=True)

    @contextmanager
    def shown(self) -> Iterator[View]:
        self.run_progress.refresh(force=True)
        with self._live:
            yield self

    def update(self) -> None:
        self.run_progress.refresh()
        self._live.refresh()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def __rich__(self) -> Group:
        s, jobs = self.run_progress, self.run_progress.jobs
        self._bars.update(self._rounds, completed=s.round)
        self._bars.update(self._jobs, completed=jobs.expected - jobs.left, total=jobs.expected)
        verdict, words = s.replay
        check = _line(f"replay check: {words}", "yellow" if verdict == "mismatch" else "dim")
        return Group(self._bars, Text(printable(progress_line(s))), check, _line(self.note, "dim"), *self._leakage())

    def _leakage(self) -> Iterator[Text]:
        """Yield a line for the best baseline and one for each attack."""
        s = self.run_progress
        last = max((leak.round or 0 for leak in s.leaks), default=0)
        floor = best_of((leak for leak in s.leaks if leak.round == last), "baseline")
        yield _line(f"best baseline: {f'{in_unit(floor.mean, s.measure)} now' if floor else ''}", "dim")
        for name in filter(is_attack, s.reconstructing):
            own = [leak for leak in s.leaks if leak.attack == name and leak.mean is not None]
            text = f"{name}: {in_unit(own[-1].mean, s.measure)} now" if own else f"{name}:"
            worst = s.measure.leakiest((leak.best for leak in own if leak.best is not None), float)
            if worst is not None:
                text += f", worst case {'exact' if is_exact(worst) else in_unit(worst, s.measure)}"
            yield _line(text, "yellow")


def _line(text: str, style: str = "") -> Text:
    """Make one line of text without markup and control codes."""
    return Text(printable(text).replace("\n", " "), style, no_wrap=True, overflow="ellipsis")


def view_of(
    run: Run, ledger: Ledger, scenario: Scenario, console: Console, log: Log = "auto", training: bool = True
) -> View:
    """Make a view; auto: the live display in a capable terminal, otherwise plain lines."""
    run_progress = RunProgress(ledger, scenario, training)
    if log == "json":
        return Events(run_progress, run)
    if log == "quiet":
        return View(run_progress)
    live = console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only
    return LiveDisplay(run_progress, console) if live else Lines(run_progress)
