"""Clipping: several updates have the same norm, and none has a larger one."""

import math
from dataclasses import dataclass

import torch
from torch import Generator

from fedgauge.attacks.defense_inference.evidence import Inferred, UpdateEvidence
from fedgauge.client.transforms import UpdateTransform
from fedgauge.client.update import Update, norm

SAME_NORM = 1e-5  # relative distance at which two norms are one: float32 rounds a sum of squares by about 1e-6


def find_clip(read: UpdateEvidence) -> Inferred | None:
    """A clip: several updates have one norm, which none exceeds."""
    norms = [float(norm({k: t.double() for k, t in u.items()})) for u in read.updates]
    bound = max(norms)
    at = [i for i, n in enumerate(norms) if n >= bound * (1 - SAME_NORM)]
    if len(at) < 2 or _identical(read.updates[at[0]], read.updates[at[1]]):
        return None
    evidence = f"{len(at)} of {len(norms)} updates have the norm {bound:.6g}, and none a larger one"
    return read.verdict("clip", {"max_norm": bound}, _clip(bound), evidence, (len(at) - 1) * -math.log(SAME_NORM))


def _identical(a: Update, b: Update) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


@dataclass(frozen=True)
class _clip(UpdateTransform):
    """A clip of the norm over all tensors."""

    max_norm: float

    def apply(self, update: Update, rng: Generator | None) -> Update:
        factor = (self.max_norm / norm(update).clamp_min(1e-12)).clamp(max=1.0)
        return {k: t * factor for k, t in update.items()}
