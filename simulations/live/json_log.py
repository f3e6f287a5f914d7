"""The JSON log: events of a run on standard output, one object a line.

A number that is not finite is null; `exact` marks an infinite PSNR.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedgauge.server.store.run import Run
from fedgauge.server.views.formatting import finite, is_exact
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.reading import read_once
from fedgauge.server.views.roles import attack_order, role_of
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.live.log import emit
from fedgauge.simulations.live.progress import RunProgress
from fedgauge.simulations.live.view import View


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
