"""The clients' view: who leaks most, in which round, and which labels attacks restored of each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.server.store.pictures import reconstruction
from fedgauge.server.views import formatting
from fedgauge.server.views.figures import HeatMap, in_json
from fedgauge.server.views.gallery import Gallery
from fedgauge.server.views.intervals import Floats, Ints
from fedgauge.server.views.leakage import counted, counted_of_all
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack, is_baseline
from fedgauge.server.views.scores import Scores, capped
from fedgauge.server.views.success import count_ungraded
from fedgauge.server.views.verdict import class_shares, restored_labels

MOST_CELLS, MOST_ROUNDS = 50_000, 500  # of a heat map


def clients(reading: Reading, metric: str, attack: str | None) -> dict[str, Any]:
    """The worst case of every client in every round, and of every client over all rounds.

    Args:
        attack: None for the worst over all attacks.
    """
    return {
        "metric": formatting.metric_facts(metric),
        "ungraded": count_ungraded(reading.scores),
        "attack": attack or "",
        "attacks": [a for a in reading.order if is_attack(a)],
        "metrics": [formatting.metric_facts(m) for m in reading.metrics],
        "figure": in_json(heat_map(reading, metric, attack)),
        "table": _table(reading, metric, attack),
    }


def heat_map(reading: Reading, metric: str, attack: str | None = None) -> HeatMap | None:
    """The worst leak of each client in each round; None before the first score."""
    rows = _graded(counted(reading.scores, metric), metric, attack)
    rounds = np.unique(rows.round).tolist()
    if not rounds:
        return None
    table = _table(reading, metric, attack)
    ids = [row["client"] for row in table]
    shown, some = _places_shown(ids, rounds)
    worst = _of_clients(rows, shown).leakiest(metric, of_batch=True)
    cells = [[None if math.isnan(v) else v for v in row] for row in _cells(worst, shown, some, metric).tolist()]
    values = [v for row in cells for v in row if v is not None]
    by, floor = MEASURED[metric], _floor(reading, metric, ids)
    darkest = floor[0] if floor else 0.0 if by.higher_is_better else max(values, default=0.0)
    step = max(1e-9, abs(by.ceiling) * 1e-6)  # a scale has a length
    darkest = min(darkest, by.ceiling - step) if by.higher_is_better else max(darkest, by.ceiling + step)
    left_out = len(table) - len(shown), len(rounds) - len(some)
    words = _heat_words(metric, table[0], floor, left_out)
    return HeatMap(
        "clients", "Worst leak by client and round", words, by.label, shown, some, cells, darkest, by.ceiling
    )


def _heat_words(
    metric: str, most: Mapping[str, Any], floor: tuple[float, str] | None, left_out: tuple[int, int]
) -> str:
    by, words = MEASURED[metric], []
    worst = math.inf if most["exact"] else most["worst"]
    if worst is not None:
        guessed = floor is not None and by.sign * worst <= by.sign * floor[0]
        words.append(
            f"Client {most['client']} leaks most, in round {most['round']}: {formatting.in_metric(metric, worst)}"
            f"{', no more than a guess' if guessed else ''}."
        )
    if floor is not None:
        reached = formatting.in_metric(metric, floor[0])
        words.append(
            f"The best guess that does not read the update ({floor[1]}) reaches {reached} in a cell on average."
        )
    darkest = "nothing" if floor is None else "no more than that guess"
    brightest = f"{formatting.in_metric(metric, by.ceiling)}{'' if by.cap is None else ' or more'}"
    words.append(f"Brighter leaks more: darkest is {darkest}, brightest {brightest}.")
    words.append("A cross means that nothing was graded there.")
    clients, rounds = left_out
    if clients:
        words.append(f"{clients} client{'s' if clients != 1 else ''} that leak less are left out.")
    if rounds:
        words.append(f"Rounds are shown evenly spread, and {rounds} between them are left out.")
    return " ".join(words)


def _places_shown(clients: Sequence[int], rounds: Sequence[int]) -> tuple[list[int], list[int]]:
    """The clients and rounds of a heat map: MOST_CELLS at most, as a ledger may name any number of both.

    Args:
        clients: who leaks most comes first, and is shown.
        rounds: in order; of more than MOST_ROUNDS as many are shown, evenly spread.
    """
    places = np.linspace(0, len(rounds) - 1, min(len(rounds), MOST_ROUNDS)).round().astype(int)
    some = [rounds[place] for place in places]
    return sorted(clients[: MOST_CELLS // max(1, len(some))]), some


def _floor(reading: Reading, metric: str, ids: list[int]) -> tuple[float, str] | None:
    """The baseline that leaks most by luck: its worst case in a round of a client, on average; None if none is graded."""
    if metric == "label_accuracy":
        labels = restored_labels(reading.scores, reading.ledger, class_shares(reading))
        guess = "by how common the classes are"
        return (labels.guess, guess) if labels else None
    found: list[tuple[float, str]] = []
    for name in filter(is_baseline, reading.order):
        worst = _of_clients(_graded(counted(reading.scores, metric), metric, name), ids).leakiest(metric, of_batch=True)
        if len(worst):
            found.append((float(capped(metric, worst.value).mean()), name))
    if not found:
        return None
    return max(found) if MEASURED[metric].higher_is_better else min(found)


def _graded(rows: Scores, metric: str, attack: str | None) -> Scores:
    chosen = np.array([a == attack if attack else is_attack(a) for a in rows.attacks], bool)
    own = np.array([m == metric for m in rows.metrics], bool)
    return rows.where(chosen[rows.attack] & own[rows.metric] & ~np.isnan(rows.value))


def _of_clients(rows: Scores, ids: list[int]) -> Scores:
    """The rows of these clients: somebody else's ledger may lack some."""
    return rows.where(np.isin(rows.client, ids))


