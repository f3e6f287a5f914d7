"""How far a client's rates and steps add up, where neither is known: read from its update of the classifier.

Down the cross-entropy the bias of a class moves by -s (p - q): s is the sum of the rates of all steps, p the class's mean
predicted probability, q its share of the examples. A class that no example has moves by -s p, any other by less. So of B
examples and C > B classes the C - B that moved down most, relative to p, tell s. Their rows of the weight show the examples'
mean features, and these the predictions before and after. What this misses, auxiliary batches in the client's place show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.update_measures import classifier_names
from fedgauge.client.federation import Federation
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.rng import generator
from fedgauge.client.training import local_sgd
from fedgauge.client.update import Batch, Params, Update

SHADOWS = 12  # auxiliary batches, whose estimates say how far off an estimate is
STEPS = (1, 2, 6)  # of their training, as the client's are not known
ROUNDS = 3  # in which the estimate is corrected by them
MARGIN = 1.3  # beyond the widest of them


@dataclass(frozen=True)
class RateTimesSteps:
    """The sum of the rates of a client's steps, momentum included, with an interval."""

    value: float
    low: float
    high: float

    @property
    def words(self) -> str:
        return f"{self.value:.2g} ({self.low:.2g} to {self.high:.2g})"


def rate_times_steps(fed: Federation, seen: Observation) -> RateTimesSteps | None:
    """What an update says of the sum of its rates. None: too few classes are absent, or the network has no classifier's bias.

    Args:
        seen: an update that is a sum of gradients.
    """
    size, classes = fed.shards.batch_size, fed.shards.dataset.classes
    names, own = classifier_names(fed, seen), fed.shards.auxiliary_batch()
    if len(names) < 2 or not is_cross_entropy(fed.loss) or size >= classes or len(own.x) < 2 * size:
        return None
    fed.load_buffers(seen.buffers)
    found = _estimate(seen.update, seen.params, names, classes - size)
    if found is None:
        return None
    rng, value = generator("rate and steps"), found
    for _ in range(ROUNDS):
        ratios = []
        for k in range(SHADOWS):
            rows, steps = torch.randperm(len(own.x), generator=rng)[:size], STEPS[k % len(STEPS)]
            batch = Batch(own.x[rows], own.y[rows])
            shadow = local_sgd(value / steps, steps)(fed.gradient)(seen.params, batch, None)
            again = _estimate(shadow, seen.params, names, classes - size)
            if again is None:
                return None
            ratios.append(again / found)
        value /= median(ratios)
    low, high = (median(ratios) / edge for edge in (max(ratios), min(ratios)))
    return RateTimesSteps(value, value * low / MARGIN, value * high * MARGIN)


def _estimate(update: Update, params: Params, names: Sequence[str], absent: int) -> float | None:
    """The estimate without correction, from the rows of the classes that moved down; None where they say nothing."""
    (weight, bias), (w, b) = ([part[name].double() for name in names] for part in (update, params))
    down = bias < 0
    if not down.any():
        return None
    features = weight[down].sum(0) / bias[down].sum()
    before, after = ((v @ features + c).softmax(0) for v, c in ((w, b), (w + weight, b + bias)))
    value = float((-2 * bias / (before + after)).topk(absent).values.median())
    return value if 0 < value < torch.inf else None
