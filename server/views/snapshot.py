"""Snapshot of a run, from which every view is computed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeVar, cast

import numpy as np

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.attacks.score_rows import wrong_client
from fedgauge.client import toml_text
from fedgauge.client.components import Count, SpecError, coerce
from fedgauge.client.data_folder import offline
from fedgauge.client.label_kinds import SCORED, LabelKind
from fedgauge.client.protocol import Protocol
from fedgauge.client.update import Batch
from fedgauge.server.store import run_files
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.ledger_types import EMPTY, LABEL_METRIC, Progress
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario, expected_jobs
from fedgauge.server.store.tester_truth import TesterTruth
from fedgauge.server.views.formatting import chain, component
from fedgauge.server.views.leakage import Leak, leakage
from fedgauge.server.views.plan_coverage import PlanCoverage, plan_coverage, selection
from fedgauge.server.views.scores import Scores, known_metrics
from fedgauge.server.views.strength import final_accuracy

State = Literal["training", "attacking", "complete", "attacks waiting", "attacks failed", "interrupted", "failed"]
Make = TypeVar("Make", bound=Callable[..., Any])
MOST_EXAMPLES = 4096  # shown of one update
TWO_CLASSES = (0.5, 0.5)  # shares of the classes if they are unknown: with these a guess restores most labels


def state_of(run: Run, ledger: Ledger) -> State:
    """Return whether a run works, is complete, or how it ended."""
    if run.at_work("training"):
        return "training"
    if run.at_work("audit"):
        return "attacking"
    progress, meta, rounds = ledger.progress(), ledger.meta(), ledger.rounds()
    ended: State = "failed" if meta.get("state") == "failed" else "interrupted"
    if (ended == "failed" and EMPTY in meta) or (ledger.foreign and meta.get("state") == ended):
        return ended  # an app's planned number of rounds is unknown
    if meta.get("state") == "trained" or (rounds and str(rounds[-1]["round"]) == meta.get("rounds")):
        ended = "attacks failed" if progress.failed else "complete"
        return "attacks waiting" if progress.waiting else ended
    return ended


def tables_of(run: Run) -> Mapping[str, Any]:
    """Return a run's scenario, with checks only of what views read.

    Raises:
        LedgerError: the file cannot be read, or is no scenario.
    """
    path = run.folder / "scenario.toml"
    try:
        # a scenario may leave its seed out
        tables = {"seed": 0, **toml_text.parse(run_files.read(path, toml_text.MOST))}
        Protocol.from_tables(tables)
        for table in (tables["data"], tables["model"], *tables["chain"]):
            coerce(table.get("use"), str, "use")
        coerce(tables.get("server_attack", ()), tuple[Mapping[str, Any], ...], "[[server_attack]]")
        audit, tape = (coerce(tables.get(name, {}), dict, f"[{name}]") for name in ("audit", "tape"))
        for table in (tables["data"], *tables["chain"]):
            coerce(table.get("batch_size", 1), Count, "batch_size")
        coerce(audit.get("curious", True), bool, "curious")
        coerce(tape.get("retention_days", 1.0), float, "retention_days")
        selection(tables)
    except (OSError, ValueError) as error:  # also what is no text, or no TOML
        raise LedgerError(f"{path} is not a scenario: {error}") from error
    return tables


def label_kind(meta: Mapping[str, str]) -> type[LabelKind]:
    """Return the kind of a run's labels."""
    return SCORED.get(meta.get(LABEL_METRIC, ""), LabelKind)


