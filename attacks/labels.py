"""Label restoration: the classifier's gradient betrays the labels before any image is known."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from attacks.base import Knowledge, Wave
from client.models import last_linear
from client.update import Params, Update

Restore = Callable[[Update, Params, Knowledge], Tensor]


def restore(wave: Wave, known: Knowledge) -> Tensor:
    """Labels (K, B) int64, each row sorted: given ones where the attacker has them, iDLG for one example, else iLRG.

    Raises:
        ValueError: the model has no fully connected classifier (iLRG: with bias).
    """
    if known.labels is not None:
        return known.labels
    method = idlg if known.batch_size == 1 else ilrg
    return torch.stack([method(wave.alone(k), wave.params, known) for k in range(len(wave))])


def idlg(update: Update, params: Params, known: Knowledge) -> Tensor:
    """The label (1,) of a single example: the only class whose logit the gradient wants raised (Zhao et al., 2020).

    The classifier's bias gradient p_i - [i = y] is negative for the true class alone; without a bias the row sums of
    its weight gradient serve, for features that are not negative.
    """
    layer = last_linear(known.model)
    weight, bias = update[f"{layer}.weight"], update.get(f"{layer}.bias")
    raised = bias if bias is not None else weight.sum(1)  # an update is minus the gradient
    return raised.argmax()[None]


def ilrg(update: Update, params: Params, known: Knowledge) -> Tensor:
    """Labels (B,) of a batch, sorted, with repeats: instance-wise label restoration (Ma et al., iLRG, ICLR 2023).

    The mean feature of a class is estimated by e_j = dW_j / db_j, its mean prediction by p_j = softmax(W e_j + b); the
    counts k >= 0 solve sum_j k_j (p_j[i] - [i = j]) = B db_i with sum k = B in the least squares sense.
    """
    layer = last_linear(known.model)
    if f"{layer}.bias" not in update:
        raise ValueError(f"iLRG reads the bias gradient of the classifier, and {layer!r} has no bias")
    weight, bias = -update[f"{layer}.weight"].double() / known.scale, -update[f"{layer}.bias"].double() / known.scale
    safe = torch.where(bias.abs() > 1e-20, bias, torch.full_like(bias, 1e-20))
    features = weight / safe[:, None]  # (classes, features)
    logits = features @ params[f"{layer}.weight"].double().T + params[f"{layer}.bias"].double()
    predictions = torch.nan_to_num(logits, nan=0.0).softmax(1)  # (classes j, classes i)
    system = predictions.T - torch.eye(len(bias), dtype=torch.float64)
    counts = _counts(system.numpy(), (known.batch_size * bias).numpy(), known.batch_size)
    return torch.from_numpy(np.repeat(np.arange(len(bias)), counts))


def _counts(system: np.ndarray, target: np.ndarray, batch_size: int) -> np.ndarray:
    """Non-negative least squares, then whole numbers that sum to the batch size by largest remainders."""
    from scipy.optimize import nnls

    rows = np.vstack([system, np.full((1, system.shape[1]), 1.0)])
    solution, _ = nnls(rows, np.append(target, float(batch_size)))
    solution = solution * (batch_size / max(float(solution.sum()), 1e-12))
    counts: np.ndarray = np.floor(solution).astype(np.int64)
    for i in np.argsort(counts - solution, kind="stable")[: batch_size - counts.sum()]:
        counts[i] += 1
    if counts.sum() != batch_size:  # a gradient without any information on labels
        counts[:] = 0
        counts[: batch_size % len(counts)] = 1
        counts += batch_size // len(counts)
    return counts
