"""Tables as data: each is built once, and the page, the report and the terminal print it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from fedgauge.attacks.modality.membership import QUESTIONS, RATES
from fedgauge.attacks.score_rows import OBJECTIVE
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.formatting import NONE, between, decibel, in_metric, number, percent, status_words
from fedgauge.server.views.leakage import as_rate, leakage_of_all
from fedgauge.server.views.privacy import CanaryBound, CanaryEstimate, canaries, privacy
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack, role_of
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.strength import Limits, best_of, final_accuracy, mean_of


@dataclass(frozen=True)
class Table:
    """A table of text; its last column may hold more than a few words."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def membership_tests(scores: Scores, order: Sequence[str]) -> Table:
    """Every test, baseline and limit of each question of membership, over all rounds."""
    heads = ("question", "test", "members", "pairs in which the member scores higher", "95 % interval",
             "detected at 1 % false positives", "at 0.1 %")  # fmt: skip
    rows = []
    for metric, (question, _) in QUESTIONS.items():
        leaks, *at_rates = (
            {leak.attack: leak for leak in leakage_of_all(scores, m) if leak.n}
            for m in (metric, *(metric + ending for ending in RATES))
        )
        for leak in (leaks[name] for name in order if name in leaks):
            kind, found = role_of(leak.attack), [at.get(leak.attack) for at in at_rates]
            name = leak.attack if kind == "attack" else f"{leak.attack} ({kind})"
            known = leak.low is not None and kind != "limit"
            interval = f"{percent(leak.low)} to {percent(leak.high)}" if known else NONE
            # a limit's share is a mean power, and no count of members
            counts = [percent(mean_of(at)) if at is None or kind == "limit" else str(as_rate(at)) for at in found]
            rows.append([question, name, str(leak.n), percent(leak.mean), interval, *counts])
    return Table("Tests of membership", heads, rows)


def canaries_by_round(reading: Reading) -> Table:
    """What canaries show, by round."""
    found, interval = canaries(reading), "95 % interval"
    if found.kind == "examples":
        heads = (
            "round",
            "canaries",
            "surest guesses right",
            "epsilon at least",
            "at least, if all were right",
            "accounted",
        )
    else:
        heads = ("round", "epsilon seen", interval, "with the spread measured", interval, "accounted")
    return Table("Canaries", heads, [_canary_cells(row) for row in found.rows])


def _canary_cells(row: CanaryEstimate | CanaryBound) -> list[str]:
    accounted = number(row.accounted, None)
    if isinstance(row, CanaryBound):
        counts = [str(row.round), str(row.canaries), f"{row.right} of {row.guesses}"]
        return [*counts, number(row.epsilon, None), number(row.most, None), accounted]
    each = [(number(of.epsilon, None), between(of.low, of.high, None)) for of in (row.seen, row.measured)]
    return [str(row.round), *each[0], *each[1], accounted]


def without_truth(scores: Scores, ledger: Ledger) -> Table:
    """What came back and nobody graded, by round and attack in the plan's order; no rows if nothing came back ungraded.

    If nothing at all is graded, attacks of which nothing came back are listed, too: no other table shows them.
    """
    heads = ("round", "accuracy", "attack", "came back", "median objective", "lowest", "ended")
    accuracy = {row["round"]: row["accuracy"] for row in ledger.rounds()}
    valued = scores.where(~np.isnan(scores.value))
    graded = {
        (round, scores.attacks[a]) for round, a in zip(valued.round.tolist(), valued.attack.tolist(), strict=True)
    }
    found: dict[tuple[int, str], list[tuple[float | None, str]]] = defaultdict(list)
    for row in ledger.scores(OBJECTIVE):
        if is_attack(row["attack"]) and (row["round"], row["attack"]) not in graded:
            found[row["round"], row["attack"]].append((row["value"], row["status"]))
    plan, rows = list(ledger.planned()), []
    for (round, attack), ended in sorted(found.items(), key=lambda item: (item[0][0], plan.index(item[0][1]))):
        values = [value for value, _ in ended if value is not None]
        counts = Counter(sorted(status for _, status in ended))
        back = sum(n for status, n in counts.items() if status not in ("not_applicable", "diverged"))
        least = [number(median(values) if values else None, None), number(min(values, default=None), None)]
        statuses = ", ".join(f"{n} {status_words(status)}" for status, n in counts.items())
        rows.append([str(round), percent(accuracy.get(round), 1), attack, str(back), *least, statuses])
    came_back = [row for row in rows if row[3] != "0"]
    every = came_back and not any(is_attack(attack) for _, attack in graded)
    return Table("Attacks without a truth", heads, rows if every else came_back)


def prices(named: Mapping[str, Reading], metric: str) -> Table:
    """What each run reached, and the limits of its noise."""
    heads = ("run", "best baseline", "Gaussian estimate (dB of the mean error)", "bound (dB of the mean error)", "gap (dB)",
             "test accuracy", "epsilon")  # fmt: skip
    rows = []
    for name, reading in named.items():
        floor = mean_of(best_of(reading.pooled(metric).values(), "baseline"))
        limits = Limits.of(reading.pooled("mse"))
        bounds = [decibel(value) for value in (limits.estimate, limits.bound, limits.gap)]
        spent = number(privacy(reading)["epsilon"], None)
        rows.append([name, in_metric(metric, floor), *bounds, percent(final_accuracy(reading.rounds)), spent])
    return Table("Each run's baseline, limits, accuracy and epsilon", heads, rows)


def differences(scenarios: Mapping[str, Mapping[str, Any]]) -> Table:
    """The settings that differ between scenarios, with each one's value ("–": not set)."""
    flat = [dict(_flat(tables)) for tables in scenarios.values()]
    rows = [[key, *(str(of.get(key, NONE)) for of in flat)] for key in dict.fromkeys(key for of in flat for key in of)]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return Table(f"Settings that differ; {len(rows) - len(differing)} others agree", ("setting", *scenarios), differing)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and value and all(isinstance(inner, Mapping) for inner in value):
        value = {str(i): inner for i, inner in enumerate(value)}
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
