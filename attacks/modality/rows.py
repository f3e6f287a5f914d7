"""Rows of tables as private data."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge, Reconstruction
from fedgauge.attacks.modality.base import PERCENT, MainMetric, Mark, Measured, Modality
from fedgauge.attacks.modality.image_metrics import Metric
from fedgauge.client.data.tables import Tabular
from fedgauge.client.models.columns import Columns
from fedgauge.client.psnr import assigned

CHOSEN = 0.25  # of a batch's cells: those of which the attack is surest (Vero et al., 2023, table 4)
TIE = 1e-6  # weight of the rows' distance among pairs with equally many right cells


@dataclass(frozen=True, eq=False)
class RowModality(Modality):
    """Rows (D,) of encoded cells, paired and compared by how many cells are right: a number to .319 deviations, a category."""

    dataset: Tabular

    main = MainMetric(
        "cells right (%)", **PERCENT, metric="cells", name="cells right", private="row",
        margin=50.0, beyond="whole, or with a score at least 50 points above every baseline's",
        whole_as="with every cell within tolerance", by_cell=True,
    )  # fmt: skip
    measured: ClassVar = {
        "cells": main,
        "exact_row": Measured("rows with every cell right (%)", **PERCENT),
        "categories": Measured("categories right (%)", **PERCENT),
        "numbers": Measured("numbers right (%)", **PERCENT),
        "sure_categories": Measured("surest quarter of categories right (%)", **PERCENT, of_batch=True),
        "sure_numbers": Measured("surest quarter of numbers right (%)", **PERCENT, of_batch=True),
    }
    baselines: ClassVar = {"mode_row": "mode_row", "random_row": "random_row"}
    attacks = ("fedgauge.row_attacks",)
    shown_as = "text"
    parts = "entries"
    condition = "columns and their bounds known"

    @classmethod
    def holds(cls, x: Tensor) -> bool:
        return x.dim() == 2 and x.is_floating_point()

    @property
    def columns(self) -> Columns:
        return self.dataset.columns

    def metrics(self, gallery: Tensor) -> list[Metric]:
        numeric = torch.tensor([column.numeric for column in self.columns])

        def share(name: str, chosen: Tensor) -> Metric:
            return Metric(name, lambda t, g: 100.0 * self._right(t, g)[:, chosen].double().mean(1))

        found = [
            share("cells", torch.ones_like(numeric)),
            Metric("exact_row", lambda t, g: 100.0 * self._right(t, g).all(1).double()),
        ]
        if bool(numeric.any()) and not bool(numeric.all()):
            found += [share("categories", ~numeric), share("numbers", numeric)]
        return found

    def _right(self, truth: Tensor, guess: Tensor) -> Tensor:
        return self.columns.right(self.columns.cells(truth), self.columns.cells(guess))

    def pairing(self, truth: Tensor, guess: Tensor) -> Tensor:
        right = self._right(truth[:, None], guess[None])
        gain = right.double().mean(-1) + len(truth) * right.all(-1)  # an exact hit is paired before all others
        apart = (truth[:, None] - guess[None]).double().square().mean(-1)
        return assigned(TIE * apart / apart.max().clamp_min(TIE) - gain)

    def of_batch(self, truth: Tensor, found: Reconstruction) -> dict[str, float]:
        """Return the accuracy of the attack's most certain cells, if it reports certainty."""
        if found.x is None or found.confidence is None:
            return {}
        right, numeric = self._right(truth, found.x), torch.tensor([column.numeric for column in self.columns])
        values = {}
        for name, chosen in (("sure_categories", ~numeric), ("sure_numbers", numeric)):
            if bool(chosen.any()):
                hits, sure = right[:, chosen].flatten(), found.confidence[:, chosen].flatten()
                surest = sure.argsort(descending=True, stable=True)[: max(1, round(CHOSEN * len(sure)))]
                values[name] = 100.0 * float(hits[surest].double().mean())
        return values

    def arranged(self, x: Tensor) -> Tensor:
        return x.float()

    def informed(self, known: Knowledge) -> Knowledge:
        return replace(known, columns=self.columns)

    def headings(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def words(self, x: Tensor) -> list[str]:
        return self.columns.written(self.columns.cells(x).tolist())

    def marked(self, guess: Tensor, truth: Tensor | None) -> tuple[tuple[str, Mark], ...]:
        hits = [False] * len(self.columns) if truth is None else self._right(truth, guess).tolist()
        return tuple((word, "right" if hit else "wrong") for word, hit in zip(self.words(guess), hits, strict=True))
