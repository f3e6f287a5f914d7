"""Rows are graded as TabLeak grades them: cell by cell, one to one, and by how sure the attack says it is."""

import dataclasses
from itertools import permutations

import pytest
import torch

from fedgauge.attacks.base import Reconstruction
from fedgauge.attacks.grading.scores import Grader
from fedgauge.attacks.modality.rows import RowModality
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.client.data.tables import census
from fedgauge.client.update import Batch

DATA = census()
ROWS = RowModality(DATA)
TRUTH = DATA.x[:4]


def changed(row: int, *cells: int) -> torch.Tensor:
    """A row with another category, or a number four deviations away, in some cells."""
    found = DATA.columns.cells(TRUTH[row])
    for i in cells:
        column = DATA.columns.every[i]
        found[i] = (
            (found[i] + 1) % column.entries
            if not column.numeric
            else found[i] + 4 * column.std * (-1 if found[i] > column.mean else 1)
        )
    return DATA.columns.rows(found)


def test_shares_are_those_counted_by_hand() -> None:
    guess = torch.stack([TRUTH[0], changed(1, 0), changed(2, 1, 4, 5), changed(3, *range(10))])
    values = {metric.name: metric(TRUTH, guess).tolist() for metric in ROWS.metrics(DATA.x)}
    assert values["cells"] == [100, 90, 70, 0] and values["exact_row"] == [100, 0, 0, 0]
    assert values["numbers"] == [100, 75, 75, 0]
    assert [round(v, 3) for v in values["categories"]] == [100, 100, round(400 / 6, 3), 0]


def test_the_pairing_is_the_best_of_all_orders() -> None:
    guess = torch.stack([changed(3, 1), changed(0, 2, 3), TRUTH[2], changed(1, 0, 4, 5, 6)])
    order = ROWS.pairing(TRUTH, guess)
    cells = next(m for m in ROWS.metrics(DATA.x) if m.name == "cells")
    best = max(float(cells(TRUTH, guess[list(p)]).mean()) for p in permutations(range(4)))
    assert order.tolist() == [1, 3, 2, 0] and float(cells(TRUTH, guess[order]).mean()) == best


def test_the_surest_quarter_is_chosen_by_confidence_alone() -> None:
    sure = torch.zeros(4, 10)
    sure[:, 4] = 1.0  # four of the 24 categories, then two more
    sure[0, 5], sure[1, 5] = 0.5, 0.5
    guess = torch.stack([TRUTH[0], changed(1, 4), changed(2, 6, 7), changed(3, 8)])
    found = Reconstruction(guess[[2, 0, 3, 1]], None, 0.0, 1, 0.0, "converged", confidence=sure[[2, 0, 3, 1]])
    placed, rows, _ = Grader(ROWS, DATA.x).grade("x", 1, 0, found, Batch(TRUTH, DATA.y[:4]))
    assert placed.confidence is not None and torch.equal(placed.confidence, sure)
    values = {row.metric: row.value for row in rows if row.example == WHOLE_BATCH}
    assert values["sure_categories"] == pytest.approx(100 * 5 / 6)
    silent = dataclasses.replace(found, confidence=None)
    assert not [
        r for r in Grader(ROWS, DATA.x).grade("x", 1, 0, silent, Batch(TRUTH, DATA.y[:4]))[1] if "sure" in r.metric
    ]


def test_a_row_is_shown_with_what_was_right() -> None:
    words = ROWS.marked(changed(0, 0, 4), TRUTH[0])
    assert [word for word, _ in words][1:4] == ROWS.words(TRUTH[0])[1:4]
    assert [mark for _, mark in words] == ["wrong", "right", "right", "right", "wrong"] + ["right"] * 5
    assert {mark for _, mark in ROWS.marked(TRUTH[0], None)} == {"wrong"}
