"""The clients' view: who leaks most, in which round, and which labels attacks restored of each."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.store.pictures import reconstruction
from fedgauge.server.views import formatting
from fedgauge.server.views.figures import HeatMap, in_json
from fedgauge.server.views.formatting import many
from fedgauge.server.views.gallery import Gallery
from fedgauge.server.views.intervals import Floats, evenly
from fedgauge.server.views.leakage import counted, counted_of_all
from fedgauge.server.views.reading import Reading, viewed
from fedgauge.server.views.roles import is_attack, is_baseline
from fedgauge.server.views.scores import Scores, capped
from fedgauge.server.views.verdict import class_shares, restored_labels

MOST_CELLS, MOST_ROUNDS = 50_000, 500  # of a heat map


def clients(reading: Reading, metric: str, attack: str | None) -> dict[str, Any]:
    """The worst case of every client in every round, and of every client over all rounds.

    Args:
        attack: None for the worst over all attacks.
    """
    return {
        "metric": formatting.metric_facts(metric),
        "ungraded": reading.scores.left_ungraded,
        "attack": attack or "",
        "attacks": [a for a in reading.order if is_attack(a)],
        "metrics": [formatting.metric_facts(m) for m in reading.metrics],
        "figure": in_json(heat_map(reading, metric, attack)),
        "table": _table(reading, metric, attack),
    }


def heat_map(reading: Reading, metric: str, attack: str | None = None) -> HeatMap | None:
    """The worst leak of each client in each round, MOST_CELLS at most: who leaks most is shown; None before the first score."""
    rows, by = _graded(counted(reading.scores, metric), metric, attack), MEASURED[metric]
    every = np.unique(rows.round)
    table = _table(reading, metric, attack)
    if not len(every) or not table:  # somebody else's ledger may have scores of clients that it never saw
        return None
    ids, rounds = [row["client"] for row in table], evenly(every, MOST_ROUNDS)
    shown = sorted(ids[: MOST_CELLS // len(rounds)])
    worst = rows.where(np.isin(rows.client, shown) & np.isin(rows.round, rounds)).leakiest(metric, of_batch=True)
    values = capped(metric, worst.value)
    cells = np.full((len(shown), len(rounds)), None, object)
    cells[np.searchsorted(shown, worst.client), np.searchsorted(rounds, worst.round)] = values
    floor = _floor(reading, metric, ids)
    darkest = floor[0] if floor else 0.0 if by.higher_is_better else max(values, default=0.0)
    step = max(1e-9, abs(by.ceiling) * 1e-6)  # a scale has a length
    darkest = min(darkest, by.ceiling - step) if by.higher_is_better else max(darkest, by.ceiling + step)
    words = _heat_words(metric, table[0], floor, len(table) - len(shown), len(every) - len(rounds))
    title = "Worst leak by client and round"
    return HeatMap("clients", title, words, by.label, shown, rounds.tolist(), cells.tolist(), darkest, by.ceiling)


def _heat_words(
    metric: str, most: Mapping[str, Any], floor: tuple[float, str] | None, clients: int, rounds: int
) -> str:
    """The caption.

    Args:
        clients, rounds: how many are left out.
    """
    by, words = MEASURED[metric], []
    if (worst := np.inf if most["exact"] else most["worst"]) is not None:
        guessed = floor is not None and by.sign * worst <= by.sign * floor[0]
        reached = f"{formatting.in_metric(metric, worst)}{', no more than a guess' if guessed else ''}"
        words.append(f"Client {most['client']} leaks most, in round {most['round']}: {reached}.")
    darkest = "nothing"
    if floor is not None:
        reached = formatting.in_metric(metric, floor[0])
        darkest = (
            f"{reached}, which the best guess that does not read the update ({floor[1]}) reaches in a cell on average"
        )
    brightest = f"{formatting.in_metric(metric, by.ceiling)}{'' if by.cap is None else ' or more'}"
    words.append(
        f"Brighter leaks more: darkest is {darkest}, brightest {brightest}. A cross: nothing was graded there."
    )
    if clients or rounds:
        words.append(
            f"Left out: {many(clients, 'client')} that leak less, and {many(rounds, 'round')} between those shown."
        )
    return " ".join(words)


def _floor(reading: Reading, metric: str, ids: list[int]) -> tuple[float, str] | None:
    """The baseline that leaks most by luck: its worst case in a round of a client, on average; None if none is graded."""
    if metric == "label_accuracy":
        labels = restored_labels(reading.scores, reading.ledger, class_shares(reading))
        return (labels.guess, "by how common the classes are") if labels else None
    found: list[tuple[float, str]] = []
    for name in filter(is_baseline, reading.order):
        rows = _graded(counted(reading.scores, metric), metric, name)
        worst = rows.where(np.isin(rows.client, ids)).leakiest(metric, of_batch=True)
        if len(worst):
            found.append((float(capped(metric, worst.value).mean()), name))
    return MEASURED[metric].leakiest(sorted(found), lambda each: each[0])


def _graded(rows: Scores, metric: str, attack: str | None) -> Scores:
    rows = rows.where(rows.by_attacks) if attack is None else rows.of_attack(attack)
    return rows.where(rows.named(metric) & ~np.isnan(rows.value))


@viewed
def _table(reading: Reading, metric: str, attack: str | None) -> list[dict[str, Any]]:
    """A row for each client, the worst first."""
    counted_rows = counted_of_all(reading.scores, metric)
    hits, labels = (reading.scores.of_metric(name) for name in ("identified", "label_accuracy"))
    parts = [(metric, counted_rows), ("identified", hits), ("label_accuracy", labels)]
    graded = [(name, _graded(rows, name, attack)) for name, rows in parts]
    if attack is None:  # per example the value that leaks most
        graded = [(name, rows.leakiest(name)) for name, rows in graded]
    (_, rows), sign = graded[0], MEASURED[metric].sign
    order = np.argsort(-sign * rows.value, kind="stable")[::-1]  # of equal ones the first comes last, and is taken
    leaks = zip(rows.value[order].tolist(), rows.round[order].tolist(), strict=True)
    worst = dict(zip(rows.client[order].tolist(), leaks, strict=True))
    means, identified, restored = (_sums(rows, capped(name, rows.value)) for name, rows in graded)
    lines = []
    for client in sorted({client for client, _ in reading.participation}):
        (n, total), (of, right), (batches, told) = (
            each.get(client, (0, 0.0)) for each in (means, identified, restored)
        )
        most, round = worst.get(client, (None, None))
        lines.append(
            {
                "client": client,
                "n": n,
                "mean": formatting.rounded(total / n) if n else None,
                "worst": formatting.rounded(most),
                "round": round,
                "exact": MEASURED[metric].cap is not None and formatting.is_exact(most),
                "identified": {"count": int(right), "n": of} if of else None,
                "labels": formatting.rounded(told / batches) if batches else None,
                **{s: reading.participation[client, s] for s in ("accepted", "rejected", "missing")},
            }
        )
    return sorted(lines, key=lambda row: -sign * worst.get(row["client"], (-sign * np.inf,))[0])


def _sums(rows: Scores, values: Floats) -> dict[int, tuple[int, float]]:
    """By client how many values there are, and their sum."""
    ids, own, n = np.unique(rows.client, return_inverse=True, return_counts=True)
    return dict(zip(ids.tolist(), zip(n.tolist(), np.bincount(own, values).tolist(), strict=True), strict=True))


def client(gallery: Gallery, client: int) -> dict[str, Any]:
    """One client: how often each label occurs in the attacked batches, and how often in what each attack restored."""
    reading, shards = gallery.reading, gallery.shards
    own = reading.scores.where(reading.scores.client == client)
    rounds = {a: np.unique(own.of_attack(a).round).tolist() for a in gallery.attacks}
    attacked = sorted({round for own_rounds in rounds.values() for round in own_rounds})
    classes = shards.dataset.classes if shards else 0
    rows = [row for round in attacked for row in gallery.rows_at(round, client)]
    restored = (_restored(gallery, client, a, own_rounds, classes) for a, own_rounds in rounds.items())
    missed = [
        {"round": round, "status": status, "reason": reason}
        for (status, reason), where in reading.missed.items()
        for c, round in where
        if c == client
    ]
    return {
        "client": client,
        "classes": list(range(classes)),
        "class_names": gallery.class_names,
        "true": np.bincount(shards.dataset.labels[rows].numpy(), minlength=classes).tolist() if shards else [],
        "restored": list(filter(None, restored)),
        "rounds": len(attacked),
        "reasons": sorted(missed, key=lambda row: row["round"]),
    }


def _restored(gallery: Gallery, client: int, attack: str, rounds: list[int], classes: int) -> dict[str, Any] | None:
    """The label counts of an attack's reconstructions; None if it claims no labels."""
    kept = [reconstruction(gallery.reading.run, round, client, attack) for round in rounds]
    labels = [tensors["y"].numpy() for tensors in kept if not isinstance(tensors, str) and "y" in tensors]
    if not labels:
        return None
    counts = np.bincount(np.concatenate(labels), minlength=classes).tolist()
    return {"attack": attack, "counts": counts, "given": attack in gallery.given}
