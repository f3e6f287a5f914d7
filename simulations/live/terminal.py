"""The live display of a run in a terminal: rich's bars of rounds and attacks, and what came of each attack."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isinf

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fedgauge.server.store.run_files import printable
from fedgauge.server.views.formatting import in_unit
from fedgauge.server.views.roles import is_attack
from fedgauge.simulations.live.progress import RunProgress
from fedgauge.simulations.live.view import View, progress_line


class LiveDisplay(View):
    """The live display; its number of lines depends only on the number of attacks, so that nothing jumps."""

    def __init__(self, run_progress: RunProgress, console: Console) -> None:
        super().__init__(run_progress)
        columns = TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bars = Progress(*columns, console=console)
        last = run_progress.scenario.protocol.rounds
        self._rounds = self._bars.add_task("rounds", total=last, visible=run_progress.training)
        self._jobs = self._bars.add_task("attacks")
        # drawn by `update` only, as its thread reads the ledger
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
        # attacks come last, as a display that is too tall loses its last lines
        verdict, words = s.replay
        check = _line(f"replay check: {words}", "yellow" if verdict == "mismatch" else "dim")
        return Group(self._bars, Text(printable(progress_line(s))), check, _line(self.note, "dim"), *self._leakage())

    def _leakage(self) -> Iterator[Text]:
        """A line for the best baseline and one for each attack."""
        s = self.run_progress
        names = [a for a in s.reconstructing if is_attack(a)]
        for name, curve in ({"best baseline": s.floor()} | {a: s.means(a) for a in names} if names else {}).items():
            text = f"{name}: {in_unit(curve[max(curve)], s.measure)} now" if curve else f"{name}:"
            if name in names and (worst := s.worst_case(name)) is not None:
                text += f", worst case {'exact' if isinf(worst) else in_unit(worst, s.measure)}"
            yield _line(text, "yellow" if name in names else "dim")


def _line(text: str, style: str = "") -> Text:
    """One line of text, which is neither markup nor control codes."""
    return Text(printable(text).replace("\n", " "), style, no_wrap=True, overflow="ellipsis")
