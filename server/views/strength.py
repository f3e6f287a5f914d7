"""Comparison of attacks: strongest attack, best baseline, limits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgauge.attacks.base import Role
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.attacks.score_rows import wrong_client
from fedgauge.client.psnr import in_db
from fedgauge.server.views.intervals import LUCK, Floats, Ints, clustered_interval
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.scores import Scores, capped


def best_of(leaks: Iterable[Leak], role: Role) -> Leak | None:
    """Return the strongest attack, best baseline or highest limit by its mean; None without a mean."""
    graded = [leak for leak in leaks if leak.mean is not None and leak.role == role]
    graded.sort(key=lambda leak: leak.attack)
    return MEASURED[graded[0].metric].leakiest(graded, lambda leak: leak.mean or 0.0) if graded else None


def error_in_db(leak: Leak | None) -> float | None:
    """Convert a mean squared error to a PSNR, which is below the mean of PSNRs."""
    return None if leak is None or leak.mean is None else in_db(leak.mean)


def limit_in_db(errors: Mapping[str, Leak], role: Role) -> float | None:
    """Return the tightest limit under noise, as the PSNR of a mean squared error; None without one.

    Args:
        errors: mean squared error of each attack and limit.
        role: limit: on the average of any attacker, for any images; estimate: of an attacker with the labels, for Gaussian images
            in each class, and no bound for others.
    """
    found = (error_in_db(leak) for leak in errors.values() if leak.role == role)
    return min((value for value in found if value is not None), default=None)


def mean_of(leak: Leak | None) -> float | None:
    return None if leak is None else leak.mean


def final_accuracy(rounds: Mapping[int, Mapping[str, Any]]) -> float | None:
    """Return the test accuracy of the last tested round."""
    tested: list[float] = [row["accuracy"] for _, row in sorted(rounds.items()) if row["accuracy"] is not None]
    return tested[-1] if tested else None


def rivals_of(graded: Scores, attack: str) -> tuple[str, ...]:
    """Return the baselines of an attack."""
    return (*(name for name, role in graded.roles.items() if role == "baseline"), wrong_client(attack))


@dataclass(frozen=True, eq=False)
class PairedDifference:
    """An attack and its hardest baseline on the n examples that both have."""

    baseline: str
    own: Floats
    floor: Floats
    clients: Ints
    sign: int = 1

    @property
    def differences(self) -> Floats:
        """Leakage in excess of the baseline."""
        gained: Floats = self.sign * (self.own - self.floor)
        return gained

    def interval(self, attacks: int) -> tuple[float, float] | None:
        """Return the 95 % interval, corrected for several attacks."""
        return clustered_interval(self.differences, self.clients, LUCK / attacks)


def paired(graded: Scores, attack: str) -> PairedDifference | None:
    """Compare an attack with its hardest baseline; None if they share no example."""
    own = graded.of_attack(attack)
    metric = graded.metrics[own.metric[0]] if len(own) else ""
    values, gains = capped(metric, own.value), []
    for baseline in rivals_of(graded, attack):
        floor = capped(metric, values_of(graded.of_attack(baseline), own.example_keys()))
        both = ~np.isnan(floor)
        if both.any():
            gains.append(PairedDifference(baseline, values[both], floor[both], own.client[both], MEASURED[metric].sign))
    return min(gains, key=lambda g: float(g.differences.mean()), default=None)


def values_of(rows: Scores, keys: Ints) -> Floats:
    """Return the value of each key (round, client, example); NaN if there is none."""
    known, first = np.unique(rows.example_keys(), return_index=True)
    if not len(known):
        return np.full(len(keys), np.nan)
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, rows.value[first][place], np.nan)
