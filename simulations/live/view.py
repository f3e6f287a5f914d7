"""Views of a run at work: nothing, plain lines, one line of a terminal that is kept up to date, or events as JSON.

In an event, a number that is not finite is null; `exact` marks an infinite PSNR.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from math import inf
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedgauge.server.store.run import Run
from fedgauge.server.store.run_files import printable
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.formatting import finite, in_unit, is_exact
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.notices import notices
from fedgauge.server.views.snapshot import RunSnapshot, read_once
from fedgauge.server.views.strength import best_of, final_accuracy
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.live.log import Log, emit

EVERY = 1.0  # seconds between two readings of the ledger
PLAIN_EVERY = 5.0  # seconds between plain lines


class View:
    """View that shows nothing; `note`: what the run waits for."""

    def __init__(self, reading: RunSnapshot) -> None:
        self.reading, self.note = reading, ""
        self._started, self._read_at = monotonic(), -inf

    @contextmanager
    def shown(self) -> Iterator["View"]:
        with closing(self.reading):
            yield self

    def update(self) -> None:
        self.refresh()

    def refresh(self, force: bool = False) -> bool:
        """Read changes, at most once a second unless forced; return True if there were any."""
        if not force and monotonic() - self._read_at < EVERY:
            return False
        self._read_at, before = monotonic(), self.reading.version
        with self.reading.now():
            return self.reading.version != before

    def say(self, text: str) -> None:
        """Show a message next to the view."""

    @property
    def line(self) -> str:
        """The state of the run, and the note, until its first round is recorded."""
        waiting = self.note if not self.reading.rounds else ""
        return "; ".join(filter(None, (progress_line(self.reading), waiting)))


class Lines(View):
    """View with a plain line every few seconds after a change."""

    _printed, _last = -inf, ""

    @contextmanager
    def shown(self) -> Iterator[View]:
        with super().shown():
            yield self
            self._print(force=True)

    def update(self) -> None:
        if monotonic() - self._printed >= PLAIN_EVERY:
            self._print()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _print(self, force: bool = False) -> None:
        self.refresh(force)
        self._printed = monotonic()
        if self.line != self._last:
            self._last = self.line
            self.say(f"[{monotonic() - self._started:5.0f} s] {self._last}")


class LiveLine(Lines):
    """View with one line that is kept up to date, and wiped at the end."""

    def __init__(self, reading: RunSnapshot, console: Console) -> None:
        super().__init__(reading)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    @contextmanager
    def shown(self) -> Iterator[View]:
        with closing(self.reading), self._live:
            yield self

    def update(self) -> None:
        self.refresh()
        self._live.update(Text(printable(self.line)), refresh=True)


class Events(View):
    """View that emits started, round, scores, progress and replay."""

    def __init__(self, reading: RunSnapshot) -> None:
        super().__init__(reading)
        self._emitted: dict[object, object] = {}

    @contextmanager
    def shown(self) -> Iterator[View]:
        run, tables = self.reading.run, self.reading.tables
        attacks = list(self.reading.ledger.planned())
        facts = {"clients": tables["clients"], "rounds": tables["rounds"], "attacks": attacks}
        emit("started", run=run.name, folder=str(run.folder), **facts)
        with super().shown():
            yield self
            self._emit_changes(force=True)

    def update(self) -> None:
        self._emit_changes()

    def _emit_changes(self, force: bool = False) -> None:
        if not self.refresh(force):
            return
        r, jobs = self.reading, self.reading.jobs
        for number, row in sorted(r.rounds.items()):
            tested = {key: finite(row[key]) for key in ("accuracy", "loss", "seconds")}
            self._once(number, "round", {"round": number, **tested})
        for leak in leaks_by_round(r):
            facts = {"round": leak.round, **_in_numbers(leak)}
            self._once((leak.attack, leak.round), "scores", facts)
        counts = {"expected": jobs.expected, "plan": r.plan_coverage.to_json()}
        self._once("progress", "progress", {**asdict(r.progress), **counts}, seconds_left=finite(jobs.seconds_left))
        if verdict := r.meta.get("replay", ""):
            words = " ".join(r.meta.get("replay_detail", "").split())
            self._once("replay", "replay", {"verdict": verdict, "words": words})

    def _once(self, key: object, event: str, facts: Mapping[str, object], **more: object) -> None:
        if self._emitted.get(key) != facts:
            self._emitted[key] = facts
            emit(event, **facts, **more)


def view_of(run: Run, console: Console, log: Log = "auto", scenario: Scenario | None = None) -> View:
    """Make a view; auto: a live line in a capable terminal, otherwise plain lines."""
    reading = RunSnapshot(run, scenario)
    if log == "json":
        return Events(reading)
    if log == "quiet":
        return View(reading)
    return LiveLine(reading, console) if console.is_terminal and not console.is_dumb_terminal else Lines(reading)


def leaks_by_round(reading: RunSnapshot) -> list[Leak]:
    """Return the results of each name in each round; the attacks of a round come first."""
    found = [leak for leak in reading.leakage(reading.scores.measure.metric) if leak.round is not None]
    return sorted(found, key=lambda leak: (leak.round or 0, leak.role != "attack", leak.attack))


def progress_line(reading: RunSnapshot) -> str:
    jobs, by = reading.jobs, reading.scores.measure
    parts = [f"round {max(reading.rounds, default=0)}/{reading.tables['rounds']}"]
    if (accuracy := final_accuracy(reading.rounds)) is not None:
        parts.append(f"{reading.scores.label_kind.utility} {accuracy:.1%}")
    parts += jobs.work
    leaks = [leak for leak in reading.pooled(by.metric).values() if leak.role == "attack"]
    best = by.leakiest((k.best for k in leaks if k.best is not None), float)
    if best is not None and (strongest := best_of(leaks, "attack")):
        parts.append(f"{by.name} best {in_unit(best, by)}, mean {in_unit(strongest.mean, by)} by {strongest.attack}")
    return "; ".join(parts)


def finish(run: Run, report: Path) -> None:
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
                for a in reading.order
                if a in pooled
            ],
            errors=sorted({row["reason"] for row in ledger.reasons("failed")}),
            notices=[notice._asdict() for notice in notices(reading)],
        )


def _in_numbers(leak: Leak) -> dict[str, object]:
    return {
        "attack": leak.attack,
        "kind": leak.role,
        "metric": leak.metric,
        "mean": leak.mean,
        "best": finite(leak.best),
        "exact": is_exact(leak.best),
        "n": leak.n,
        "failed": sum(leak.failed.values()),
    }
