"""Label restoration: the classifier's gradient reveals the labels before any image is known.

Each method reads only the last fully connected layer. dL/dA_i = sum_n (p_n[i] - [y_n = i]) e_n / B over features e_n, and
the same without e_n for the bias. If the update has no information there (zero, not finite), labels are spread evenly.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Generator, Tensor

from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.engine.computation import LayerCall, called, classifier_parameters, close
from fedgauge.attacks.label_rule import label_rule
from fedgauge.attacks.solved_labels import (
    NotRestored,
    Outputs,
    derivative,
    findings_of_batch,
    like_two_logits,
    outputs_of,
    solved,
)
from fedgauge.client.label_kinds import Binary, Findings, LabelKind, Mask, NoLabel
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import is_cross_entropy, is_mean
from fedgauge.client.transforms import UpdateDistribution
from fedgauge.client.update import Batch, Params, Update

SHRINK = 0.05  # of the largest bias entry: how strongly estimated class means shrink to their common mean
STARTS = (0.6, 0.8, 1.0, 1.2, 1.5)  # multiples of the largest scale that leaves no count negative
DUMMIES = 32  # images whose features and predictions stand in for the client's
TRIES = 50  # draws of an order of labels for each that is wanted
MISFIT = 0.03  # 1 - cosine between the bias gradient and what the restored counts explain; above it they are rejected


def restore(wave: Wave, known: Knowledge) -> Tensor:
    """Labels (K, B, ...), each row sorted: the given ones if the attacker has them, else restored by `auto` or a learned rule.

    If local steps take slices of the batch, sorted labels do not determine which slice holds which label: see `assignments`.

    Raises:
        ValueError: labels cannot be restored for this model or loss.
    """
    if known.labels is not None:
        return known.labels
    kind = known.label_kind
    if isinstance(kind, NoLabel):
        none = kind.trial(len(wave) * known.batch_size, known.classes).to(wave.device)
        return none.view(len(wave), -1, *none.shape[1:])
    if kind.public.dim() > 2 or isinstance(kind, Mask):
        raise NotRestored("labels of several dimensions are not restored")
    dummies = Dummies(wave.params, known)
    other = not is_cross_entropy(known.loss) or type(kind) not in (LabelKind, Binary) or _ends_otherwise(known, dummies)
    if other and not like_two_logits(known, outputs := outputs_of(*dummies.run)):
        noisy = known.chain.update_distribution != UpdateDistribution()
        if not known.chain.local.one_gradient or (known.batch_size > 1 and noisy):
            raise NotRestored("under this loss labels are restored from one gradient without noise")
        found = [_solved(wave.alone(k), wave.params, known, outputs, dummies) for k in range(len(wave))]
        return torch.stack(found).to(wave.device)
    labels = [auto(wave.alone(k), wave.params, known, dummies) for k in range(len(wave))]
    if learns(known):
        labels = _learned(wave, known, dummies, labels)
    return torch.stack(labels).to(wave.device)


def _ends_otherwise(known: Knowledge, dummies: "Dummies") -> bool:
    """Return whether several examples' logits are a known function of the classifier's outputs, such as their softmax."""
    if known.batch_size == 1 or learns(known) or isinstance(known.model, LanguageModel):
        return False
    z = torch.linspace(-1, 1, known.classes, dtype=torch.float64)[None]
    try:
        return not close(outputs_of(*dummies.run)(z).log_softmax(-1), z.log_softmax(-1))
    except NotRestored:  # the published methods may still be near
        return False


def learns(known: Knowledge) -> bool:
    """Return whether `restore` may learn a rule: the chain changes what published methods read, and there are images."""
    bare = known.chain.local.one_gradient and all(link is known.chain.local for link in known.chain.links)
    # not words, whose networks are large
    numbers = known.auxiliary is not None and known.auxiliary.x.is_floating_point()
    return not bare and numbers and not known.plain


def _learned(wave: Wave, known: Knowledge, dummies: "Dummies", labels: list[Tensor]) -> list[Tensor]:
    """The labels by a rule learned from shadow updates, where that counted more of them right on held-out ones."""

    def rows(update: Update) -> Tensor:
        weight, bias = _gradient(update, known)
        return weight if bias is None else torch.cat([weight, bias[:, None]], 1)

    rule = label_rule(known, wave.params, rows, lambda update: auto(update, wave.params, known, dummies))
    if rule is None or not rule.better:
        return labels
    seen = [rows(wave.alone(k)) for k in range(len(wave))]
    informative = [bool(r.isfinite().all() and r.any()) for r in seen]
    return [
        _labels(rule.counts(r[None])[0].numpy()) if known else y
        for r, known, y in zip(seen, informative, labels, strict=True)
    ]


def auto(update: Update, params: Params, known: Knowledge, dummies: "Dummies | None" = None) -> Tensor:
    """The method measured best (docs/papers/labels.md) for the chain and the update.

    iDLG for one example. LLG without a complete bias gradient of true magnitudes. iLRG if every example is used once, and
    for a sum of clients that trained separately, since their mean is no model that any of them had. Else the FedAvg average
    if its counts explain the bias gradient, and LLG if they do not.
    """
    if known.batch_size == 1:
        return idlg(update, params, known, dummies)
    _, bias = _gradient(update, known)
    noise = known.chain.update_distribution
    signed = known.chain.local.adaptive or (noise is not None and noise.signed)
    if bias is None or not _whole(bias) or signed:
        return llg(update, params, known, dummies)
    size, chain = known.batch_size, known.chain
    if chain.local.gradients(size) * chain.slice_of(size) <= size or chain.parts > 1:  # every example is taken once
        return ilrg(update, params, known)
    labels = ilrg(update, params, known, averaged=True)
    before, after = _systems(update, params, known)
    explained = (before + after) @ torch.bincount(labels, minlength=known.classes).double()
    believed = torch.cosine_similarity(explained, bias, dim=0) >= 1 - MISFIT
    return labels if bool(believed) else llg(update, params, known, dummies)


def idlg(update: Update, params: Params, known: Knowledge, dummies: "Dummies | None" = None) -> Tensor:
    """Return the label (1,) of a single example: the only class with a negative logit gradient (iDLG, Zhao et al., 2020).

    The bias gradient p_i - [i = y] is negative for the true class only. Without a bias, or if a defense dropped some of it,
    the weight gradient decides: by row sums for nonnegative features, else by the rows' norms, since |p_y - 1| is the sum
    of all other p_i.
    """
    weight, bias = _gradient(update, known)
    if not _telling(weight, bias):
        return _even(known)
    if bias is not None and _whole(bias):
        return bias.argmin()[None]
    features, _ = (dummies or Dummies(params, known)).passed
    return (weight.sum(1).argmin() if bool((features >= 0).all()) else weight.norm(dim=1).argmax())[None]


def llg(update: Update, params: Params, known: Knowledge, dummies: "Dummies | None" = None) -> Tensor:
    """Labels (B,) with repeats by impact and offset: Label Leakage from Gradients (Wainakh et al., 2022, LLG*).

    A class's signal is f (p_i - k_i / B). Every class with a negative signal is present, and every example adds the impact
    -f / B, estimated from the negative signals, to its class. The offset f p_i is the model's prediction on dummies:
    auxiliary images, else noise. Only ratios of signals count, so the update's scale does not matter. The signal is the
    row sum of the weight gradient for nonnegative features; else the bias gradient; else, if that is missing or partly
    dropped, the weight gradient along the mean feature of the dummies.
    """
    weight, bias = _gradient(update, known)
    if not _telling(weight, bias):
        return _even(known)
    features, predictions = (dummies or Dummies(params, known)).passed
    if bool((features >= 0).all()):
        signal = weight.sum(1)
    elif bias is not None and _whole(bias):
        signal = bias
    else:
        signal = weight @ features.mean(0)
    impact = float(signal.clamp(max=0).sum()) * (1 + 1 / known.classes) / known.batch_size
    left, counts = signal.numpy().copy(), np.zeros(known.classes, dtype=np.int64)
    for i in np.argsort(left, kind="stable")[: min(known.batch_size, int((left < 0).sum()))]:
        counts[i] += 1
        left[i] -= impact
    left += impact * known.batch_size * predictions.mean(0).numpy()
    while counts.sum() < known.batch_size:
        i = left.argmin()
        counts[i] += 1
        left[i] -= impact
    return _labels(counts)


def ilrg(
    update: Update, params: Params, known: Knowledge, outputs: Outputs | None = None, averaged: bool = False
) -> Tensor:
    """Labels (B,) with repeats: instance-wise label restoration (Ma et al., iLRG, ICLR 2023).

    The mean feature of a class is estimated by e_j = dW_j / db_j, its mean prediction by p_j = softmax(W e_j + b); the
    counts k >= 0 with sum B solve sum_j k_j (p_j[i] - [i = j]) = B db_i. Unlike in the paper, an e_j with a small
    denominator shrinks to the common mean, and db has an unknown scale unless the chain passes a gradient of this size
    unchanged: its direction determines k, since k is integer and mostly zero.

    Args:
        outputs: under another loss than the cross-entropy.
        averaged: predictions before and after local training, averaged, as for several local steps (Geng et al., 2023).
    """
    weight, bias = _gradient(update, known)
    if bias is None:
        raise NotRestored(f"iLRG reads the classifier's bias gradient, and {_classifier(known)[0]!r} has none")
    if not (_telling(weight, bias) and bias.any()):
        return _even(known)
    before, after = _systems(update, params, known, outputs)
    system = ((before + after) / 2 if averaged else before).numpy()
    if literal(update, params, known) and is_mean(known.loss, known.classes, known.label_kind):
        return _labels(_counts(system, (bias * (known.batch_size / known.scale)).numpy(), known.batch_size))
    return _labels(_counts_of_direction(system, bias.numpy(), known.batch_size))


def assignments(labels: Tensor, size: int, most: int, rng: Generator, epochs: int = 1) -> Tensor:
    """Orders (A, epochs * B) of one observation's labels (B,) that differ in which slice of `size` examples holds which label.

    Label counts do not distinguish them: an attack on `local_sgd(batch_size=size)` tries them and keeps the best by its own
    objective. Returns all of them if there are at most `most`, else `most` different random ones.

    Args:
        epochs: passes through the batch, each in its own order.
    """
    batch, found = sorted(labels.tolist()), set[tuple[int, ...]]()
    for _ in range(TRIES * most):  # of few assignments, all are drawn
        found.add(tuple(y for _ in range(epochs) for y in _drawn(batch, size, rng)))
        if len(found) == most:
            break
    return torch.tensor(sorted(found), dtype=torch.int64)


def _drawn(batch: list[int], size: int, rng: Generator) -> list[int]:
    """A random way to cut labels into slices, each slice sorted."""
    order = torch.randperm(len(batch), generator=rng).tolist()
    drawn = [batch[i] for i in order]
    return [y for i in range(0, len(batch), size) for y in sorted(drawn[i : i + size])]


def _gradient(update: Update, known: Knowledge) -> tuple[Tensor, Tensor | None]:
    """The classifier's gradient up to scale, in float64: dW (classes, features), and db (classes,) where there is one."""
    of_weight, of_bias = _classifier(known)
    weight, bias = -_exact(update[of_weight]), update.get(of_bias)
    if _is_pair(known):
        weight, bias = torch.cat([-weight, weight]), None if bias is None else torch.cat([-bias, bias])
    if len(weight) != known.classes:
        raise NotRestored(
            f"{of_weight!r}, of the last fully connected layer, has {len(weight)} outputs for {known.classes} classes"
        )
    return weight, None if bias is None else -_exact(bias)


