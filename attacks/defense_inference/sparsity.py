"""Pruning and masks: entries are zero that no network makes zero."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributions import Binomial

from fedgauge.attacks.defense_inference.evidence import (
    FEW,
    Inferred,
    TensorEvidence,
    UpdateEvidence,
    live_by_neighbours,
)

AGAINST = 20.0  # nats against pruning by a count that it cannot leave


def find_sparsity(read: UpdateEvidence) -> Inferred | None:
    if not read.holes:
        return None
    zeros = f"{read.holes:,} of {sum(t.live for t in read.certain):,} entries that no network makes zero are zero"
    if (keeps := _common_keep(read.every)) is not None:
        keep = _roundest(*keeps, [t for t in read.every if t.pierced])
        evidence = f"{zeros}; every tensor keeps a share from {keeps[0]:.6g} to {keeps[1]:.6g} of its entries, or fewer"
        return read.verdict("prune", {"keep": keep}, evidence)
    if _counts(read) < 0:
        # no tensor keeps less than each of those that were summed, and most keep more
        keep = min(1.0, *(t.share for t in read.certain if t.pierced))
        evidence = f"{zeros}; large entries are left, in counts that differ: several prunings were summed"
        return read.summed("prune", {"keep": keep}, evidence)
    evidence = f"{zeros}; the other entries lie anywhere, small as well as large ones"
    common = _shared(read, _share(read, 1))
    keep = _share(read, len(read.updates) if common is None else 1)
    if common is None:
        return read.verdict("mask", {"keep": keep}, evidence)
    evidence += f"; the same entries in all {len(read.updates)} updates: a public mask"
    return read.verdict("mask", {"keep": keep}, evidence, common)


def _common_keep(tallies: Sequence[TensorEvidence]) -> tuple[float, float] | None:
    """The lowest and the highest keep that explain every tensor's count; None if there are none.

    Pruning keeps max(1, round(keep * size)) entries and those tied with the last of them, or fewer if the gradient has fewer.
    """
    pierced = [t for t in tallies if t.pierced]
    low, densest = 0.0, pierced[0]
    for t in tallies:
        if t.seen > t.tied and (t.seen - t.tied + 0.5) / t.size > low:
            low, densest = (t.seen - t.tied + 0.5) / t.size, t
    high = min(1.0, *((t.seen + 0.5) / t.size for t in pierced))
    if low > high or any(t.seen == 0 for t in pierced):
        return None
    # that the densest tensor lies between the others' limits is hardly a coincidence
    return low, min(high, (densest.seen + 0.5) / densest.size)


def _roundest(low: float, high: float, pierced: Sequence[TensorEvidence]) -> float:
    """The keep with the fewest digits between two limits that leaves the observed counts: people choose round numbers."""
    middle = (low + high) / 2
    rounded = (float(f"{middle:.{digits}g}") for digits in range(1, 16))
    fitting = (r for r in rounded if low <= r <= high and all(t.fits(r) for t in pierced))
    return next(fitting, middle)


def _counts(read: UpdateEvidence) -> float:
    """Nats by which the tensors' counts favour a mask over pruning, which leaves between keep and `rows` times keep."""
    pierced = [t for t in read.certain if t.pierced]
    low = min((t.seen + 0.5) / t.size for t in pierced)
    most = [read.rows * max(1, round(low * t.size)) for t in read.every]
    if any(t.seen == 0 for t in pierced) or any(t.seen - t.tied > m for t, m in zip(read.every, most, strict=True)):
        return AGAINST
    counts = ((t.live, t.shown) for t in read.certain)
    live, shown = (torch.tensor(part, dtype=torch.float64) for part in zip(*counts, strict=True))
    any_count = (min(1.0, read.rows * low) - low) * live + 1
    return float((Binomial(live, shown.sum() / live.sum()).log_prob(shown) + any_count.log()).sum())


def _share(read: UpdateEvidence, masks: int) -> float:
    """The share that this many masks keep: other zeros only lower it, so the densest set of enough entries decides."""
    places = [(sum(t.shown for t in read.certain), sum(t.live for t in read.certain))]
    places += [(sum(t.seen for t in ts), sum(t.size for t in ts)) for ts in zip(*read.tallies, strict=True)]
    for name in read.layers.linear:
        neighboured = [(u[name][live_by_neighbours(u[name])] != 0) for u in read.updates if name in u]
        places.append((sum(int(s.sum()) for s in neighboured), sum(len(s) for s in neighboured)))
    copies = len(read.updates) / masks
    seen, size = max((p for p in places if p[1]), key=lambda place: _at_least(place[0] / copies, place[1] / copies))
    return seen / size


def _at_least(seen: float, size: float) -> float:
    """Wilson's lower limit of a share at 3 standard errors, since many sets are compared."""
    share, z = seen / size, 3.0
    spread = math.sqrt(share * (1 - share) / size + z**2 / (4 * size**2))
    return (share + z**2 / (2 * size) - z * spread) / (1 + z**2 / size)


def _shared(read: UpdateEvidence, keep: float) -> dict[str, Tensor] | None:
    """The entries that are nonzero in any update, if all have their zeros in the same places; else None."""
    seen = [torch.cat([(t != 0).flatten() for t in u.values()]) for u in read.updates]
    live = [torch.cat([t.flatten() for t in read.layers.live(u, read.rows).values()]) for u in read.updates]
    both = either = 0
    for sure in (True, False):  # entries that are never zero without a defense, if they are enough
        if either < FEW:
            pairs = zip(pairwise(seen), pairwise(live), strict=True)
            shown = [(a[among], b[among]) for (a, b), (la, lb) in pairs for among in [la & lb if sure else a | b]]
            both, either = (sum(int(op(a, b).sum()) for a, b in shown) for op in (torch.logical_and, torch.logical_or))
    by_chance = keep / (2 - keep)
    if not either or both / either < (1 + by_chance) / 2:
        return None
    return {k: torch.stack([u[k] != 0 for u in read.updates]).any(0) for k in read.updates[0]}
