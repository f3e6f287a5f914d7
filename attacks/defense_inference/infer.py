"""Infers the clients' defense from the traces that it leaves in their updates.

A sign leaves one magnitude, a clip the same norm at several clients, pruning the same share in every tensor, a mask zeros
independent of size. Zeros also occur without a defense: a unit that is off for every example has no gradient. So sparsity
is judged only where no network makes zeros. The classifier's signals p - y are never zero, hence a column of its weight is
zero as a whole or not at all; a bias is zero only with its whole row, a normalisation's weight only with its bias. One
defense is inferred; several together are reported as the first that fits.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Wave
from fedgauge.attacks.defense_inference.evidence import FEW, SAME_SIZE, Inferred, UpdateEvidence
from fedgauge.attacks.defense_inference.sparsity import find_sparsity
from fedgauge.client.training import local_sgd
from fedgauge.client.update import Update, norm

SAME_NORM = 1e-5  # relative distance at which two norms are one: float32 rounds a sum of squares by about 1e-6
RANK = 1e-5  # share of a matrix's norm beyond its rank that is more than rounding
SUBMATRIX = 512  # rows and columns that suffice to estimate a rank
BEYOND = 4  # rows and columns beyond the rank that suffice to test the rest
LEVELS = 64  # sums of up to this many signs are told apart from other values


def infer(
    updates: Wave | Sequence[Update], model: nn.Module, local: local_sgd, batch_size: int, members: int = 1
) -> Inferred:
    """The defense that explains the updates of one round or of several.

    Args:
        model: tells which tensors can have zeros without a defense.
        local: the local training, as agreed in the federation.
        batch_size: examples that a client trains on in a round.
        members: clients averaged in each update, under a secure sum.
    """
    if isinstance(updates, Wave):
        updates = [updates.alone(k) for k in range(len(updates))]
    nonzero = [u for u in updates if any(bool(t.any()) for t in u.values())]
    read = UpdateEvidence(nonzero, model, local, batch_size, members)
    if not read.updates:
        inferred = read.verdict("none", {}, "the updates are zero")
    else:
        inferred = find_sign(read) or find_sparsity(read) or find_clip(read) or find_noise(read)
    return replace(inferred, updates=len(updates))


def find_sign(read: UpdateEvidence) -> Inferred | None:
    """A sign: one magnitude everywhere, or whole multiples of a fraction of it if several signs were summed."""
    sizes = torch.cat([tally.sizes for tally in read.every]).unique().double()
    largest, count = float(sizes[-1]), sum(tally.seen for tally in read.every)
    summed = [n for n in (1, read.members, read.local.steps, read.examples, read.rows) if n <= min(LEVELS, count / FEW)]
    fitting = (n for n in summed if _are_multiples(sizes, largest / n))
    if (n := next(fitting, None)) is None:
        return None
    # opposite signs of two steps leave a zero
    if n == 1 and not (read.holes and read.local.steps % 2 == 0):
        evidence = f"all {count:,} entries that are not zero have the magnitude {largest:.4g}"
        return read.verdict("sign", {"scale": largest}, evidence)
    evidence = f"every entry is a multiple of {largest / n:.4g}, up to {n} times"
    return read.summed("sign", {"scale": largest}, f"{evidence}: signs were summed")


def _are_multiples(sizes: Tensor, unit: float) -> bool:
    return bool(((sizes / unit).round() * unit - sizes).abs().max() <= SAME_SIZE * sizes[-1])


def find_clip(read: UpdateEvidence) -> Inferred | None:
    """A clip: several updates have one norm, which none exceeds."""
    norms = [float(norm({k: t.double() for k, t in u.items()})) for u in read.updates]
    bound = max(norms)
    at = [i for i, n in enumerate(norms) if n >= bound * (1 - SAME_NORM)]
    if len(at) < 2 or all(torch.equal(t, read.updates[at[1]][k]) for k, t in read.updates[at[0]].items()):
        return None
    evidence = f"{len(at)} of {len(norms)} updates have the norm {bound:.6g}, and none a larger one"
    return read.verdict("clip", {"max_norm": bound}, evidence)


def find_noise(read: UpdateEvidence) -> Inferred:
    """Noise: it raises the rank of a fully connected layer's update above one for each example and step."""
    layers = [update[name] for update in read.updates for name in read.layers.linear if name in update]
    beyond = [rest for matrix in layers if (rest := _beyond_rank(matrix, read.rows)) is not None]
    if white := [(square, entries) for square, entries, noisy in beyond if noisy]:
        sigma = math.sqrt(sum(square for square, _ in white) / sum(entries for _, entries in white))
        evidence = f"a fully connected layer's update has a rank above {read.rows}, and the rest is white"
        return read.verdict("noise", {"sigma": sigma}, evidence)
    if beyond:
        return read.verdict("none", {}, f"no layer has a rank above {read.rows}, so there is no noise")
    return read.verdict("none", {}, "noise cannot be distinguished from none")


def _beyond_rank(matrix: Tensor, rows: int) -> tuple[float, int, bool] | None:
    """The square of what a matrix has beyond a rank, for how many entries it counts, and whether no value of it stands out.

    The largest singular value of noise is Marchenko and Pastur's edge. None: the matrix is too small.
    """
    part = matrix.double()[:SUBMATRIX, :SUBMATRIX]
    high, wide = (side - rows for side in part.shape)
    if min(high, wide) < BEYOND:
        return None
    values = torch.linalg.svdvals(part)
    size, whole = float(values[rows:].norm()), float(values.norm())
    edge = (math.sqrt(high) + math.sqrt(wide)) * size / math.sqrt(high * wide)
    noisy = whole > 0 and size / whole > RANK and float(values[rows]) < 1.5 * edge  # with a margin
    return size**2, high * wide, noisy