def _is_pair(known: Knowledge) -> bool:
    """Return whether the classifier has one output z in place of two logits (0, z)."""
    return type(known.label_kind) is Binary


def _solved(update: Update, params: Params, known: Knowledge, outputs: Outputs, dummies: "Dummies") -> Tensor:
    if known.batch_size > 1 and type(known.label_kind) in (LabelKind, Binary):
        return ilrg(update, params, known, outputs)
    of_weight, of_bias = _classifier(known)
    weight, bias = (None if k not in update else -_exact(update[k]) / known.scale for k in (of_weight, of_bias))
    layer, offset = _exact(params[of_weight]), _exact(params.get(of_bias, torch.zeros(1)))
    assert weight is not None
    exact = literal(update, params, known)
    if known.batch_size == 1:
        return solved(weight, bias, layer, offset, known, outputs, exact)
    mean = is_mean(known.loss, known.classes, known.label_kind)
    if bias is None or not exact or not mean or not isinstance(known.label_kind, Findings):
        raise NotRestored("labels of this kind are restored from the whole gradient of one example")
    gradient = known.batch_size * torch.cat([weight, bias[:, None]], 1)
    features, _ = dummies.passed
    return findings_of_batch(gradient, layer, offset, known, outputs, features @ layer.T + offset)


