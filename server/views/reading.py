"""A run at one moment: what its ledger holds, read once, from which every view is computed."""

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from threading import Lock
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import numpy as np
from xxhash import xxh3_64_hexdigest

from fedgauge.attacks.modality.base import MainMetric
from fedgauge.attacks.score_rows import OBJECTIVE
from fedgauge.client import toml_text
from fedgauge.client.components import SpecError, coerce
from fedgauge.client.local_data import may_download
from fedgauge.client.protocol import Protocol
from fedgauge.client.update import Batch
from fedgauge.server.store import run_files
from fedgauge.server.store.expected_jobs import expected_jobs
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.ledger_types import EMPTY, RETRIED, DeviceUse, Progress, json_table
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tester_truth import TesterTruth
from fedgauge.server.views.formatting import chain, component
from fedgauge.server.views.leakage import Leak, leakage
from fedgauge.server.views.participation import may_have_sent
from fedgauge.server.views.plan_coverage import PlanCoverage, plan_coverage, selection
from fedgauge.server.views.roles import attack_order, is_attack
from fedgauge.server.views.scores import Scores, known_metrics
from fedgauge.server.views.strength import final_accuracy

IDLE = 0.1  # share of the time that attacks may have waited for rounds; above it their pace does not predict the end
State = Literal["training", "attacking", "complete", "attacks waiting", "attacks failed", "interrupted", "failed"]
Seen = TypeVar("Seen", bound="Snapshot")
View = TypeVar("View")
Args = ParamSpec("Args")
MOST_EXAMPLES = 4096  # of one update that came to nothing: so many empty places are shown for it
SHOWN = ("seed", "rounds", "clients", "data", "model", "chain")  # keys of a scenario that every page shows
TWO_CLASSES = (0.5, 0.5)  # shares of the classes, where they are not known: of these a guess restores most


# --------------------------------------------------------------------------------------------- what the files alone say


def state_of(run: Run, ledger: Ledger) -> State:
    """Whether a run is at work, complete, or how it ended."""
    if run.at_work("training"):
        return "training"
    if run.at_work("audit"):
        return "attacking"
    progress, meta, rounds = ledger.progress(), ledger.meta(), ledger.rounds()
    ended: State = "failed" if meta.get("state") == "failed" else "interrupted"
    if (ended == "failed" and EMPTY in meta) or (ledger.foreign and meta.get("state") == ended):
        return ended  # of an app it is unknown how many rounds it planned
    # once the model is trained the run has not failed, whatever happened to its processes
    if meta.get("state") == "trained" or (rounds and str(rounds[-1]["round"]) == meta.get("rounds")):
        ended = "attacks failed" if progress.failed else "complete"
        return "attacks waiting" if progress.waiting else ended
    return ended


def version_of(run: Run, ledger: Ledger) -> str:
    """A string that changes with the run; it is derived from the ledger alone, so it survives a restart."""
    p = ledger.progress()
    gpus = [n for of in ledger.devices() if of.device != "cpu" for n in (of.busy, of.waves)]
    counts = (ledger.finished(), p.queued, p.leased, p.failed, ledger.last_round(), *gpus)
    meta = ledger.meta()
    told = (*counts, state_of(run, ledger), meta.get("replay", ""), meta.get(RETRIED, ""))
    return xxh3_64_hexdigest(repr(told).encode(errors="replace"))


def tables_of(run: Run) -> dict[str, Any]:
    """A run's scenario as in its file; of it only what the views read is checked."""
    path = run.folder / "scenario.toml"
    try:
        tables = {"seed": 0, **toml_text.parse(run_files.read(path))}  # a scenario may leave its seed out
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from error
    try:
        if missing := [key for key in SHOWN if key not in tables]:
            raise SpecError(f"it lacks {', '.join(missing)}")
        Protocol.from_tables(tables)
        for table in (tables["data"], tables["model"], *tables["chain"]):
            coerce(table.get("use"), str, "use")
        coerce(tables.get("server_attack", ()), tuple[Mapping[str, Any], ...], "[[server_attack]]")
        for name, key, kind in READ:
            table = coerce(tables.get(name, {}), dict, f"[{name}]")
            if key in table:
                coerce(table[key], kind, key)
        selection(tables)
    except ValueError as error:
        raise LedgerError(f"{path} is not a scenario: {error}") from error
    return tables


