"""The replay check: recompute one update from the true batch, to find a mismatch before it is attacked."""

import math
from dataclasses import dataclass

import torch

from fedgauge.attacks.base import Observation
from fedgauge.client.federation import Federation

TOLERANCE = 1e-4  # relative; float32 rounding on other machines' kernels stays far below


@dataclass(frozen=True)
class ReplayCheck:
    """The comparison of a recomputed update with the one that the server saw.

    Args:
        cosine: between the two; 1 for the same direction.
        relative_error: |recomputed - seen| / |seen|.
        verdict: "exact to rounding", or what to compare.
    """

    round: int
    client: int
    cosine: float
    relative_error: float
    verdict: str

    @property
    def ok(self) -> bool:
        return self.relative_error <= TOLERANCE


def replay(federation: Federation, seen: Observation) -> ReplayCheck:
    """Recompute an observation through the whole chain with the client's seed, and compare the two."""
    if missing := set(seen.update) ^ {name for name, _ in federation.model.named_parameters()}:
        return ReplayCheck(seen.round, seen.client, 0.0, math.inf, f"names differ: {', '.join(sorted(missing))}")
    recomputed = federation.client_update(seen.params, seen.buffers, seen.client, seen.round)
    ours, theirs = (torch.cat([u[k].flatten() for k in seen.update]).double() for u in (recomputed, seen.update))
    difference, size, own = (float(t.norm()) for t in (ours - theirs, theirs, ours))
    error = difference / size if size else math.inf if difference else 0.0
    cosine = float(ours @ theirs) / (own * size) if own * size else float(own == size)  # two zero updates agree
    if error <= TOLERANCE:
        verdict = "exact to rounding"
    elif cosine > 1 - 1e-6:
        verdict = f"same direction, {size / own:.6g} times the size: the learning rate or the loss's scale differs"
    else:
        verdict = "they differ: compare seed, data order, normalisation, model, mode, chain and versions on both sides"
    return ReplayCheck(seen.round, seen.client, cosine, error, verdict)