def _classifier(known: Knowledge) -> tuple[str, str]:
    """The names of the weight and the bias of the layer that computes the logits."""
    if isinstance(known.model, LanguageModel):
        weight, bias = known.model.parts.head
        return weight, bias or ""
    try:
        return classifier_parameters(known.model, known.shape)
    except ValueError as error:
        raise NotRestored(error) from error


def _of_logits(features: Tensor, known: Knowledge, params: Params, logits: Tensor) -> Tensor:
    """Features (N, D) of the tokens with logits as outputs, for a classifier that is applied to every token."""
    if features.dim() != 3:
        return features
    of_weight, of_bias = _classifier(known)
    bias = params.get(of_bias)
    outs = features @ _exact(params[of_weight]).T + (0 if bias is None else _exact(bias))
    token = (outs - logits[:, None]).norm(dim=2).argmin(1)
    return features[torch.arange(len(features)), token]


def _exact(t: Tensor) -> Tensor:
    return t.detach().to("cpu", torch.float64)


def _whole(bias: Tensor | None) -> bool:
    return bias is not None and bool((bias != 0).all())


def _telling(weight: Tensor, bias: Tensor | None) -> bool:
    total = weight.abs().sum() + (0 if bias is None else bias.abs().sum())
    return bool(total.isfinite() and total > 0)