def _cells(worst: Scores, ids: list[int], rounds: list[int], metric: str) -> Floats:
    """(clients, rounds): the values of these rows, capped; NaN where there is none."""
    worst = worst.where(np.isin(worst.round, rounds))
    z = np.full((len(ids), len(rounds)), np.nan)
    z[np.searchsorted(ids, worst.client), np.searchsorted(rounds, worst.round)] = capped(metric, worst.value)
    return z


def _places(rows: Scores) -> dict[int, Ints]:
    """By client, where its rows are."""
    order = np.argsort(rows.client, kind="stable")
    ids, first = np.unique(rows.client[order], return_index=True)
    return dict(zip(ids.tolist(), np.split(order, first[1:]), strict=False))  # of no row there is one empty part


def _table(reading: Reading, metric: str, attack: str | None) -> list[dict[str, Any]]:
    """A row for each client, the worst first."""
    return reading.view(("clients' leaks", metric, attack), lambda: _rows(reading, metric, attack))


def _rows(reading: Reading, metric: str, attack: str | None) -> list[dict[str, Any]]:
    ids = sorted({client for client, _ in reading.participation})
    rows = _graded(counted_of_all(reading.scores, metric), metric, attack)
    hits, labels = (_graded(reading.scores.of_metric(m), m, attack) for m in ("identified", "label_accuracy"))
    if attack is None:  # per example the value that leaks most
        rows, hits, labels = (
            rows.leakiest(metric),
            hits.leakiest("identified"),
            labels.leakiest("label_accuracy"),
        )
    lines, none = [], np.zeros(0, np.int64)
    parts = [(part.value, _places(part)) for part in (rows, hits, labels)]
    for client in ids:
        values, identified, restored = (value[places.get(client, none)] for value, places in parts)
        place = int(np.argmax(MEASURED[metric].sign * values)) if len(values) else None
        worst = None if place is None else values[place]
        replies = {s: reading.participation[client, s] for s in ("accepted", "rejected", "missing")}
        lines.append(
            {
                "client": client,
                "n": len(values),
                "mean": formatting.rounded(capped(metric, values).mean()) if len(values) else None,
                "worst": formatting.rounded(worst),
                "round": None if place is None else int(rows.round[parts[0][1][client][place]]),
                "exact": MEASURED[metric].cap is not None and formatting.is_exact(worst),
                "identified": {"count": int(np.count_nonzero(identified)), "n": len(identified)}
                if len(identified)
                else None,
                "labels": formatting.rounded(restored.mean()) if len(restored) else None,
                **replies,
            }
        )
    return sorted(lines, key=lambda row: _by_leak(row, metric))


def _by_leak(row: Mapping[str, Any], metric: str) -> tuple[bool, float]:
    """Worst first, clients without a value last."""
    value = np.inf if row["exact"] else row["worst"]
    return (value is None, 0.0 if value is None else -MEASURED[metric].sign * value)


def client(gallery: Gallery, client: int) -> dict[str, Any]:
    """One client: how often each label occurs in the attacked batches, and how often in what each attack restored."""
    reading, scores = gallery.reading, gallery.reading.scores
    own = scores.where(scores.client == client)
    rounds = {a: np.unique(own.of_attack(a).round).tolist() for a in gallery.attacks}
    attacked = sorted({round for own_rounds in rounds.values() for round in own_rounds})
    shards = gallery.shards
    classes = shards.dataset.classes if shards else 0
    rows = [row for round in attacked for row in gallery.rows_at(round, client)]
    true = np.bincount(shards.dataset.labels[rows].numpy(), minlength=classes).tolist() if shards else []
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
        "true": true,
        "restored": [
            restored for a, own in rounds.items() if (restored := _restored(gallery, client, a, own, classes))
        ],
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