class RunLine:
    """Summary of a run, without its scores and data.

    Raises:
        LedgerError: the run cannot be read.
    """

    def __init__(self, run: Run) -> None:
        with run.ledger(readonly=True) as ledger:
            tables, meta, progress = tables_of(run), ledger.meta(), ledger.progress()
            self.id, self.state = run.name, state_of(run, ledger)
            self.round, self.rounds = ledger.last_round(), int(meta.get("rounds") or tables["rounds"])
            self.chain, self.data, self.model = chain(tables), component(tables["data"]), component(tables["model"])
            self.attacks = [row["name"] for row in ledger.attacks() if row["role"] == "attack"]
            self.accuracy = final_accuracy({row["round"]: dict(row) for row in ledger.rounds()})
            self.utility = label_kind(meta).utility
            self.best, self.measure = ledger.best_so_far(), ledger.modality.main
            self.done, self.failed, self.total = progress.done, progress.failed, progress.total


@dataclass(frozen=True)
class Jobs(Progress):
    """Jobs of a run's attacks, baselines and limits.

    Args:
        to_come: number of jobs that the remaining rounds will add if every client takes part.
        seconds_left: time until all have ended; None if unknown, or while none waits.
    """

    to_come: int = 0
    seconds_left: float | None = None

    @property
    def expected(self) -> int:
        return self.total + self.to_come

    @property
    def left(self) -> int:
        return self.waiting + self.to_come

    @property
    def words(self) -> str:
        """Counts, such as "12 of 40 jobs done, 2 failed"."""
        return f"{self.done} of {self.expected} jobs done{f', {self.failed} failed' if self.failed else ''}"

    @property
    def work(self) -> list[str]:
        """The state of the attacks: counts and time left."""
        words = [self.words, *(f"{n} {what}" for n, what in ((self.leased, "running"), (self.queued, "waiting")) if n)]
        if (left := self.seconds_left) is None:
            return words
        return [*words, f"about {left / 60:.0f} min left" if left >= 60 else f"about {max(1, left):.0f} s left"]


def viewed(make: Make) -> Make:
    """Keep the result of a view until the run changes."""

    @wraps(make)
    def cached(snapshot: Any, *args: Any) -> Any:
        if (make, *args) not in snapshot.views:
            snapshot.views[make, *args] = make(snapshot, *args)
        return snapshot.views[make, *args]

    return cast(Make, cached)


