"""A run as read so far: it asks the ledger only for what is new, and recomputes only what that changes."""

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import wraps
from threading import Lock
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

from xxhash import xxh3_64_hexdigest

from fedgauge.attacks.grading.knowledge_card import SEPARATOR
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
from fedgauge.server.views.formatting import chain, component, is_exact, rounded
from fedgauge.server.views.leakage import Leak, Snapshot
from fedgauge.server.views.participation import may_have_sent
from fedgauge.server.views.plan_coverage import PlanCoverage, plan_coverage, selection
from fedgauge.server.views.roles import attack_order, is_attack
from fedgauge.server.views.scores import Scores, known_metrics
from fedgauge.server.views.strength import final_accuracy

IDLE = 0.1  # share of the time that attacks may have waited for rounds; above it their pace does not predict the end
State = Literal["training", "attacking", "complete", "attacks waiting", "attacks failed", "interrupted", "failed"]
View = TypeVar("View")
Args = ParamSpec("Args")
MOST_EXAMPLES = 4096  # of one update that came to nothing: so many empty places are shown for it
SHOWN = ("seed", "rounds", "clients", "data", "model", "chain")  # keys of a scenario that every page shows


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
    """A run's scenario as in its file, unchecked."""
    try:
        # a scenario may leave its seed out
        tables = {"seed": 0, **toml_text.parse(run_files.read(run.folder / "scenario.toml"))}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LedgerError(f"{run.folder / 'scenario.toml'} cannot be read: {error}") from error
    if missing := [key for key in SHOWN if key not in tables]:
        raise LedgerError(f"{run.folder / 'scenario.toml'} is not a scenario: it lacks {', '.join(missing)}")
    try:
        Protocol.from_tables(tables)
        _check_shapes(tables)
        selection(tables)
    except ValueError as error:
        raise LedgerError(f"{run.folder / 'scenario.toml'} is not a scenario: {error}") from error
    return tables


def _check_shapes(tables: Mapping[str, Any]) -> None:
    """Raise SpecError unless what the views read beside the protocol, without building the scenario, is of the right kind."""
    for table in (tables["data"], tables["model"], *tables["chain"]):
        coerce(table.get("use"), str, "use")
    of = {key: coerce(tables.get(key, {}), dict, f"[{key}]") for key in ("data", "audit", "tape")}
    coerce(tables.get("server_attack", ()), tuple[Mapping[str, Any], ...], "[[server_attack]]")
    kinds = (
        ("data", "batch_size", int),
        ("audit", "curious", bool),
        ("audit", "workers", int),
        ("tape", "retention_days", float),
    )
    for table, key, kind in kinds:
        if key in of[table]:
            coerce(of[table][key], kind, key)


@contextmanager
def offline() -> Iterator[None]:
    """Forbid downloads of data."""
    before = may_download.set(False)
    try:
        yield
    finally:
        may_download.reset(before)


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


class LedgerReading:
    """What has been read of a ledger so far: it asks only for what is new."""

    def __init__(self, ledger: Ledger, tables: Mapping[str, Any]) -> None:
        self.ledger = ledger
        self.tables = dict(tables)
        self.progress = Progress()
        self.meta: Mapping[str, str] = {}
        self.devices: list[DeviceUse] = []
        self.pace: float | None = None  # jobs a second
        self.newest = 0  # round of which anything is known; its jobs exist before it is finished
        self.forget()

    def forget(self) -> None:
        """Forget all rows that were read, as some of them are deleted by now."""
        self.snapshot = Snapshot(lambda round, client: self.size_of(round, client))
        self.rounds: dict[int, Mapping[str, Any]] = {}

    def read(self) -> set[int]:
        """Read what is new, all of one moment (`Ledger.snapshot`); returns the rounds whose scores it changes."""
        retried = self.meta.get(RETRIED)
        self.meta, self.progress = self.ledger.meta(), self.ledger.progress()
        if self.meta.get(RETRIED) != retried:
            self.forget()
        self.rounds |= {row["round"]: dict(row) for row in self.ledger.rounds(max(self.rounds, default=0))}
        self.devices, self.pace = self.ledger.devices(), self.ledger.pace()
        self.newest = max(self.ledger.last_observed(), max(self.rounds, default=0))
        return self.snapshot.read(self.ledger)

    def size_of(self, round: int, client: int) -> int:
        """How many examples a client's update stands for; in a user's own app as many as the attacker takes it for."""
        most = most_examples(self.tables)
        return most if self.ledger.foreign else min(self.ledger.size_of(round, client), most)