# what views read of a scenario that is not built
READ = (
    ("data", "batch_size", int),
    ("audit", "curious", bool),
    ("audit", "workers", int),
    ("tape", "retention_days", float),
)


@dataclass(frozen=True)
class RunLine:
    """A run in one line; expected and verdict take its scores and data, and are None until they are known."""

    id: str
    state: State
    version: str
    round: int
    rounds: int
    chain: str
    data: str
    model: str
    attacks: tuple[str, ...]
    accuracy: float | None
    best: float | None
    measure: MainMetric
    done: int
    failed: int
    total: int
    expected: int | None = None
    verdict: str | None = None


def run_line(run: Run) -> RunLine:
    """A run in one line, without reading all its scores; LedgerError if it cannot be read."""
    with run.ledger(readonly=True) as ledger:
        tables, progress = tables_of(run), ledger.progress()
        return RunLine(
            id=run.name,
            state=state_of(run, ledger),
            version=version_of(run, ledger),
            round=ledger.last_round(),
            rounds=int(ledger.meta().get("rounds") or tables["rounds"]),
            chain=chain(tables),
            data=component(tables["data"]),
            model=component(tables["model"]),
            attacks=tuple(row["name"] for row in ledger.attacks() if is_attack(row["name"])),
            accuracy=final_accuracy({row["round"]: dict(row) for row in ledger.rounds()}),
            best=ledger.best_so_far(),
            measure=ledger.modality.main,
            done=progress.done,
            failed=progress.failed,
            total=progress.total,
        )


# ---------------------------------------------------------------------------------------------------------- snapshots


@dataclass(frozen=True)
class Jobs:
    """The jobs of a run's attacks, baselines and limits among them.

    Args:
        progress: of the jobs that there are.
        to_come: how many the remaining rounds will add if every client takes part.
        pace: jobs a second over the latest ones; None before the second.
        idle: share of the time, since the first, in which the workers of the busiest device had none.
    """

    progress: Progress
    to_come: int = 0
    pace: float | None = None
    idle: float = 0.0

    @property
    def expected(self) -> int:
        """All of them, with those of the rounds to come."""
        return self.progress.total + self.to_come

    @property
    def left(self) -> int:
        """Those that have not ended."""
        return self.progress.waiting + self.to_come

    @property
    def words(self) -> str:
        """12 of 40 attacks done, 2 failed."""
        failed = f", {self.progress.failed} failed" if self.progress.failed else ""
        return f"{self.progress.done} of {self.expected} attacks done{failed}"

    @property
    def seconds_left(self) -> float | None:
        """Until the last expected one has ended, at this pace; None at the end, and while attacks wait for rounds."""
        if not self.pace or not self.left or (self.to_come and (not self.progress.waiting or self.idle > IDLE)):
            return None
        return self.left / self.pace


Make = Callable[Concatenate[Seen, Args], View]


def _cached(place: Literal["views", "constants"]) -> Callable[[Make[Seen, Args, View]], Make[Seen, Args, View]]:
    def decorate(make: Make[Seen, Args, View]) -> Make[Seen, Args, View]:
        @wraps(make)
        def cached(snapshot: Seen, /, *args: Args.args, **named: Args.kwargs) -> View:
            known: dict[Any, Any] = getattr(snapshot, place)
            key = (make, *args, *named.items())
            if key not in known:
                known[key] = make(snapshot, *args, **named)
            return cast(View, known[key])

        return cached

    return decorate


viewed = _cached("views")  # what a function makes of a snapshot, until the run changes
kept = _cached("constants")  # what a function makes of a run for good, as it never changes


