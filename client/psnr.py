"""PSNR and pairing, shared by the simulator's grader and by clients that grade at home."""

import math

import torch
from torch import Tensor

PSNR_CAP = 60.0  # means and clients' answers are capped here; a ledger keeps the raw value, infinite for an exact hit


def assigned(costs: Tensor) -> Tensor:
    """Order (n,) that gives each row of costs (n, m), n at most m, a column of its own at the least total (Hungarian)."""
    from scipy.optimize import linear_sum_assignment

    return torch.from_numpy(linear_sum_assignment(costs.double().cpu().numpy())[1])


def match(truth: Tensor, guess: Tensor) -> Tensor:
    """Order (B,) that pairs guess[order[i]] with truth[i], one to one, at the least total squared error.

    Exact hits are always paired: where other guesses are far off, the least total by itself could separate them.
    """
    cost = (truth.flatten(1)[:, None] - guess.flatten(1)[None]).square().mean(2).double()
    exact = cost <= 10 ** (-PSNR_CAP / 10)
    cost = torch.where(exact, cost - len(cost) * cost.max(), cost)
    return assigned(cost)


def in_db(error: float) -> float:
    """The PSNR of a mean squared error, at most PSNR_CAP."""
    return -10 * math.log10(max(error, 10 ** (-PSNR_CAP / 10)))


def mse_of(truth: Tensor, guess: Tensor) -> Tensor:
    """Mean squared error over an image's pixels."""
    return (truth.double() - guess.double()).square().flatten(1).mean(1)


def psnr_of(truth: Tensor, guess: Tensor) -> Tensor:
    """Peak signal-to-noise ratio for a range of 1: -10 log10 MSE; infinite for an exact hit."""
    return -10 * mse_of(truth, guess).log10()
