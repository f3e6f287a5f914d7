"""A rule that counts labels, learned from shadow updates: for chains that change what the published formulas read.

Behind noise, signs, dropped entries or several local steps the classifier's gradient is no longer softmax - one-hot. The
remainder can be learned: the same linear map for all classes, from a class's row of the update to how often its label occurs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.cache import TensorCache, digest
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.client.rng import generator
from fedgauge.client.update import Params, Update

UPDATES = 192  # simulated at most, a third of them held out
EXAMPLES = 4096  # in all of them together, where that leaves at least FEWEST updates
PER_IMAGE = 2  # of them from one auxiliary image on average: more of few images cost time and teach little
FEWEST = 24
COMPARED = 16  # held-out updates on which the published method's labels are compared
NUMBERS = 2**25  # entries of all their rows together: 256 MB
MOST_NUMBERS = 2**27  # of the fewest updates' rows: a wider classifier has no rule
RIDGES = tuple(10.0**e for e in range(-6, 4))  # of the mean squared length of a row
VERSION = 2  # of the cached rules; to be changed when they are fitted in another way

Rows = Callable[[Update], Tensor]  # an update -> the classifier's rows (classes, D) in float64


@dataclass(frozen=True, eq=False)
class LabelRule:
    """Counts (n, classes) >= 0 of sum B by maximum a posteriori, from the rows of n updates.

    The score of a class is linear in its row and, given the count, normal; labels are independent and uniform beforehand.

    Args:
        middle: (classes, D) the mean rows, in units of `size`, and usual: (classes,) the mean counts; weights: (D,).
        start, slope: of the mean score over the count; variances: (B + 1,) of the score, by the count.
        share: of the labels of held-out updates that the rule counted; other: that the published method counted.
    """

    size: Tensor
    middle: Tensor
    usual: Tensor
    weights: Tensor
    start: Tensor
    slope: Tensor
    variances: Tensor
    share: Tensor
    other: Tensor

    @property
    def better(self) -> bool:
        """Return whether it counted more of the held-out labels correctly than the published method."""
        return bool(self.share > self.other)

    def scores(self, rows: Tensor) -> Tensor:
        return (rows / self.size - self.middle) @ self.weights + self.usual

    def counts(self, rows: Tensor) -> Tensor:
        """(n, classes) int64 of rows (n, classes, D)."""
        k = torch.arange(len(self.variances), dtype=torch.float64)
        off = self.scores(rows)[..., None] - (self.start + self.slope * k)
        return likeliest_counts(-0.5 * (off.square() / self.variances + self.variances.log()) - torch.lgamma(k + 1))


def likeliest_counts(value: Tensor) -> Tensor:
    """The counts (n, classes) of sum B with the largest sum of values (n, classes, B + 1), by dynamic programming."""
    n, classes, most = value.shape
    best = torch.full((n, most), -math.inf, dtype=value.dtype)
    best[:, 0] = 0
    chosen = []
    for c in range(classes):
        beside = torch.full((n, most, most), -math.inf, dtype=value.dtype)  # total so far, of which this class has k
        for k in range(most):
            beside[:, k:, k] = best[:, : most - k] + value[:, c, k, None]
        best, argument = beside.max(2)
        chosen.append(argument)
    counts, left = torch.zeros(n, classes, dtype=torch.int64), torch.full((n, 1), most - 1)
    for c in reversed(range(classes)):
        counts[:, c, None] = chosen[c].gather(1, left)
        left = left - counts[:, c, None]
    return counts


def label_rule(known: Knowledge, params: Params, rows: Rows, published: Callable[[Update], Tensor]) -> LabelRule | None:
    """The rule for a threat model and weights.

    None if there are too few auxiliary images, if its updates are drawn one by one, or if the classifier is too wide.

    Args:
        published: the labels (B,) that the method to be compared with restores from an update.
    """
    images = known.public
    if len(images.y) < 2 * known.batch_size or known.chain.one_at_a_time:
        return None
    if FEWEST * rows(params).numel() > MOST_NUMBERS:
        return None
    model = (str(known.model), known.model.training, params, dict(known.model.named_buffers()))
    threat = (known.chain, known.batch_size, known.mean, known.std, known.loss)
    name = f"labels-{digest(VERSION, *model, *images, *threat)}"
    return LabelRule(**TensorCache.own().get(name, lambda: _learned(known, params, rows, published, name)))


def _learned(
    known: Knowledge, params: Params, rows: Rows, published: Callable[[Update], Tensor], name: str
) -> dict[str, Tensor]:
    images, rng = known.public, generator("label rule", name)
    order = torch.randperm(len(images.y), generator=rng)
    held = max(known.batch_size, len(order) // 4)
    parts = []
    for some, share in ((order[held:], 2 / 3), (order[:held], 1 / 3)):
        count = max(1, int(share * _updates(known, params, rows)))
        drawn = some[torch.randint(len(some), (count, known.batch_size), generator=rng)].to(images.y.device)
        parts.append(_observed(known, params, rows, published if share < 0.5 else None, drawn, rng))
    (seen, truth, _), (apart, real, others) = parts
    fitted = _fitted(seen, truth, apart, real)
    rule = LabelRule(**fitted, share=torch.tensor(0.0), other=torch.tensor(0.0))
    few = len(others)
    return {**fitted, "share": _overlap(rule.counts(apart[:few]), real[:few]), "other": _overlap(others, real[:few])}


def _updates(known: Knowledge, params: Params, rows: Rows) -> int:
    few = min(UPDATES, NUMBERS // rows(params).numel())
    return max(min(few, min(EXAMPLES, PER_IMAGE * len(known.public.y)) // known.batch_size), FEWEST)


def _observed(
    known: Knowledge,
    params: Params,
    rows: Rows,
    published: Callable[[Update], Tensor] | None,
    drawn: Tensor,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (n, classes, D) of simulated updates of auxiliary images (n, B), the true counts and the published method's."""
    x, y = (t[drawn] for t in known.public)
    found: list[Tensor] = []
    others: list[Tensor] = []
    for some in Simulator(known, params).updates(x, y, rng):
        for k in range(len(next(iter(some.values())))):
            one = {name: t[k] for name, t in some.items()}
            found.append(rows(one))
            if published is not None and len(others) < COMPARED:
                others.append(published(one))
    restored = torch.stack(others) if others else y
    return torch.stack(found), _counts(y, known.classes), _counts(restored, known.classes)