class Snapshot:
    """What a ledger holds at one moment; `read` brings it up to date."""

    def __init__(self, ledger: Ledger, tables: Mapping[str, Any]) -> None:
        self.ledger = ledger
        self.tables = dict(tables)
        self.views: dict[Any, Any] = {}
        self.constants: dict[Any, Any] = {}
        self.meta: Mapping[str, str] = {}
        self.progress = Progress()
        self.rounds: dict[int, Mapping[str, Any]] = {}
        self.devices: list[DeviceUse] = []
        self.pace: float | None = None  # jobs a second
        self.newest = 0  # round of which anything is known; its jobs exist before it is finished
        self.scores, self._finished = Scores.empty(), 0

    def read(self) -> None:
        """Read the ledger, all of one moment (`Ledger.snapshot`); of the scores only what is new."""
        ledger, retried = self.ledger, self.meta.get(RETRIED)
        self.meta, self.progress = ledger.meta(), ledger.progress()
        if self.meta.get(RETRIED) != retried:  # some of the rows that were read are deleted by now
            self.scores, self._finished = Scores.empty(), 0
        self.rounds = {row["round"]: dict(row) for row in ledger.rounds()}
        self.devices, self.pace = ledger.devices(), ledger.pace()
        self.newest = max(ledger.last_observed(), max(self.rounds, default=0))
        self.views.clear()
        if (finished := ledger.finished()) > self._finished:
            given = frozenset(name for name, planned in ledger.planned().items() if planned.labels == "given")
            of_run = replace(self.scores, modality=ledger.modality, size_of=self.size_of, told_labels=given)
            rows = ledger.scores_since(self._finished)
            self.scores = replace(of_run, unordered=ledger.graded_by_clients).extended(rows)
            self._finished = finished

    def size_of(self, round: int, client: int) -> int:
        """How many examples a client's update stands for; in a user's own app as many as the attacker takes it for."""
        most = most_examples(self.tables)
        return most if self.ledger.foreign else min(self.ledger.size_of(round, client), most)

    def jobs_of(self, scenario: Scenario | None) -> Jobs:
        """The jobs as last read.

        Args:
            scenario: if rounds are still to come and it is known.
        """
        to_come = 0
        if scenario is not None and scenario.audit.curious:
            rounds = int(self.meta.get("rounds") or scenario.protocol.rounds)  # a user's own app decides by itself
            to_come = expected_jobs(scenario, self.newest, rounds)
        idle = 1.0 - max((of.share for of in self.devices), default=1.0)
        return Jobs(self.progress, to_come, self.pace, idle)

    @viewed
    def leakage(self, metric: str) -> list[Leak]:
        """One Leak for each (round, attack), by round, then one for each attack over all rounds; baselines included."""
        return leakage(self.scores, metric)

    @viewed
    def pooled(self, metric: str) -> dict[str, Leak]:
        """The Leaks over all rounds, by attack."""
        return {leak.attack: leak for leak in self.leakage(metric) if leak.round is None}

    @property
    def metrics(self) -> list[str]:
        """The metrics to show; always the main one, so that failures show even if there is nothing else."""
        measure = self.scores.measure.metric
        return list(dict.fromkeys([measure, *known_metrics(self.scores)])) if len(self.scores) else []

    @property
    def order(self) -> list[str]:
        """The names in the scores: attacks in the plan's order, limits, baselines."""
        return attack_order(self.ledger, self.scores.attacks)


def most_examples(tables: Mapping[str, Any]) -> int:
    """How many examples an update is taken to be of, by the scenario: a client's own word can be any number."""
    size, group = tables["data"].get("batch_size", 1), tables.get("secure_sum", {}).get("group", 1)
    return min(max(1, int(size)) * max(1, int(group)), MOST_EXAMPLES)


@contextmanager
def offline() -> Iterator[None]:
    """Forbid downloads of data."""
    before = may_download.set(False)
    try:
        yield
    finally:
        may_download.reset(before)


