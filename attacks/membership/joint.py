"""Joint membership of several candidates in one batch: what one of them explains of the update, no other has to."""

import numpy as np
import torch
from torch import Tensor

SWEEPS, SETTLING = 400, 100  # of the Gibbs sampler, and how many of them come before the first that counts


def marginal_ratios(linear: Tensor, square: Tensor, share: Tensor, seed: int) -> Tensor:
    """log p(seen | in the batch) - log p(seen | not) of each candidate, the others being as probable as the update makes them.

    Args:
        linear, square: (N,) and (N, N) of fedgauge.attacks.membership.likelihood.joint_ratios.
        share: (N,) how probable each is in the batch beforehand, above 0 and below 1.
        seed: of the sampler.

    Each one's conditional probability is averaged over a Gibbs sampler's draws of the others. (N,) float64, without a number where
    the update is none.
    """
    if not (linear.isfinite().all() and square.isfinite().all()):
        return torch.full_like(linear, torch.nan)
    rng, before = np.random.default_rng(seed), share.double().numpy()
    prior = np.log(before) - np.log1p(-before)
    pairs = square.numpy().copy()
    alone = linear.numpy() - pairs.diagonal() / 2 + prior
    np.fill_diagonal(pairs, 0.0)
    here = (rng.random(len(alone)) < before).astype(float)
    odds = alone - pairs @ here
    inside, outside = np.full(len(alone), -np.inf), np.full(len(alone), -np.inf)
    for sweep in range(SWEEPS):
        for i in rng.permutation(len(alone)):
            drawn = float(np.log(rng.random()) < -np.logaddexp(0.0, -odds[i]))
            if drawn != here[i]:
                odds -= pairs[:, i] * (drawn - here[i])
                here[i] = drawn
        if sweep >= SETTLING:
            inside = np.logaddexp(inside, -np.logaddexp(0.0, -odds))
            outside = np.logaddexp(outside, -np.logaddexp(0.0, odds))
    return torch.from_numpy(inside - outside - prior)
