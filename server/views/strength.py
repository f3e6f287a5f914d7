"""What decides between attacks and between runs: the strongest attack, the best guess, the final accuracy, the Pareto front."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgauge.attacks.modality.registry import BASELINES, MEASURED
from fedgauge.attacks.plan import ERROR_LIMITS
from fedgauge.attacks.score_rows import wrong_client
from fedgauge.client.pairing import in_db
from fedgauge.server.views.intervals import LUCK, Floats, Ints, clustered_interval
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.roles import Role, is_attack, role_of
from fedgauge.server.views.scores import Scores, capped


def best_of(leaks: Iterable[Leak], role: Role) -> Leak | None:
    """The strongest attack, the best baseline or the highest limit: that whose mean leaks most; None if none has a mean."""
    graded = [leak for leak in leaks if leak.mean is not None and role_of(leak.attack) == role]
    graded.sort(key=lambda leak: leak.attack)
    return MEASURED[graded[0].metric].leakiest(graded, lambda leak: leak.mean or 0.0) if graded else None


def error_in_db(leak: Leak | None) -> float | None:
    """A mean squared error as a PSNR, which is below the mean of PSNRs; None if there is none."""
    return None if leak is None or leak.mean is None else in_db(leak.mean)


@dataclass(frozen=True)
class Limits:
    """What noise leaves to an attacker, and what was reached, all PSNRs of mean squared errors over all rounds.

    Args:
        estimate: of an attacker who knows the labels, if the images of a class were Gaussian; no bound otherwise.
        bound: which no attacker exceeds on average, whatever the images are.
        reached: by the attack of the least error.
    """

    estimate: float | None
    bound: float | None
    reached: float | None

    @classmethod
    def of(cls, errors: Mapping[str, Leak]) -> "Limits":
        """From the mean squared error of each attack and limit."""
        reached = [v for leak in errors.values() if is_attack(leak.attack) and (v := error_in_db(leak)) is not None]
        estimate, bound = (error_in_db(errors.get(name)) for name in ERROR_LIMITS)
        return cls(estimate, bound, max(reached, default=None))

    @property
    def gap(self) -> float | None:
        """How far the best attack stays below the estimate, in dB; negative where it passes it."""
        return None if self.estimate is None or self.reached is None else self.estimate - self.reached


def mean_of(leak: Leak | None) -> float | None:
    """A Leak's mean, where there is one."""
    return None if leak is None else leak.mean


def final_accuracy(rounds: Mapping[int, Mapping[str, Any]]) -> float | None:
    """Test accuracy after the last round that was tested; None if none was."""
    tested: list[float] = [row["accuracy"] for _, row in sorted(rounds.items()) if row["accuracy"] is not None]
    return tested[-1] if tested else None


@dataclass(frozen=True)
class Tradeoff:
    """What one run reached and what it leaked: its data set, its final accuracy, and the Leak of its strongest attack."""

    data: str
    accuracy: float | None
    strongest: Leak | None

    @property
    def place(self) -> tuple[float, float] | None:
        """Leakage and accuracy; None unless there are both."""
        leakage = mean_of(self.strongest)
        return None if leakage is None or self.accuracy is None else (leakage, self.accuracy)

    def is_optimal(self, among: Iterable["Tradeoff"]) -> bool:
        """Whether it is on its data set's Pareto front: neither an accuracy nor a leakage compares across data sets."""
        if self.place is None or self.strongest is None:
            return False
        sign, (leaked, reached) = MEASURED[self.strongest.metric].sign, self.place
        rivals = [other.place for other in among if other.data == self.data and other.place is not None]
        gains = [(accuracy - reached, sign * (leaked - leakage)) for leakage, accuracy in rivals]
        return not any(min(gain) >= 0 and max(gain) > 0 for gain in gains)


def fronts(tradeoffs: Sequence[Tradeoff]) -> dict[str, list[tuple[float, float]]]:
    """Accuracy and leakage along the Pareto front of each data set, by accuracy."""
    best: dict[str, set[tuple[float, float]]] = {}
    for own in tradeoffs:
        if own.place is not None and own.is_optimal(tradeoffs):
            best.setdefault(own.data, set()).add(own.place[::-1])
    return {data: sorted(places) for data, places in best.items()}


def rivals_of(attack: str) -> tuple[str, ...]:
    """The baselines that an attack is compared with."""
    return (*BASELINES, wrong_client(attack))


@dataclass(frozen=True, eq=False)
class PairedDifference:
    """An attack against the baseline that leaves it the smallest gain, on the n examples that both have."""

    baseline: str
    own: Floats
    floor: Floats
    clients: Ints
    sign: int = 1

    @property
    def differences(self) -> Floats:
        """How much more leaks than by the baseline; negative where less does."""
        gained: Floats = self.sign * (self.own - self.floor)
        return gained

    def interval(self, attacks: int) -> tuple[float, float] | None:
        """95 % for as many attacks together."""
        return clustered_interval(self.differences, self.clients, LUCK / attacks)


def paired(graded: Scores, attack: str) -> PairedDifference | None:
    """An attack against its hardest baseline in the metric of these rows; None if they share no example."""
    own = graded.of_attack(attack)
    metric = graded.metrics[own.metric[0]] if len(own) else ""
    values, gains = capped(metric, own.value), []
    for baseline in rivals_of(attack):
        floor = capped(metric, values_of(graded.of_attack(baseline), own.example_keys()))
        both = ~np.isnan(floor)
        if both.any():
            gains.append(PairedDifference(baseline, values[both], floor[both], own.client[both], MEASURED[metric].sign))
    return min(gains, key=lambda g: float(g.differences.mean()), default=None)


def values_of(rows: Scores, keys: Ints) -> Floats:
    """The value of each key (round, client, example) in some rows; NaN if there is none."""
    known, first = np.unique(rows.example_keys(), return_index=True)
    if not len(known):
        return np.full(len(keys), np.nan)
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, rows.value[first][place], np.nan)
