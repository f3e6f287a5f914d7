"""Measures: the figures of a paper's table, each with a 95 % interval."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgauge.attacks.modality.base import Modality
from fedgauge.attacks.modality.image_metrics import AUGMENTED, PSNR_CAP
from fedgauge.attacks.modality.registry import HIGHER_IS_BETTER
from fedgauge.attacks.modality.sentences import SentenceModality
from fedgauge.server.views.intervals import Rate, clustered_interval

BOOTSTRAP_DRAWS = 2000  # for the interval of a ratio
SUCCESS_MSE = 1e-3  # mean squared error below which an image counts as recovered


@dataclass(frozen=True, eq=False)
class AttackOutcome:
    """One attack's scores on every update, its cost, and the score of a guess that reads no update.

    Args:
        scores: (n, B) each, by metric.
        failed: attacks that reconstructed nothing; reasons: why.
        floor: score of the mean public image, or of random words, by metric.
        isolated: for each batch, the example that the server attack isolates.
    """

    scores: Mapping[str, Tensor]
    iterations: Tensor
    failed: int
    seconds: float
    floor: Mapping[str, float]
    reasons: tuple[str, ...] = ()
    isolated: tuple[int, ...] | None = None

    @property
    def psnr(self) -> Tensor:
        return self.scores["psnr"]

    @property
    def mse(self) -> Tensor:
        return self.scores["mse"]

    @property
    def examples(self) -> int:
        """The number of attacked images or sentences."""
        return next(iter(self.scores.values())).numel()


Interval = tuple[float | None, float | None, float | None]  # value, low, high
Measure = Callable[[AttackOutcome, AttackOutcome | None], Interval]


def _mean(values: Tensor) -> Interval:
    """Mean over images, with its interval clustered by update."""
    flat = values.flatten().numpy()
    interval = clustered_interval(flat, np.arange(len(values)).repeat(values[0].numel()))
    return float(flat.mean()), *(interval or (None, None))


def _rate(hits: Tensor) -> Interval:
    """The fraction of hits (n,), with its Wilson interval."""
    rate = Rate(int(hits.sum()), len(hits))
    return rate.fraction, *rate.interval


def _succeeded(outcome: AttackOutcome) -> Tensor:
    """(n,) whether every image of an update was recovered."""
    return (outcome.mse < SUCCESS_MSE).all(1)


def _success(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    return _rate(_succeeded(outcome))


def _exact(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    """The rate of updates whose images were all recovered verbatim: to 60 dB or more."""
    return _rate((outcome.psnr >= PSNR_CAP).all(1))


def _isolated_psnr(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    """PSNR of the example that the server attack isolates, in its one-to-one pair; the others do not count."""
    if outcome.isolated is None:
        return None, None, None
    return _mean(outcome.psnr.gather(1, torch.tensor(outcome.isolated)[:, None]))


def _verbatim(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    """The fraction of single images that were recovered verbatim."""
    return _mean((outcome.psnr >= PSNR_CAP).double())


def _iterations(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    """Mean iterations of the attacks that succeeded."""
    succeeded = _succeeded(outcome)
    return _mean(outcome.iterations[succeeded][:, None]) if bool(succeeded.any()) else (None, None, None)


def _success_gain(outcome: AttackOutcome, against: AttackOutcome | None) -> Interval:
    """How many more updates succeed than with the other attack, in percent of the other's."""
    assert against is not None
    ours, theirs = (_succeeded(o).double().numpy() for o in (outcome, against))
    return _paired(lambda w: 100 * ((w @ ours) / (w @ theirs) - 1), len(ours))


def _iterations_saved(outcome: AttackOutcome, against: AttackOutcome | None) -> Interval:
    """How many fewer iterations a success takes than with the other attack, in percent of the other's."""
    assert against is not None
    (ours, succeeded), (theirs, others) = (
        (o.iterations.numpy() * _succeeded(o).numpy(), _succeeded(o).double().numpy()) for o in (outcome, against)
    )
    return _paired(lambda w: 100 * (1 - (w @ ours) / (w @ succeeded) / ((w @ theirs) / (w @ others))), len(ours))


def _paired(ratio: Callable[[np.ndarray], np.ndarray], n: int) -> Interval:
    """A ratio of sums over images, with its paired bootstrap interval; None if it divides by zero."""
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), BOOTSTRAP_DRAWS).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, drawn = float(ratio(np.ones(n))), ratio(weights)
    if not np.isfinite(value):
        return None, None, None
    drawn = drawn[np.isfinite(drawn)]
    if n < 2 or not len(drawn):
        return value, None, None
    low, high = np.quantile(drawn, (0.025, 0.975))
    return value, float(low), float(high)


def _best(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    """Mean PSNR of each update's best image."""
    return _mean(outcome.psnr.amax(1, keepdim=True))


# measures that are no means of a metric, each with the metric that it reads
DERIVED: Mapping[str, tuple[str, Measure]] = {
    "best_psnr": ("psnr", _best),
    "isolated_psnr": ("psnr", _isolated_psnr),
    "success": ("mse", _success),
    "exact": ("psnr", _exact),
    "verbatim": ("psnr", _verbatim),
    "iterations": ("mse", _iterations),
    "success_gain": ("mse", _success_gain),
    "iterations_saved": ("mse", _iterations_saved),
}
RENAMED = {"exact_sentence": "exact"}  # of sentences: of images, `exact` is a measure
METRICS = (*DERIVED, *RENAMED, *(m for m in HIGHER_IS_BETTER if m not in DERIVED and m != "label_accuracy"))


def metric_of(measure: str) -> str:
    """The metric that a measure reads."""
    return DERIVED[measure][0] if measure in DERIVED else RENAMED.get(measure, measure)


def measures_of(modality: Modality) -> list[str]:
    """The measures that there are of a kind of data."""
    return [measure for measure in METRICS if metric_of(measure) in modality.measured]


def measured(measure: str, outcome: AttackOutcome, against: AttackOutcome | None) -> Interval:
    """A measure of an attack's outcome; without a value where its metric does not apply."""
    if measure in DERIVED:
        return DERIVED[measure][1](outcome, against)
    scores = outcome.scores.get(metric_of(measure))
    return (None, None, None) if scores is None else _mean(scores)


UNITS = {
    **dict.fromkeys(("psnr", "isolated_psnr", "psnr" + AUGMENTED, "best_psnr"), "dB"),
    **dict.fromkeys(("success_gain", "iterations_saved", *RENAMED, *SentenceModality.measured), "%"),
}
