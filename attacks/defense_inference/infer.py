"""Infers the clients' defense from its traces in their updates.

A sign leaves one magnitude, a clip the same norm at several clients, pruning the same share in every tensor, a mask zeros
independent of size. Zeros also occur without a defense: a unit that is off for every example has no gradient. So sparsity
is judged only where no network makes zeros: the classifier's signals p - y are never zero, so a column of its weight is
zero as a whole or not at all. One defense is inferred, on the finished update or in a single local step; several are
reported as the first that fits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from fedgauge.attacks.base import Wave
from fedgauge.client.chain import Chain
from fedgauge.client.models.vision import last_linear, layer_parameters
from fedgauge.client.training import local_sgd
from fedgauge.client.transforms import UpdateDistribution, UpdateTransform
from fedgauge.client.update import Update, UpdateFn, norm

Kind = Literal["none", "sign", "prune", "mask", "clip", "noise"]
SAME_SIZE = 1e-5  # and two magnitudes
FEW = 20  # entries below which a share is too uncertain
TINY = 1e-3  # part of a matrix's largest entry
SAME_NORM = 1e-5  # relative distance at which two norms are one: float32 rounds a sum of squares by about 1e-6
RANK = 1e-5  # share of a matrix's norm beyond its rank that is more than rounding
SUBMATRIX = 512  # rows and columns that suffice to estimate a rank
BEYOND = 4  # rows and columns beyond the rank that suffice to test the rest


# ---------------------------------------------------------------------------------------------------------- evidence


@dataclass(frozen=True)
class InferredLink(UpdateTransform):
    """The attacker's form of a defense that it inferred.

    Args:
        value: max_norm of a clip, scale of a sign, keep of pruning or of a mask, sigma of noise.
    """

    kind: Kind
    value: float

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        return compute if self.kind == "noise" else super().__call__(compute)

    def apply(self, update: Update, rng: Generator | None) -> Update:
        if self.kind == "clip":
            factor = (self.value / norm(update).clamp_min(1e-12)).clamp(max=1.0)
            return {k: t * factor for k, t in update.items()}
        if self.kind == "sign":  # which has no useful derivative
            return {k: self.value * t / (t.abs() + t.abs().mean() + 1e-12) for k, t in update.items()}
        if self.kind == "prune":
            return {k: self._largest(t) for k, t in update.items()}
        return {k: self.value * t for k, t in update.items()}  # the average over all masks

    def _largest(self, t: Tensor) -> Tensor:
        kept = min(t.numel(), max(1, round(self.value * t.numel())))
        return t.where(t.abs() >= t.detach().abs().flatten().topk(kept).values[-1], 0.0)

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        if self.kind == "noise":
            return replace(before, sigma=self.value)
        if self.kind == "sign":
            return replace(before, signed=True)
        if self.kind == "clip":
            return before
        return replace(before, sparse=True, shrink=before.shrink * (self.value if self.kind == "mask" else 1))


@dataclass(frozen=True, eq=False)
class Inferred:
    """The clients' chain as inferred from their updates.

    Args:
        kind: the defense that explains them best, or none. Other defenses (a quantiser, the largest entries of the whole
            update) are reported as the nearest of these. Noise is reported only if a layer's rank shows it.
        parameters: of the defense, in the units of its position in the chain; a mask's keep is the share left after all
            local steps.
        chain: local training with that defense, built from the attacker's own links.
        evidence: the reason, in words.
        updates: how many were read.
    """

    kind: Kind
    parameters: Mapping[str, float]
    chain: Chain
    evidence: str
    updates: int

    def __str__(self) -> str:
        arguments = ", ".join(f"{k}~{v:.3g}" for k, v in self.parameters.items())
        what = f"{self.kind}({arguments})" if arguments else self.kind
        return f"{what} from {self.updates} update{'' if self.updates == 1 else 's'}"


@dataclass(frozen=True, eq=False)
class UpdateEvidence:
    """Updates, and the zeros that would occur in them without a defense."""

    updates: Sequence[Update]
    model: nn.Module
    local: local_sgd
    batch_size: int
    members: int

    @property
    def rows(self) -> int:
        """The highest rank of a fully connected layer's update: one row for each example of each step."""
        return self.members * self.local.steps * min(self.local.batch_size or self.batch_size, self.batch_size)

    @cached_property
    def linear(self) -> list[str]:
        """The names of the fully connected layers' weights."""
        return [layer_parameters(name)[0] for name, m in self.model.named_modules() if isinstance(m, nn.Linear)]

    def live(self, update: Update) -> dict[str, Tensor]:
        """Entries that are never zero without a defense, by the values of their neighbours."""
        # the update by one example is one row times one column: zero in whole rows and columns only
        names = self.linear if self.rows == 1 else [layer_parameters(last_linear(self.model))[0]] if self.linear else []
        none = {name: torch.zeros_like(t, dtype=torch.bool) for name, t in update.items()}
        return none | {name: live_by_neighbours(update[name]) for name in names if name in update}

    @cached_property
    def tallies(self) -> list[list["TensorEvidence"]]:
        """The evidence of each tensor, by update."""
        return [[TensorEvidence.of(u[name], live) for name, live in self.live(u).items()] for u in self.updates]

    @property
    def every(self) -> list["TensorEvidence"]:
        return [tally for tallies in self.tallies for tally in tallies]

    def verdict(self, kind: Kind, parameters: Mapping[str, float], evidence: str) -> Inferred:
        """The result with a link on the finished update."""
        links = [InferredLink(kind, value) for value in parameters.values()]
        return Inferred(kind, parameters, Chain((self.local, *links)), evidence, len(self.updates))


