"""The likelihood ratio of a candidate: in the batch or not, under the chain's own density and an unknown rest of the batch.

The rest of the batch is a sum of gradients of the population, taken to be normal: its mean, principal axes and what is left in
every entry come from public examples. To an entry of this sum the chain adds its noise, or shows only its sign, or drops it.
Each entry then gives a score, the slope of log p(seen) by the expected update, and an information, so that with the axes

    log p(seen | candidate) - log p(seen | another) = <change, w> - |change|^2_P / 2,   w = P-weighted residual,

where change is what the candidate moves in the expected update. For normal noise this is exact. For others it is the step of
the score test, exact to first order in the change.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal

from fedgauge.attacks.base import Wave
from fedgauge.attacks.membership.gradients import CandidateGradients, flattened
from fedgauge.client.chain import Chain
from fedgauge.client.training import local_sgd
from fedgauge.client.transforms import Link, UpdateDistribution, is_per_example
from fedgauge.client.update import Batch

AXES = 32  # principal axes of the population's gradients, at most a quarter of the public examples
POPULATION = 2**27  # numbers of public gradients that are held at once
EVEN = 0.1  # part of an entry's variance that is taken from its tensor's mean, as few examples leave some entries without any
LEAST = 1e-12  # variance of an entry, in parts of the largest gradient's square


@dataclass(frozen=True, eq=False)
class RestOfBatch:
    """What the server knows of the examples beside a candidate, as gradients that enter the mean.

    Args:
        mean: (d,) of one of them.
        instead: (d,) expected gradient of who stands in the candidate's place if it is not in the batch.
        axes: (r, d) orthonormal; variances: (r,) of one example's gradient along them.
        entries: (d,) variance of each entry beside the axes.
    """

    mean: Tensor
    instead: Tensor
    axes: Tensor
    variances: Tensor
    entries: Tensor

    @classmethod
    def of_population(cls, public: CandidateGradients, axes: int = AXES) -> "RestOfBatch":
        """Unknown examples like these public ones."""
        width = sum(t.numel() for t in public.params.values())
        count = max(2, min(len(public), POPULATION // width))
        if len(public) < 2:
            raise ValueError(f"the rest of the batch is estimated from at least 2 public examples, got {len(public)}")
        first = CandidateGradients(public.known, public.params, Batch(*(t[:count] for t in public.batch)))
        rows = torch.cat(list(first.rows())) * first.kept[:, None].float()
        mean = rows.mean(0)
        rows -= mean
        whole = rows.square().mean(0)
        variances, turns = torch.linalg.eigh((rows @ rows.T).double() / count)
        found = variances > 1e-6 * variances[-1]
        found[: -max(1, min(axes, count // 4))] = False
        variances, turns = variances[found], turns[:, found]
        along = turns.T.float() @ rows / (count * variances).sqrt()[:, None].float()
        left = (whole - (along.square() * variances[:, None].float()).sum(0)).clamp_min(0)
        parts = left.split([t.numel() for t in public.params.values()])
        entries = torch.cat([(1 - EVEN) * part + EVEN * part.mean() for part in parts])
        return cls(mean, mean, along, variances.float(), entries)

    @classmethod
    def known(cls, others: CandidateGradients) -> "RestOfBatch":
        """Exactly these other examples; without the candidate, the mean over the batch lacks its term."""
        total = sum((rows * kept[:, None]).sum(0) for rows, kept in _with_kept(others))
        width = sum(t.numel() for t in others.params.values())
        mean = torch.as_tensor(total) / max(len(others), 1) if len(others) else torch.zeros(width)
        none = torch.zeros_like(mean)
        return cls(mean, none, mean.new_zeros(0, len(mean)), mean.new_zeros(0), none)


def _with_kept(candidates: CandidateGradients) -> "list[tuple[Tensor, Tensor]]":
    rows = list(candidates.rows())
    return list(zip(rows, candidates.kept.to(rows[0]).split([len(r) for r in rows]), strict=True)) if rows else []
