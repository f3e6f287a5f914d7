"""Views of a run at work: nothing, plain lines, one line of a terminal that is kept up to date, or events as JSON.

In an event, a number that is not finite is null; `exact` marks an infinite PSNR.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.run_files import printable
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.formatting import finite, in_unit, is_exact
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.outcomes import work_words
from fedgauge.server.views.reading import read_once
from fedgauge.server.views.roles import attack_order, is_attack, role_of
from fedgauge.server.views.strength import best_of, final_accuracy
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.live.log import Log, emit
from fedgauge.simulations.live.progress import Clock, RunProgress

PLAIN_EVERY = 5.0  # seconds between plain lines


class View:
    """View that shows nothing; note: what the run waits for."""

    def __init__(self, run_progress: RunProgress) -> None:
        self.run_progress = run_progress
        self.note = ""

    @contextmanager
    def shown(self) -> Iterator["View"]:
        """Show while the run works."""
        yield self

    def update(self) -> None:
        """Show the state of the run."""
        self.run_progress.refresh()

    def say(self, text: str) -> None:
        """Show a message next to the view."""

    @property
    def line(self) -> str:
        """The state of the run, and the note."""
        return "; ".join(filter(None, (progress_line(self.run_progress), self.note)))


class Lines(View):
    """View with a plain line every few seconds after a change."""

    def __init__(self, run_progress: RunProgress, clock: Clock = time.monotonic) -> None:
        super().__init__(run_progress)
        self._clock, self._started = clock, clock()
        self._printed = -inf
        self._last = ""

    @contextmanager
    def shown(self) -> Iterator[View]:
        yield self
        self._print(force=True)

    def update(self) -> None:
        if self._clock() - self._printed >= PLAIN_EVERY:
            self._print()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _print(self, force: bool = False) -> None:
        self.run_progress.refresh(force)
        self._printed = self._clock()
        if self.line != self._last:
            self._last = self.line
            self.say(f"[{self._clock() - self._started:5.0f} s] {self._last}")


class LiveLine(View):
    """View with one line that is kept up to date, and wiped at the end."""

    def __init__(self, run_progress: RunProgress, console: Console) -> None:
        super().__init__(run_progress)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    @contextmanager
    def shown(self) -> Iterator[View]:
        with self._live:
            yield self

    def update(self) -> None:
        self.run_progress.refresh()
        self._live.update(Text(printable(self.line), no_wrap=True, overflow="ellipsis"), refresh=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Events(View):
    """View that emits started, round, scores, progress and replay."""

    def __init__(self, run_progress: RunProgress, run: Run) -> None:
        super().__init__(run_progress)
        self.run = run
        self._emitted: dict[object, object] = {}

    @contextmanager
    def shown(self) -> Iterator[View]:
        protocol = self.run_progress.scenario.protocol
        emit(
            "started",
            run=self.run.name,
            folder=str(self.run.folder),
            clients=protocol.clients,
            rounds=protocol.rounds,
            attacks=self.run_progress.attacks,
        )
        yield self
        self._emit_changes(force=True)

    def update(self) -> None:
        self._emit_changes()

    def _emit_changes(self, force: bool = False) -> None:
        s = self.run_progress
        if not s.refresh(force):
            return
        for number, row in sorted(s.rounds.items()):
            tested = {key: finite(row[key]) for key in ("accuracy", "loss", "seconds")}
            self._once(number, "round", {"round": number, **tested})
        for leak in s.leaks:
            facts = {"round": leak.round, **_in_numbers(leak)}
            self._once((leak.attack, leak.round), "scores", facts)
        p, jobs = s.progress, s.jobs
        counts = {
            "done": p.done,
            "expected": jobs.expected,
            "queued": p.queued,
            "leased": p.leased,
            "failed": p.failed,
            "plan": s.plan_coverage.to_json(),
        }
        self._once("progress", "progress", counts, seconds_left=finite(jobs.seconds_left))
        verdict, words = s.replay
        if verdict:
            self._once("replay", "replay", {"verdict": verdict, "words": words})

    def _once(self, key: object, event: str, facts: Mapping[str, object], **more: object) -> None:
        """Emit an event with new facts."""
        if self._emitted.get(key) != facts:
            self._emitted[key] = facts
            emit(event, **facts, **more)


def view_of(
    run: Run, ledger: Ledger, scenario: Scenario, console: Console, log: Log = "auto", training: bool = True
) -> View:
    """Make a view; auto: a live line in a capable terminal, otherwise plain lines."""
    run_progress = RunProgress(ledger, scenario, training)
    if log == "json":
        return Events(run_progress, run)
    if log == "quiet":
        return View(run_progress)
    return (
        LiveLine(run_progress, console) if console.is_terminal and not console.is_dumb_terminal else Lines(run_progress)
    )


def progress_line(s: RunProgress) -> str:
    """Write the state of a run on one line."""
    jobs, parts = s.jobs, [f"round {s.round}/{s.scenario.protocol.rounds}"] if s.training else []
    if s.training and (accuracy := final_accuracy(s.rounds)) is not None:
        parts.append(f"{s.scenario.federation.label_kind.utility} {accuracy:.1%}")
    parts += work_words(jobs)
    if s.plan_coverage.words and not jobs.left:
        parts.append(s.plan_coverage.words)
    by = s.measure
    leaks = [k for k in s.leakage(by.metric) if k.round is None and is_attack(k.attack)]
    best = by.leakiest((k.best for k in leaks if k.best is not None), float)
    if best is not None and (strongest := best_of(leaks, "attack")):
        parts.append(f"{by.name} best {in_unit(best, by)}, mean {in_unit(strongest.mean, by)} by {strongest.attack}")
    return "; ".join(parts)


def finish(run: Run, report: Path) -> None:
    """Emit the end of a run with verdict and scores."""
    with read_once(run) as reading:
        result, ledger = verdict_of(reading), reading.ledger
        pooled = reading.pooled(reading.scores.measure.metric)
        emit(
            "finished",
            run=run.name,
            folder=str(run.folder),
            state=reading.state,
            report=str(report),
            verdict=result.word,
            words=result.sentence,
            plan=reading.plan_coverage.to_json(),
            attacks=[
                {**_in_numbers(pooled[a]), "low": pooled[a].low, "high": pooled[a].high}
                for a in attack_order(ledger, pooled)
            ],
            errors=sorted({row["reason"] for row in ledger.reasons("failed")}),
        )


def _in_numbers(leak: Leak) -> dict[str, object]:
    """Return the numbers of a Leak, with a capped mean and a raw best."""
    return {
        "attack": leak.attack,
        "kind": role_of(leak.attack),
        "metric": leak.metric,
        "mean": leak.mean,
        "best": finite(leak.best),
        "exact": is_exact(leak.best),
        "n": leak.n,
        "failed": sum(leak.failed.values()),
    }
