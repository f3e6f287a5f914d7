"""The rounds of a user's own app: its strategy's start, what clients and evaluation returned, and how the training ended."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import INFO

from flwr.app import ArrayRecord, MetricRecord
from flwr.common.logger import log

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import EMPTY
from fedgauge.server.store.run import Run
from fedgauge.server.views.outcomes import none_accepted

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
TRAINING, EVALUATION, SERVER = "training", "evaluation", "server"  # who computed metrics: clients twice, and the server
MOST_METRICS, MOST_LETTERS = 100, 100  # kept of a round, and in a metric's name
_ACCURACY, _LOSS = re.compile(r"(^|[^a-z])acc(uracy)?([^a-z]|$)"), re.compile(r"(^|[^a-z])loss([^a-z]|$)")


@dataclass
class AppRounds:
    """Writes the rounds of an app's training to the ledger, each once it is over.

    Args:
        intercept: by round, the seconds that recording its updates cost.
        evaluates: whether the app's server evaluates after each round.
        packages: of the app, that its scenario needs.
    """

    ledger: Ledger
    intercept: Mapping[int, float]
    evaluates: bool
    packages: Sequence[str] = ()
    metrics: dict[str, dict[str, object]] = field(default_factory=dict)  # of the current round
    began: float = field(default_factory=time.perf_counter)
    open: int | None = None  # a round whose training is over

    @contextmanager
    def training(self, rounds: int) -> Iterator[None]:
        """Hold the run while it trains, so that a page and an attack service follow it; then record how it ended."""
        state = "interrupted"
        with Run(self.ledger.path.parent).lock("training"):
            self.ledger.set_meta(state="training", rounds=str(rounds))
            try:
                yield
                state = "trained"
            except Exception:  # whatever the user's app raised: noted, and raised again
                state = "failed"
                raise
            finally:
                if self.open is not None:
                    self.close(self.open)
                if state == "trained" and (why := none_accepted(self.ledger, ended=True)):
                    state = "failed"
                    self.ledger.set_meta(**{EMPTY: why})
                self.ledger.set_meta(state=state)
                self._say_what_is_next()

    def _say_what_is_next(self) -> None:
        """Into Flower's log: how many updates were recorded, and the command that attacks them."""
        updates = sum(1 for o in self.ledger.observations() if o["digest"])
        folder = self.ledger.path.parent.absolute()
        if not updates:
            log(INFO, "fedgauge recorded no update in %s", folder)
            return
        command = " ".join((f"fedgauge audit {folder}", *(f"--allow {package}" for package in self.packages)))
        log(INFO, "fedgauge recorded %d updates in %s. Attack them with: %s", updates, folder, command)

    def trained(self, round: int, metrics: MetricRecord | None, clients: Mapping[int, int]) -> None:
        """The clients' training of a round is over.

        Args:
            clients: their numbers by node id, by which a tester can name the truth.
        """
        self.open = round
        self.note(TRAINING, metrics)
        self.ledger.set_meta(nodes=json.dumps({str(client): str(node) for node, client in clients.items()}))

    def evaluated(self, round: int, metrics: MetricRecord | None) -> None:
        """The clients' evaluation of a round is over."""
        self.note(EVALUATION, metrics)
        if not self.evaluates:
            self.close(round)

    def noting(self, evaluate: Evaluate) -> Evaluate:
        """The app's own evaluation on the server, with its result noted."""

        def noted(round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate(round, arrays)
            self.note(SERVER, metrics)
            self.close(round)
            return metrics

        return noted

    def note(self, who: str, metrics: MetricRecord | None) -> None:
        """Keep what somebody returned until the round is closed."""
        if metrics:
            self.metrics[who] = dict(list(_worth_keeping(metrics))[:MOST_METRICS])

    def close(self, round: int) -> None:
        """Write a round."""
        now = time.perf_counter()
        accuracy, loss = test_figures(self.metrics)
        self.ledger.record_round(round, accuracy, loss, now - self.began, self.intercept.get(round, 0.0), self.metrics)
        self.metrics, self.began, self.open = {}, now, None


def _worth_keeping(metrics: MetricRecord) -> Iterator[tuple[str, object]]:
    """The metrics that a run shows, None for what is not finite; names and lists of any length would come from one client."""
    for name, value in metrics.items():
        numbers = value if isinstance(value, list) else [value]
        if len(name) <= MOST_LETTERS and len(numbers) <= MOST_METRICS:
            finite = [n if math.isfinite(n) else None for n in numbers]
            yield name, finite if isinstance(value, list) else finite[0]


def test_figures(metrics: Mapping[str, Mapping[str, object]]) -> tuple[float | None, float | None]:
    """Accuracy in [0, 1] and loss among what an app returned, the server's first; None: nothing is called so."""
    accuracy = _named(_ACCURACY, metrics)
    if accuracy is not None and accuracy > 1:  # in percent
        accuracy /= 100
    return accuracy if accuracy is not None and 0 <= accuracy <= 1 else None, _named(_LOSS, metrics)


def _named(pattern: re.Pattern[str], metrics: Mapping[str, Mapping[str, object]]) -> float | None:
    for who in (SERVER, EVALUATION):
        for name, value in metrics.get(who, {}).items():
            if pattern.search(name.lower()) and isinstance(value, int | float):
                return float(value)
    return None
