"""A run as it has been read by now: only what is new is asked of its ledger, and only what it changes is computed again."""

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any, Literal, TypeVar

import numpy as np

from fedgauge.client.components import SpecError
from fedgauge.client.local_data import may_download
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.ledger_rows import EMPTY, ScoreRow
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.leakage import Leak, leakage_by_round, leakage_of_all
from fedgauge.server.views.roles import attack_order
from fedgauge.server.views.scores import Scores, known_metrics

State = Literal["training", "attacking", "complete", "attacks waiting", "interrupted", "failed"]
View = TypeVar("View")
SHOWN = ("seed", "rounds", "clients", "data", "model", "chain")  # of a scenario, on every page


def state_of(run: Run, ledger: Ledger) -> State:
    """In a word: at work, complete, or how it ended."""
    if run.holder("training") is not None:
        return "training"
    if run.holder("audit") is not None:
        return "attacking"
    progress, meta, rounds = ledger.progress(), ledger.meta(), ledger.rounds()
    if meta.get("state") == "failed" and EMPTY in meta:
        return "failed"
    # a model that is trained has not failed, whatever became of the processes that trained it
    if meta.get("state") == "trained" or (rounds and str(rounds[-1]["round"]) == meta.get("rounds")):
        return "attacks waiting" if progress.queued + progress.leased else "complete"
    return "failed" if meta.get("state") == "failed" else "interrupted"


def tables_of(run: Run) -> dict[str, Any]:
    """A run's scenario as it stands in its file, unchecked."""
    try:
        # a scenario may leave its seed out
        tables = {"seed": 0, **tomllib.loads((run.folder / "scenario.toml").read_text())}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LedgerError(f"{run.folder / 'scenario.toml'} cannot be read: {error}") from error
    if missing := [key for key in SHOWN if key not in tables]:
        raise LedgerError(f"{run.folder / 'scenario.toml'} is no scenario: it lacks {', '.join(missing)}")
    return tables


class Reading:
    """One run; `lock` is held by whoever uses it, as a ledger serves one thread at a time.

    Raises:
        LedgerError: there is no ledger that can be read.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lock = Lock()
        self.ledger = run.ledger(readonly=True)
        self.inode = self.ledger.path.stat().st_ino
        self.tables = tables_of(run)
        self.scores = Scores.empty()
        self.rounds: dict[int, Mapping[str, Any]] = {}
        self.sizes: dict[tuple[int, int], int] = {}
        self.participation: Counter[tuple[int, str]] = Counter()  # (client, status)
        self.missed: dict[tuple[str, str], list[tuple[int, int]]] = {}  # (status, reason): (client, round)
        self.version = ""
        self._finished = 0
        self._seen = 0  # the last round of which observations are known
        self._leaks: dict[str, dict[int, list[Leak]]] = {}
        self._views: dict[Any, Any] = {}
        self._kept: dict[Any, Any] = {}
        self._scenario: Scenario | str | None = None

    @contextmanager
    def now(self) -> Iterator["Reading"]:
        """The run as it stands now, for one thread; LedgerError where it cannot be read."""
        with self.lock, self.ledger.snapshot():
            self.refresh()
            yield self

    def close(self) -> None:
        """Close the ledger, unless somebody is reading: then it closes with him."""
        if self.lock.acquire(blocking=False):
            self.ledger.close()
            self.lock.release()

    @property
    def gone(self) -> bool:
        """Whether another ledger, or none, stands where this one was opened."""
        return not self.ledger.path.exists() or self.ledger.path.stat().st_ino != self.inode

    def refresh(self) -> None:
        """Read what is new."""
        version = self._version()
        if version != self.version:
            self._read()
            self.version = version

    def _read(self) -> None:
        self.meta, self.progress = self.ledger.meta(), self.ledger.progress()
        self.attacks = [dict(row) for row in self.ledger.attacks()]
        for row in self.ledger.rounds_since(max(self.rounds, default=0)):
            self.rounds[row["round"]] = dict(row)
        for o in self.ledger.observations_since(self._seen + 1):
            self._seen = o["round"]
            self.sizes[o["round"], o["client"]] = o["examples"] or 1
            self.participation[o["client"], o["status"]] += 1
            if o["status"] != "accepted":
                self.missed.setdefault((o["status"], o["reason"]), []).append((o["client"], o["round"]))
        if (finished := self.ledger.finished()) > self._finished:
            touched: set[int] = set()
            self.scores = self.scores.extended(_noting(self.ledger.scores_since(self._finished), touched))
            for rounds in self._leaks.values():
                for round in touched:
                    rounds.pop(round, None)
            self._finished = finished
        self._views.clear()

    def _version(self) -> str:
        """The same as long as nothing has changed; it follows from the ledger alone, so that it survives a restart."""
        p = self.ledger.progress()
        counts = (self.ledger.finished(), p.queued, p.leased, p.failed, self.ledger.last_round())
        return "-".join(map(str, (*counts, self.state, self.ledger.meta().get("replay", "")))).replace(" ", "_")

    @property
    def state(self) -> State:
        """In a word, how the run stands now."""
        return state_of(self.run, self.ledger)

    def view(self, key: Any, make: Callable[[], View]) -> View:
        """What `make` gave when nothing has changed since."""
        if key not in self._views:
            self._views[key] = make()
        found: View = self._views[key]
        return found

    def keep(self, key: Any, make: Callable[[], View]) -> View:
        """What `make` gave once: of what never changes."""
        if key not in self._kept:
            self._kept[key] = make()
        found: View = self._kept[key]
        return found

    @property
    def metrics(self) -> list[str]:
        """Those that are shown; the measure always, so that failures are told where nothing else is."""
        measure = self.scores.measure.metric
        return list(dict.fromkeys([measure, *known_metrics(self.scores)])) if len(self.scores) else []

    @property
    def newest(self) -> int:
        """The newest round of which anything is known: its jobs are there before it is over."""
        return max(self._seen, max(self.rounds, default=0))

    @property
    def order(self) -> list[str]:
        """Names in the scores: attacks in the plan's order, limits, baselines."""
        return attack_order(self.ledger, self.scores.attacks)

    def leaks(self, metric: str) -> list[Leak]:
        """As leakage gives it; rounds without new rows are remembered."""
        known = self._leaks.setdefault(metric, {})
        rounds = np.unique(self.scores.round).tolist()
        if missing := [round for round in rounds if round not in known]:
            known |= {round: [] for round in missing}
            some = self.scores.where(np.isin(self.scores.round, missing))
            for leak in leakage_by_round(some, metric):
                assert leak.round is not None
                known[leak.round].append(leak)
        pooled = self.view(("pooled", metric), lambda: leakage_of_all(self.scores, metric))
        return [leak for round in rounds for leak in known[round]] + pooled

    def pooled(self, metric: str) -> dict[str, Leak]:
        """Over all rounds, by attack."""
        return {leak.attack: leak for leak in self.leaks(metric) if leak.round is None}

    @property
    def scenario(self) -> Scenario:
        """The scenario, built with its data; SpecError where this machine cannot."""
        if self._scenario is None:
            allowed = may_download.set(False)
            try:
                self._scenario = self.run.scenario()
            except (SpecError, OSError, ValueError) as error:
                self._scenario = str(error)
            finally:
                may_download.reset(allowed)
        if isinstance(self._scenario, str):
            raise SpecError(self._scenario)
        return self._scenario


def _noting(rows: Iterable[ScoreRow], rounds: set[int]) -> Iterator[ScoreRow]:
    """The same rows; their rounds are noted on the way."""
    for row in rows:
        rounds.add(row[0])
        yield row