def _even(known: Knowledge) -> Tensor:
    return (torch.arange(known.batch_size) % known.classes).sort().values


def _labels(counts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))


@dataclass(frozen=True, eq=False)
class Dummies:
    """Other images than the client's, passed through the model once for all observations that need them."""

    params: Params
    known: Knowledge

    @cached_property
    def run(self) -> tuple[LayerCall, Tensor]:
        """The classifier's call and the network's outputs (N, ...)."""
        known, params, (name, _) = self.known, self.params, _classifier(self.known)
        if known.auxiliary is not None:
            x = known.auxiliary.x[:DUMMIES]
        else:
            x = torch.rand(DUMMIES, *known.shape, generator=torch.Generator().manual_seed(0))
        like = next(iter(params.values()))
        x = x.to(like) if x.is_floating_point() else x.to(like.device)  # token ids stay numbers of words
        outputs, calls = called(known.model, params, known.normalise(x))
        return next(call for call in calls if call.weight == name), outputs

    @cached_property
    def passed(self) -> tuple[Tensor, Tensor]:
        """Features (N, D) in front of the classifier and predictions (N, classes)."""
        known, (call, logits) = self.known, self.run
        features, outs = _exact(call.input), _exact(call.output)
        if _is_pair(known):
            return features, torch.cat([-outs, outs], 1).mul(0.5).softmax(1)
        return _of_logits(features, known, self.params, _exact(logits)), _exact(logits).softmax(1)


def _systems(update: Update, params: Params, known: Knowledge, outputs: Outputs | None = None) -> tuple[Tensor, Tensor]:
    """Contribution of an example of class j to B db_i (classes i, classes j), at the weights before and after local training."""
    names = _classifier(known)
    weight, bias = _gradient(update, known)
    assert bias is not None
    weight, bias = weight / bias.abs().max(), bias / bias.abs().max()  # no under- or overflow below
    absent = bias > 0  # not empty for a nonzero bias: without noise, its entries sum to zero
    common = weight[absent].sum(0) / bias[absent].sum() if absent.any() else torch.zeros_like(weight[0])
    # the mean of each class, shrunk to that of the absent classes' rows
    features = (bias.sign()[:, None] * weight + SHRINK * common) / (bias.abs() + SHRINK)[:, None]
    w, b = (_exact(params[k]) for k in names)
    if outputs is not None:
        slopes = derivative(known, outputs, features @ w.T + b, torch.arange(known.classes)).detach()
        slopes = torch.cat([-slopes, slopes], 1) if _is_pair(known) else slopes
        return slopes.T, slopes.T
    change_w, change_b = (_exact(update[k]) for k in names)
    if _is_pair(known):
        w, b, change_w, change_b = (torch.cat([torch.zeros_like(t), t]) for t in (w, b, change_w, change_b))
    return _system(features, w, b), _system(features, w + change_w, b + change_b)