class Reading(LedgerReading):
    """One run. Users hold `lock`, because a ledger serves one thread at a time.

    Raises:
        LedgerError: the ledger cannot be read.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.ledger(readonly=True), tables_of(run))
        self.run = run
        self.lock = Lock()
        self.inode = self.ledger.path.stat().st_ino
        self.version = ""
        self._views: dict[Any, Any] = {}
        self._kept: dict[Any, Any] = {}
        self._scenario: Scenario | str | None = None

    def forget(self) -> None:
        super().forget()
        self.sizes: dict[tuple[int, int], int] = {}
        self.participation: Counter[tuple[int, str]] = Counter()  # (client, status)
        self.missed: dict[tuple[str, str], list[tuple[int, int]]] = {}  # (status, reason): (client, round)
        self.answered: set[tuple[int, int]] = set()  # round and client of every update that was sent, or may have been
        self._seen = 0  # the last round whose observations were read

    @contextmanager
    def now(self) -> Iterator["Reading"]:
        """The run's current state, for one thread; LedgerError if it cannot be read."""
        with self.lock, self.ledger.snapshot():
            self.refresh()
            yield self

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

    def refresh(self) -> None:
        """Read what is new."""
        if (version := version_of(self.run, self.ledger)) != self.version:
            self.read()
            self.version = version

    def read(self) -> set[int]:
        touched = super().read()
        if "rounds" in self.meta:  # a user's own app decides by itself how many it trains
            self.tables["rounds"] = int(self.meta["rounds"])
        self.attacks = list(map(_with_parts, self.ledger.attacks()))
        deployed = self.ledger.deployed
        for o in self.ledger.observations(self._seen + 1):
            self._seen = o["round"]
            self.sizes[o["round"], o["client"]] = min(o["examples"] or 1, most_examples(self.tables))
            self.participation[o["client"], o["status"]] += 1
            if may_have_sent(o, deployed):
                self.answered.add((o["round"], o["client"]))
            if o["status"] != "accepted":
                self.missed.setdefault((o["status"], o["reason"]), []).append((o["client"], o["round"]))
        self._views.clear()
        return touched

    @property
    def state(self) -> State:
        """The run's current state."""
        return state_of(self.run, self.ledger)

    def view(self, key: Any, make: Callable[[], View]) -> View:
        """The result of `make`, cached until the run changes."""
        if key not in self._views:
            self._views[key] = make()
        return cast(View, self._views[key])

    def keep(self, key: Any, make: Callable[[], View]) -> View:
        """The result of `make`, cached for good: for what never changes."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(View, self._kept[key])

    @property
    def objectives(self) -> Mapping[tuple[int, int, str], float | None]:
        """What attacks without truth minimised, at their end, by round, client and attack."""
        rows = self.view("objectives", lambda: list(self.ledger.scores(OBJECTIVE)))
        return self.view("by objective", lambda: {(r["round"], r["client"], r["attack"]): r["value"] for r in rows})

    def size_of(self, round: int, client: int) -> int:
        """The same; in a user's own app by the truth, where a tester has handed it in."""
        if self.ledger.foreign:
            truth = self.tester_truth(round, client)
            return most_examples(self.tables) if truth is None else len(truth.y)
        return self.sizes.get((round, client), 1)

    def tester_truth(self, round: int, client: int) -> Batch | None:
        """The truth that a tester has handed in; None if there is none, or this machine no longer has it."""
        if "truth" not in self.meta:
            return None
        nodes = self.ledger.nodes()

        def read() -> Batch | None:
            with offline(), suppress(SpecError, OSError):
                source = TesterTruth.from_json(self.meta["truth"])
                return source.batch(round, client, self.scenario.federation.shards.dataset, nodes)
            return None

        return self.view(("truth", round, client), read)

    @property
    def returned(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What a user's own app returned in each round: the number, and "who: metric" with its value."""
        for number in sorted(self.rounds):
            told = json_table(self.rounds[number]["metrics"] or "{}", self.ledger.path, "metrics")
            tables = {who: own for who, own in told.items() if isinstance(own, dict)}
            yield number, {f"{who}: {name}": value for who, own in tables.items() for name, value in own.items()}

    @property
    def plan_coverage(self) -> PlanCoverage:
        """Planned against attacked updates."""
        return self.view("plan coverage", lambda: plan_coverage(self.ledger, self.tables, self.state == "training"))

    @property
    def metrics(self) -> list[str]:
        """The metrics to show; always the main one, so that failures show even if there is nothing else."""
        measure = self.scores.measure.metric
        return list(dict.fromkeys([measure, *known_metrics(self.scores)])) if len(self.scores) else []

    @property
    def order(self) -> list[str]:
        """The names in the scores: attacks in the plan's order, limits, baselines."""
        return attack_order(self.ledger, self.scores.attacks)

    @property
    def scores(self) -> Scores:
        """All scores."""
        return self.snapshot.scores

    def leaks(self, metric: str) -> list[Leak]:
        """The same as `leakage`; rounds without new rows are cached."""
        return self.snapshot.leaks(metric)

    def pooled(self, metric: str) -> dict[str, Leak]:
        """The Leaks over all rounds, by attack."""
        return {leak.attack: leak for leak in self.leaks(metric) if leak.round is None}

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
        try:
            return self.scenario
        except SpecError:
            return None


def viewed(make: Callable[Concatenate[Reading, Args], View]) -> Callable[Concatenate[Reading, Args], View]:
    """Cache what a function makes of a run until the run changes."""

    @wraps(make)
    def cached(reading: Reading, /, *args: Args.args, **named: Args.kwargs) -> View:
        return reading.view((make, *args, *named.items()), lambda: make(reading, *args, **named))

    return cached


def kept(make: Callable[Concatenate[Reading, Args], View]) -> Callable[Concatenate[Reading, Args], View]:
    """Cache for good what a function makes of a run: what never changes."""

    @wraps(make)
    def cached(reading: Reading, /, *args: Args.args, **named: Args.kwargs) -> View:
        return reading.keep((make, *args, *named.items()), lambda: make(reading, *args, **named))

    return cached


def jobs_of(reading: LedgerReading, scenario: Scenario | None) -> Jobs:
    """The jobs as last read.

    Args:
        scenario: if rounds are still to come and it is known.
    """
    to_come = 0
    if scenario is not None and scenario.audit.curious:
        rounds = int(reading.meta.get("rounds") or scenario.protocol.rounds)  # a user's own app decides by itself
        to_come = expected_jobs(scenario, reading.newest, rounds)
    idle = 1.0 - max((of.share for of in reading.devices), default=1.0)
    return Jobs(reading.progress, to_come, reading.pace, idle)


def jobs_of_run(reading: Reading) -> Jobs:
    """The jobs of a run, whether it trains or not."""
    return jobs_of(reading, reading.built if reading.state == "training" else None)


def _with_parts(row: Any) -> dict[str, Any]:
    """An attack with its card in parts: what was agreed, then what was found, whose sentences may hold any words."""
    return {**row, "parts": [*row["agreed"].split(SEPARATOR), *filter(None, (row["training"], row["grading"]))]}


@contextmanager
def read_once(run: Run) -> Iterator[Reading]:
    """A run's state at one moment, for a command that reads it once."""
    with closing(Reading(run)) as reading, reading.now():
        yield reading


def most_examples(tables: Mapping[str, Any]) -> int:
    """How many examples an update is taken to be of, by the scenario: a client's own word can be any number."""
    size, group = tables["data"].get("batch_size", 1), tables.get("secure_sum", {}).get("group", 1)
    return min(max(1, int(size)) * max(1, int(group)), MOST_EXAMPLES)


def run_summary(run: Run) -> dict[str, Any]:
    """A run in one line, without reading all its scores; LedgerError if it cannot be read."""
    with run.ledger(readonly=True) as ledger:
        tables = tables_of(run)
        progress, best = ledger.progress(), ledger.best_so_far()
        return {
            "id": run.name,
            "state": state_of(run, ledger),
            "version": version_of(run, ledger),
            "round": ledger.last_round(),
            "rounds": int(ledger.meta().get("rounds") or tables["rounds"]),
            "chain": chain(tables),
            "data": component(tables["data"]),
            "model": component(tables["model"]),
            "attacks": [row["name"] for row in ledger.attacks() if is_attack(row["name"])],
            "accuracy": rounded(final_accuracy({row["round"]: dict(row) for row in ledger.rounds()})),
            "best": rounded(best),
            "exact": is_exact(best),
            "measure": asdict(ledger.modality.main),
            "progress": {**vars(progress), "total": progress.total},
        }
