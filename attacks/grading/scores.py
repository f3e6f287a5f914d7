"""Scores: grade one reconstruction against the truth, one row for each metric and example."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedgauge.attacks.base import Reconstruction
from fedgauge.attacks.modality.base import Modality
from fedgauge.attacks.modality.image_metrics import AUGMENTED, Metric
from fedgauge.attacks.score_rows import OBJECTIVE, WHOLE_BATCH, ScoreRecord, came_back, wrong_client
from fedgauge.client.label_kinds import LabelKind
from fedgauge.client.update import Batch


@dataclass(frozen=True, eq=False)
class Grader:
    """Grades reconstructions of the examples of one dataset.

    Args:
        modality: decides how examples are paired and which metrics they get.
        gallery: public examples (N, ...), for identification.
        only: the names of the metrics; default: all that apply.
        label_kind: decides how restored labels are scored.
    """

    modality: Modality
    gallery: Tensor
    only: Collection[str] | None = None
    label_kind: LabelKind = field(default_factory=LabelKind)

    @cached_property
    def metrics(self) -> list[Metric]:
        metrics = self.modality.metrics(self.gallery)
        return metrics if self.only is None else [metric for metric in metrics if metric.name in self.only]

    def leaked(self, result: Reconstruction, truth: Batch) -> list[float]:
        """The main metric of each example, as it counts in a mean; empty without a reconstruction."""
        main = self.modality.main
        rows = replace(self, only={main.metric}).grade("", 0, 0, result, truth)[1]
        values = [row.value for row in rows if row.metric == main.metric and row.value is not None]
        return values if main.cap is None else [min(value, main.cap) for value in values]

    def grade(
        self, attack: str, round: int, client: int, result: Reconstruction, truth: Batch, augmented: Batch | None = None
    ) -> tuple[Reconstruction, list[ScoreRecord], Tensor]:
        """The reconstruction in the truth's order, its rows, and which example (B,) each was paired with; -1: none.

        As many are paired, one to one, as truth and reconstruction both have; rows name the truth's examples. Labels are
        compared with all of the truth's: those of the nearest examples were chosen with a look at the truth.

        Args:
            augmented: the examples as the chain changed them before training: a second truth, with rows of its own.
        """

        def row(example: int, metric: str, value: float | None) -> ScoreRecord:
            return ScoreRecord(round, client, attack, example, metric, value, result.status, result.seconds)

        rows = []
        if result.y is not None and truth.labelled and self.only is None:
            scores = self.label_kind.scores(truth.y, result.y)
            rows += [row(WHOLE_BATCH, name, value) for name, value in scores.items()]
        if result.x is None or not came_back(result.x):
            rows += [row(i, metric.name, None) for metric in self.metrics for i in range(len(truth.y))]
            return result, rows, torch.empty(0, dtype=torch.int64)
        if len(result.x) < len(truth.x):
            own, order = self.modality.pairing(result.x, truth.x), torch.arange(len(result.x))
        else:
            own, order = torch.arange(len(truth.x)), self.modality.pairing(truth.x, result.x)
        paired, x = truth.x[own], result.x[order]
        for metric in self.metrics:
            values = metric(paired, x).double().tolist()
            rows += [row(i, metric.name, value) for i, value in zip(own.tolist(), values, strict=True)]
        if augmented is not None:
            nearest = result.x[self.modality.pairing(augmented.x, result.x)]
            for metric in self.metrics:
                if (name := metric.name + AUGMENTED) in self.modality.measured:
                    rows += [row(i, name, v) for i, v in enumerate(metric(augmented.x, nearest).double().tolist())]
        y, confidence = (None if t is None else t[order] for t in (result.y, result.confidence))
        placed = replace(result, x=x, y=y, confidence=confidence)
        whole = self.modality.of_batch(paired, placed)
        rows += [row(WHOLE_BATCH, name, v) for name, v in whole.items() if self.only is None or name in self.only]
        return placed, rows, torch.full((len(result.x),), -1).index_put((order,), own)


def ungraded_rows(
    attack: str, round: int, client: int, result: Reconstruction, examples: int, other: int | None, metric: str
) -> list[ScoreRecord]:
    """Rows of a reconstruction without its truth: its objective, or that there is nothing to grade.

    Args:
        other: the client of the baseline wrong_client(attack), where there is one.
        metric: the main one.
    """
    spent, objective = (result.status, result.seconds), result.objective if math.isfinite(result.objective) else None
    rows = [ScoreRecord(round, client, attack, WHOLE_BATCH, OBJECTIVE, objective, *spent)]
    graded = [(client, attack), *([] if other is None else [(other, wrong_client(attack))])]
    if not came_back(result.x):
        rows += [ScoreRecord(round, *of, i, metric, None, *spent) for of in graded for i in range(examples)]
    return rows