def _system(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    predictions = torch.nan_to_num(features @ weight.T + bias, nan=0.0).softmax(1)  # (classes j, classes i)
    return predictions.T - torch.eye(len(bias), dtype=torch.float64)


def literal(update: Update, params: Params, known: Knowledge) -> bool:
    """Return whether the update equals -scale times one mean gradient: the chain limits no gradient this large.

    Tested on the chain itself with a nearly constant gradient. Its norm is B times the mean's, since single examples'
    gradients are larger than their mean and may be clipped one by one.
    """
    if not known.chain.local.one_gradient:
        return False
    size = torch.stack([_exact(t).square().sum() for t in update.values()]).sum().sqrt()
    entries = sum(t.numel() for t in update.values())
    entry = float(size) / known.scale * known.batch_size / entries**0.5
    nearly_one = {k: torch.linspace(0.9, 1.1, t.numel(), dtype=torch.float64) for k, t in update.items()}
    probe = {k: nearly_one[k].view(t.shape) * entry for k, t in update.items()}
    batch = Batch(torch.zeros(known.batch_size, *known.shape), torch.zeros(known.batch_size, dtype=torch.int64))
    passed = known.chain.mean(lambda params, batch, rng: probe)(params, batch, None)
    return all(torch.allclose(passed[k], -known.scale * g, rtol=1e-4, atol=0.0) for k, g in probe.items())


def _counts(system: np.ndarray, target: np.ndarray, batch_size: int) -> np.ndarray:
    """Integers k >= 0 of sum B with system k ~ target: non-negative least squares, then largest remainders."""
    solution = _non_negative(system, target, 1.0, float(batch_size))
    solution = solution * (batch_size / max(float(solution.sum()), 1e-12))
    counts: np.ndarray = np.floor(solution).astype(np.int64)
    for i in np.argsort(counts - solution, kind="stable")[: batch_size - counts.sum()]:
        counts[i] += 1
    return counts


def _counts_of_direction(system: np.ndarray, direction: np.ndarray, batch_size: int) -> np.ndarray:
    """Integers k >= 0 of sum B with system k as parallel as possible to a direction: the scale is free.

    Real k would not be unique. The system has rank classes - 1, so every scale up to the one at which a count falls to zero
    fits exactly. With absent classes the truth is near that largest scale; from there exchanges improve it.
    """
    direction = direction / np.abs(direction).max()
    largest = batch_size / max(float(_non_negative(system, direction, 1e-3, 0.0).sum()), 1e-12)
    starts = [_counts(system, part * largest * direction, batch_size) for part in STARTS]
    improved = [_exchanged(system.T @ system, system.T @ direction, k) for k in starts]
    return max(improved, key=lambda pair: pair[0])[1]


def _exchanged(gram: np.ndarray, products: np.ndarray, counts: np.ndarray) -> tuple[float, np.ndarray]:
    """Replace one example's class at a time while that turns system k towards the direction: (cosine up to scale, k)."""
    size = gram.diagonal()
    best = float(products @ counts / np.sqrt(max(counts @ gram @ counts, 1e-24)))
    while True:
        along = gram @ counts
        norms = counts @ along + size[:, None] + size - 2 * gram + 2 * (along - along[:, None])  # of k - e_i + e_j
        cosines = (products @ counts + products - products[:, None]) / np.sqrt(np.maximum(norms, 1e-24))
        cosines[counts == 0] = -np.inf
        i, j = np.unravel_index(cosines.argmax(), cosines.shape)
        if cosines[i, j] <= best + 1e-12:
            return best, counts
        best, counts = float(cosines[i, j]), counts.copy()
        counts[i] -= 1
        counts[j] += 1


def _non_negative(system: np.ndarray, target: np.ndarray, weight: float, total: float) -> np.ndarray:
    """Least squares of system k ~ target and weight * sum(k) ~ weight * total over k >= 0."""
    from scipy.optimize import nnls

    rows = np.vstack([system, np.full((1, system.shape[1]), weight)])
    solution: np.ndarray = nnls(rows, np.append(target, weight * total))[0]
    return solution