def live_by_neighbours(matrix: Tensor) -> Tensor:
    """Entries of a matrix with another nonzero entry in their row, and one in their column that is not tiny.

    A tiny one may come from an example of almost no loss: the signal p - 1 of its label was rounded to zero.
    """
    seen, large = matrix != 0, matrix.abs() > TINY * matrix.abs().max()
    return (large.sum(0, keepdim=True) > large.long()) & (seen.sum(1, keepdim=True) > seen.long())


@dataclass(frozen=True, eq=False)
class TensorEvidence:
    """The evidence in one tensor of one update.

    Args:
        size, seen: entries, and nonzero ones.
        tied: nonzero entries of the smallest magnitude.
        live, shown: entries that are never zero without a defense, and those of them that are not zero here.
        sizes: distinct nonzero magnitudes.
    """

    size: int
    seen: int
    tied: int
    live: int
    shown: int
    sizes: Tensor = field(repr=False)

    @classmethod
    def of(cls, t: Tensor, live: Tensor) -> "TensorEvidence":
        sizes, counts = t[t != 0].abs().unique(return_counts=True)
        tied = int(counts[sizes <= sizes[0] * (1 + SAME_SIZE)].sum()) if len(sizes) else 0
        return cls(t.numel(), int(counts.sum()), tied, int(live.sum()), int((live & (t != 0)).sum()), sizes)

    def fits(self, keep: float) -> bool:
        """Return whether pruning with this keep leaves the observed count."""
        return self.seen - self.tied < max(1, round(keep * self.size)) <= self.seen


# --------------------------------------------------------------------------------------------------------- inference


def infer(
    updates: Wave | Sequence[Update], model: nn.Module, local: local_sgd, batch_size: int, members: int = 1
) -> Inferred:
    """The defense that explains the updates of one round or of several.

    Args:
        model: decides which tensors can have zeros without a defense.
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
    """A sign: one magnitude in all nonzero entries."""
    sizes = torch.cat([tally.sizes for tally in read.every]).double()
    largest, count = float(sizes.max()), sum(tally.seen for tally in read.every)
    if count < FEW or float(sizes.min()) < largest * (1 - SAME_SIZE):
        return None
    evidence = f"all {count:,} entries that are not zero have the magnitude {largest:.4g}"
    return read.verdict("sign", {"scale": largest}, evidence)


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
    layers = [update[name] for update in read.updates for name in read.linear if name in update]
    beyond = [rest for matrix in layers if (rest := _beyond_rank(matrix, read.rows)) is not None]
    if white := [(square, entries) for square, entries, noisy in beyond if noisy]:
        sigma = math.sqrt(sum(square for square, _ in white) / sum(entries for _, entries in white))
        evidence = f"a fully connected layer's update has a rank above {read.rows}, and the rest is white"
        return read.verdict("noise", {"sigma": sigma}, evidence)
    if beyond:
        return read.verdict("none", {}, f"no layer has a rank above {read.rows}, so there is no noise")
    return read.verdict("none", {}, "noise cannot be distinguished from none")


def _beyond_rank(matrix: Tensor, rows: int) -> tuple[float, int, bool] | None:
    """The square of a matrix's part beyond a rank, the entries it represents, and True if that part looks like white noise.

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


def find_sparsity(read: UpdateEvidence) -> Inferred | None:
    """Pruning or a mask: entries are zero that no network makes zero."""
    live, shown = sum(t.live for t in read.every), sum(t.shown for t in read.every)
    if live == shown:
        return None
    zeros = f"{live - shown:,} of {live:,} entries that no network makes zero are zero"
    if (keeps := _common_keep(read.every)) is not None:
        keep = _roundest(*keeps, [t for t in read.every if t.shown < t.live])
        evidence = f"{zeros}; every tensor keeps a share from {keeps[0]:.6g} to {keeps[1]:.6g} of its entries, or fewer"
        return read.verdict("prune", {"keep": keep}, evidence)
    evidence = f"{zeros}; the other entries are small as well as large"
    return read.verdict("mask", {"keep": _share(read)}, evidence)


def _common_keep(tallies: Sequence[TensorEvidence]) -> tuple[float, float] | None:
    """The lowest and the highest keep that explain every tensor's count; None if there are none.

    Pruning keeps max(1, round(keep * size)) entries and those tied with the last of them, or fewer if the gradient has fewer.
    """
    pierced = [t for t in tallies if t.shown < t.live]
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
    return next((r for r in rounded if low <= r <= high and all(t.fits(r) for t in pierced)), middle)


def _share(read: UpdateEvidence) -> float:
    """The share that masks keep: other zeros only lower it, so the densest set of enough entries decides."""
    places = [(sum(t.shown for t in read.every), sum(t.live for t in read.every))]
    places += [(sum(t.seen for t in ts), sum(t.size for t in ts)) for ts in zip(*read.tallies, strict=True)]
    seen, size = max((p for p in places if p[1]), key=lambda place: _at_least(*place))
    return seen / size


def _at_least(seen: int, size: int) -> float:
    """Wilson's lower limit of a share at 3 standard errors, since many sets are compared."""
    share, z = seen / size, 3.0
    spread = math.sqrt(share * (1 - share) / size + z**2 / (4 * size**2))
    return (share + z**2 / (2 * size) - z * spread) / (1 + z**2 / size)
