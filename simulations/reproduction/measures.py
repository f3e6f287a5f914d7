"""Measures: the figures of a paper's table, each with a 95 % interval."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fedgauge.attacks.modality.image_metrics import PSNR_CAP
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.server.views.intervals import Floats, Ints, Rate, clustered_interval
from fedgauge.server.views.leakage import leakage_of_all
from fedgauge.server.views.scores import Mask, Scores, capped

BOOTSTRAP_DRAWS = 2000  # for the interval of a ratio
SUCCESS_MSE = 1e-3  # mean squared error below which an image counts as recovered


@dataclass(frozen=True)
class ComparedFigure:
    """One of our figures, compared with the paper's.

    Args:
        cell, attack, metric: what was measured.
        reference, spread: the paper's figure and standard deviation, or the bound; None if it gives none.
        here, low, high: our figure and its 95 % interval; no interval from a single update.
        n: images, or inputs; of a limit on the error the public images that it was computed from.
        floor: score of the first baseline (the mean public image, random words ...), without an attack.
        budget: ours, and the paper's where it differs.
        note: failed attacks, which count as a blank guess; training.
    """

    cell: str
    attack: str
    metric: str
    reference: float | None
    here: float | None
    low: float | None
    high: float | None
    n: int
    spread: float | None = None
    floor: float | None = None
    budget: str = ""
    note: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class AttackOutcome:
    """One attack's scores on n updates of B examples each, its cost, and the score of a guess that reads no update.

    Args:
        scores: of this attack only; each update has a separate client.
        iterations: (n,) spent on each update.
        failed: attacks that reconstructed nothing; reasons: why.
        floor: score of the first baseline, by metric.
        isolated: for each batch, the example that the server attack isolates.
    """

    scores: Scores
    iterations: Floats
    failed: int
    seconds: float
    floor: Mapping[str, float]
    reasons: tuple[str, ...] = ()
    isolated: tuple[int, ...] | None = None

    def values(self, metric: str) -> Floats:
        """(n, B) as they enter a mean."""
        return capped(metric, self.scores.of_metric(metric).value).reshape(len(self.iterations), -1)

    @property
    def psnr(self) -> Floats:
        return self.values("psnr")

    @property
    def examples(self) -> int:
        """The number of attacked images or sentences; of what is measured of whole batches only, that of batches."""
        single = self.scores.where(self.scores.example != WHOLE_BATCH)
        return len(np.unique((single if len(single) else self.scores).example_keys()))


Interval = tuple[float | None, float | None, float | None]  # value, low, high
Measure = Callable[[AttackOutcome, AttackOutcome | None], Interval]
NOTHING: Interval = (None, None, None)


def mean_of(scores: Scores, metric: str) -> Interval:
    """A metric's mean as a run has it, with its interval clustered by update."""
    return next(((leak.mean, leak.low, leak.high) for leak in leakage_of_all(scores, metric)), NOTHING)


def _rate(hits: Mask) -> Interval:
    """The fraction of hits (n,), with its Wilson interval."""
    rate = Rate(int(hits.sum()), len(hits))
    return rate.fraction, *rate.interval


def _clustered(values: Floats, updates: Ints, whole: float | None = None) -> Interval:
    if not len(values):
        return NOTHING
    return float(values.mean()), *(clustered_interval(values, updates, whole=whole) or (None, None))


def _succeeded(outcome: AttackOutcome) -> Mask:
    """(n,) whether every image of an update was recovered."""
    recovered: Mask = np.all(outcome.values("mse") < SUCCESS_MSE, axis=1)
    return recovered


def _psnr_of(outcome: AttackOutcome, chosen: Ints) -> Interval:
    """Mean PSNR of one example (n,) of each update."""
    n, size = outcome.psnr.shape
    return mean_of(outcome.scores.of_metric("psnr").where(size * np.arange(n) + chosen), "psnr")


def _isolated_psnr(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    """PSNR of the example that the server attack isolates, in its one-to-one pair; the others do not count."""
    return NOTHING if outcome.isolated is None else _psnr_of(outcome, np.array(outcome.isolated))


def _verbatim(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    n, size = outcome.psnr.shape
    return _clustered((outcome.psnr >= PSNR_CAP).astype(float).flatten(), np.repeat(np.arange(n), size), whole=1.0)


def _iterations(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    spent = outcome.iterations[_succeeded(outcome)]
    return _clustered(spent, np.arange(len(spent)))


def _success_gain(outcome: AttackOutcome, against: AttackOutcome | None) -> Interval:
    """Return the gain in successes over the other attack, in percent."""
    assert against is not None
    ours, theirs = (_succeeded(o).astype(float) for o in (outcome, against))
    return _paired(lambda w: 100 * ((w @ ours) / (w @ theirs) - 1), len(ours))


def _psnr_gain(outcome: AttackOutcome, against: AttackOutcome | None) -> Interval:
    """Return the mean difference in PSNR from the other attack, image by image."""
    assert against is not None
    n, size = outcome.psnr.shape
    return _clustered((outcome.psnr - against.psnr).flatten(), np.repeat(np.arange(n), size))


def _iterations_saved(outcome: AttackOutcome, against: AttackOutcome | None) -> Interval:
    """Return the iterations saved for a success compared with the other attack, in percent."""
    assert against is not None
    (ours, succeeded), (theirs, others) = (
        (o.iterations * _succeeded(o), _succeeded(o).astype(float)) for o in (outcome, against)
    )
    return _paired(lambda w: 100 * (1 - (w @ ours) / (w @ succeeded) / ((w @ theirs) / (w @ others))), len(ours))


def _paired(ratio: Callable[[np.ndarray], np.ndarray], n: int) -> Interval:
    """A ratio of sums over images, with its paired bootstrap interval; None if it divides by zero."""
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), BOOTSTRAP_DRAWS).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, drawn = float(ratio(np.ones(n))), ratio(weights)
    if not np.isfinite(value):
        return NOTHING
    drawn = drawn[np.isfinite(drawn)]
    if n < 2 or not len(drawn):
        return value, None, None
    low, high = np.quantile(drawn, (0.025, 0.975))
    return value, float(low), float(high)


# measures that are no means of a metric, each with the metric that it reads
DERIVED: Mapping[str, tuple[str, Measure]] = {
    "best_psnr": ("psnr", lambda outcome, _: _psnr_of(outcome, outcome.psnr.argmax(1))),
    "isolated_psnr": ("psnr", _isolated_psnr),
    "success": ("mse", lambda outcome, _: _rate(_succeeded(outcome))),
    "exact": ("psnr", lambda outcome, _: _rate(np.all(outcome.psnr >= PSNR_CAP, axis=1))),
    "verbatim": ("psnr", _verbatim),
    "iterations": ("mse", _iterations),
    "psnr_gain": ("psnr", _psnr_gain),
    "success_gain": ("mse", _success_gain),
    "iterations_saved": ("mse", _iterations_saved),
}
RENAMED = {"exact_sentence": "exact"}  # of sentences: of images, `exact` is a measure


def all_measures() -> tuple[str, ...]:
    return (*DERIVED, *RENAMED, *(m for m in MEASURED if m not in DERIVED and m != "label_accuracy"))


def metric_of(measure: str) -> str:
    return DERIVED[measure][0] if measure in DERIVED else RENAMED.get(measure, measure)


def measured(measure: str, outcome: AttackOutcome, against: AttackOutcome | None) -> Interval:
    """A measure of an attack's outcome; without a value where its metric does not apply."""
    if measure in DERIVED:
        return DERIVED[measure][1](outcome, against)
    return mean_of(outcome.scores, metric_of(measure))