def _fitted(seen: Tensor, truth: Tensor, apart: Tensor, real: Tensor) -> dict[str, Tensor]:
    """The linear map by ridge regression, its ridge by held-out updates; and how scores spread around each count there."""
    size = seen.square().mean().sqrt().clamp_min(1e-300)
    middle = (seen / size).mean(0)
    x = (seen / size - middle).flatten(0, 1)
    usual = truth.double().mean(0)
    beside, wanted = apart / size - middle, real - usual
    tried = _by_ridge(x, (truth - usual).flatten())
    weights = min(tried, key=lambda w: float((beside @ w - wanted).square().mean().nan_to_num(math.inf)))
    scores, counts = beside @ weights + usual, real.double()
    slope = ((scores - scores.mean()) * (counts - counts.mean())).mean() / counts.var(correction=0)
    start = scores.mean() - slope * counts.mean()
    off = (scores - start - slope * counts).square()
    common = off.mean().clamp_min(1e-12)
    variances = [(off[real == k].sum() + 4 * common) / ((real == k).sum() + 4) for k in range(int(real[0].sum()) + 1)]
    return {"size": size, "middle": middle, "usual": usual, "weights": weights, "start": start, "slope": slope,
            "variances": torch.stack(variances)}  # fmt: skip


def _by_ridge(x: Tensor, wanted: Tensor) -> list[Tensor]:
    """For each of RIDGES the weights (D,) of rows x (n, D), by the smaller of x^T x and x x^T: its side is sqrt(n D) at most."""
    wide = x.shape[1] > x.shape[0]
    gram = x @ x.T if wide else x.T @ x
    unit = x.square().sum().div(x.shape[1]).clamp_min(1e-300) * torch.eye(len(gram), dtype=gram.dtype)
    if wide:
        return [x.T @ torch.linalg.solve(gram + ridge * unit, wanted) for ridge in RIDGES]
    return [torch.linalg.solve(gram + ridge * unit, x.T @ wanted) for ridge in RIDGES]


def _counts(y: Tensor, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(y.cpu(), classes).sum(1)


def _overlap(found: Tensor, real: Tensor) -> Tensor:
    return torch.minimum(found, real).sum(1).double().mean() / real[0].sum()