class Reading(Snapshot):
    """A snapshot of a run, with what its folder and its scenario say. Users hold `lock`, as a ledger serves one thread.

    Raises:
        LedgerError: the ledger cannot be read.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.ledger(readonly=True), tables_of(run))
        self.run = run
        self.lock = Lock()
        self.inode = self.ledger.path.stat().st_ino
        self.version = ""
        self._scenario: Scenario | str | None = None

    @contextmanager
    def now(self) -> Iterator["Reading"]:
        """The run's current state, for one thread; LedgerError if it cannot be read."""
        with self.lock, self.ledger.snapshot():
            if (version := version_of(self.run, self.ledger)) != self.version:
                self.read()
                self.version = version
            yield self

    def read(self) -> None:
        super().read()
        if "rounds" in self.meta:  # a user's own app decides by itself how many it trains
            self.tables["rounds"] = int(self.meta["rounds"])
        self.observations = self.ledger.observations()
        self.attacks = self.ledger.attacks()
        self.state = state_of(self.run, self.ledger)

    def close(self) -> None:
        """Close the ledger, unless somebody is reading: then it closes when the reader lets go of it."""
        if self.lock.acquire(blocking=False):
            self.ledger.close()
            self.lock.release()

    @property
    def gone(self) -> bool:
        """Whether the file that was opened has been deleted or replaced: make another reading."""
        path = self.ledger.path
        return not path.exists() or path.stat().st_ino != self.inode

    @property
    @viewed
    def sizes(self) -> dict[tuple[int, int], int]:
        """How many examples each update is of, by round and client."""
        most = most_examples(self.tables)
        return {(o["round"], o["client"]): min(o["examples"] or 1, most) for o in self.observations}

    @property
    @viewed
    def participation(self) -> Counter[tuple[int, str]]:
        """How many replies each client gave, by client and status."""
        return Counter((o["client"], o["status"]) for o in self.observations)

    @property
    def answered(self) -> set[tuple[int, int]]:
        """Round and client of every update that was sent, or may have been."""
        deployed = self.ledger.deployed
        return {(o["round"], o["client"]) for o in self.observations if may_have_sent(o, deployed)}

    @property
    @viewed
    def objectives(self) -> Mapping[tuple[int, int, str], float | None]:
        """What attacks without truth minimised, at their end, by round, client and attack."""
        return {(r["round"], r["client"], r["attack"]): r["value"] for r in self.ledger.scores(OBJECTIVE)}

    def size_of(self, round: int, client: int) -> int:
        """The same; in a user's own app by the truth, where a tester has handed it in."""
        if self.ledger.foreign:
            truth = self.tester_truth(round, client)
            return most_examples(self.tables) if truth is None else len(truth.y)
        return self.sizes.get((round, client), 1)

    @viewed
    def tester_truth(self, round: int, client: int) -> Batch | None:
        """The truth that a tester has handed in; None if there is none, or this machine no longer has it."""
        if "truth" in self.meta:
            with offline(), suppress(SpecError, OSError):
                source, dataset = TesterTruth.from_json(self.meta["truth"]), self.scenario.federation.shards.dataset
                return source.batch(round, client, dataset, self.ledger.nodes())
        return None

    @property
    def returned(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """What a user's own app returned in each round: the number, and "who: metric" with its value."""
        for number in sorted(self.rounds):
            told = json_table(self.rounds[number]["metrics"] or "{}", self.ledger.path, "metrics")
            tables = {who: own for who, own in told.items() if isinstance(own, dict)}
            yield number, {f"{who}: {name}": value for who, own in tables.items() for name, value in own.items()}

    @property
    @viewed
    def plan_coverage(self) -> PlanCoverage:
        """Planned against attacked updates."""
        return plan_coverage(self.ledger, self.tables, self.state == "training")

    @property
    @viewed
    def jobs(self) -> Jobs:
        """The jobs of the run, with those of rounds to come while it trains."""
        return self.jobs_of(self.built if self.state == "training" else None)

    @property
    @kept
    def class_shares(self) -> tuple[float, ...]:
        """How often each class occurs in the data; TWO_CLASSES if that is unknown."""
        if (scenario := self.built) is None:
            return TWO_CLASSES
        counts = np.bincount(scenario.federation.shards.dataset.labels.numpy())
        return tuple((counts[counts > 0] / counts.sum()).tolist())

    @property
    def scenario(self) -> Scenario:
        """The scenario, built with its data; SpecError if this machine cannot build it."""
        if self._scenario is None:
            try:
                with offline():
                    self._scenario = self.run.scenario()
            except (SpecError, OSError, ValueError) as error:
                self._scenario = str(error)
        if isinstance(self._scenario, str):
            raise SpecError(self._scenario)
        return self._scenario

    @property
    def built(self) -> Scenario | None:
        """The scenario, built with its data; None if this machine cannot build it, as a notice says."""
        with suppress(SpecError):
            return self.scenario
        return None


@contextmanager
def read_once(run: Run) -> Iterator[Reading]:
    """A run's state at one moment, for a command that reads it once."""
    with closing(Reading(run)) as reading, reading.now():
        yield reading