class RunSnapshot:
    """Snapshot of a run, from which every view is computed; `lock` serialises access to the ledger.

    Args:
        scenario: the run's, if the caller has built it.

    Raises:
        LedgerError: the ledger cannot be read.
    """

    def __init__(self, run: Run, scenario: Scenario | None = None) -> None:
        self.run, self.ledger, self.tables = run, run.ledger(readonly=True), tables_of(run)
        self.lock = Lock()
        self.version: tuple[object, ...] = ()
        self.views: dict[Any, Any] = {}
        self._given = scenario

    @contextmanager
    def now(self) -> Iterator["RunSnapshot"]:
        """Update to the run's current state, for one thread.

        Raises:
            LedgerError: the run cannot be read.
        """
        with self.lock, self.ledger.snapshot():
            self.state = state_of(self.run, self.ledger)
            if (version := (self.ledger.version, self.state)) != self.version:
                self.read()
                self.version = version
            yield self

    def read(self) -> None:
        """Read the ledger."""
        ledger, planned = self.ledger, self.ledger.planned()
        self.views.clear()
        self.meta, self.progress = ledger.meta(), ledger.progress()
        self.attacks: list[Any] = ledger.attacks()
        self.rounds = {row["round"]: dict(row) for row in ledger.rounds()}
        if "rounds" in self.meta:  # a user's own app decides
            self.tables = {**self.tables, "rounds": int(self.meta["rounds"])}
        for attack in planned.values():
            if attack.metric and attack.metric not in MEASURED:
                with suppress(SpecError):
                    attack.build()  # the module of a leak of one's own says what its metric is
        self.scores = Scores.of(
            ledger.score_rows(),
            modality=ledger.modality,
            size_of=self.size_of,
            unordered=ledger.graded_by_clients,
            given_labels=frozenset(name for name, attack in planned.items() if attack.labels == "given"),
            roles={name: attack.role for name, attack in planned.items()},
            label_kind=label_kind(self.meta),
        )

    def close(self) -> None:
        self.ledger.close()

    @property
    @viewed
    def observations(self) -> list[Any]:
        return self.ledger.observations()

    def size_of(self, round: int, client: int) -> int:
        """Return the number of examples of an update; in a user's own app the number that the attacker assumes."""
        size, group = self.tables["data"].get("batch_size", 1), self.tables.get("secure_sum", {}).get("group", 1)
        most = min(max(1, int(size)) * max(1, int(group)), MOST_EXAMPLES)  # clients may claim any number
        if not self.ledger.foreign:
            return min(self.ledger.size_of(round, client), most)
        truth = self.tester_truth(round, client)
        return most if truth is None else len(truth.y)

    @viewed
    def tester_truth(self, round: int, client: int) -> Batch | None:
        if "truth" in self.meta:
            with offline(), suppress(SpecError, OSError):
                dataset = self.scenario.federation.shards.dataset
                return TesterTruth(Path(self.meta["truth"])).batch(round, client, dataset, self.ledger.nodes())
        return None

    @viewed
    def leakage(self, metric: str) -> list[Leak]:
        return leakage(self.scores, metric)

    @viewed
    def pooled(self, metric: str) -> dict[str, Leak]:
        return {leak.attack: leak for leak in self.leakage(metric) if leak.round is None}

    @property
    def metrics(self) -> list[str]:
        """The metrics to show, with the main one first."""
        measure = self.scores.measure.metric
        return list(dict.fromkeys([measure, *known_metrics(self.scores)])) if len(self.scores) else []

    @property
    def order(self) -> list[str]:
        """Names in the scores: attacks in the plan's order, limits, baselines."""
        return [name for name in self.names if name in self.scores.attacks]

    @property
    def names(self) -> list[str]:
        """Names that the scores may have, in the same order: those of the plan, and each one's wrong client."""
        roles = self.scores.roles
        planned = sorted(roles, key=lambda name: (roles[name] == "baseline", roles[name] != "attack"))
        return [*planned, *map(wrong_client, roles)]

    @property
    @viewed
    def plan_coverage(self) -> PlanCoverage:
        return plan_coverage(self.ledger, self.tables, self.state == "training")

    @property
    @viewed
    def jobs(self) -> Jobs:
        """Jobs of the run, with those of rounds to come while it trains."""
        to_come, scenario = 0, self.built if self.state == "training" else None
        if scenario is not None and scenario.audit.curious:
            rounds = int(self.meta.get("rounds") or scenario.protocol.rounds)
            to_come = expected_jobs(scenario, max(self.ledger.last_observed(), max(self.rounds, default=0)), rounds)
        left = self.ledger.seconds_left(to_come) if self.progress.waiting else None
        return Jobs(**vars(self.progress), to_come=to_come, seconds_left=left)

    @cached_property
    def class_shares(self) -> tuple[float, ...]:
        """Share of each class in the data; TWO_CLASSES if unknown."""
        if (scenario := self.built) is None:
            return TWO_CLASSES
        counts = np.bincount(scenario.federation.shards.dataset.labels.numpy())
        return tuple((counts[counts > 0] / counts.sum()).tolist())

    @cached_property
    def _scenario(self) -> Scenario | str:
        try:
            with offline():
                return self._given or self.run.scenario()
        except (SpecError, OSError, ValueError) as error:
            return str(error)

    @property
    def scenario(self) -> Scenario:
        """The built scenario.

        Raises:
            SpecError: this machine cannot build it.
        """
        if isinstance(self._scenario, str):
            raise SpecError(self._scenario)
        return self._scenario

    @property
    def built(self) -> Scenario | None:
        """The built scenario; None if this machine cannot build it."""
        return None if isinstance(self._scenario, str) else self._scenario


@contextmanager
def read_once(run: Run) -> Iterator[RunSnapshot]:
    with closing(RunSnapshot(run)) as reading, reading.now():
        yield reading
