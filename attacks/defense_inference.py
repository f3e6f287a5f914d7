"""Inference: what a defense leaves in the updates betrays which one it was.

A sign leaves one magnitude, a clip the same norm at several clients, pruning the same count in every tensor, a mask zeros
without regard to size. Zeros also come by nature: a unit that is off for every example has no gradient. So sparsity is read
where nature leaves none: the classifier's signals p - y are zero nowhere, hence a column of its weight is zero as a whole or
not at all; a bias is zero only with its whole row; a normalisation's weight only with its bias. One defense is looked for;
what several leave together is read as the first that is found.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Binomial

from fedgauge.attacks.base import Wave
from fedgauge.client.models.vision import last_linear
from fedgauge.client.update import (
    Chain,
    Link,
    Transform,
    Update,
    UpdateDistribution,
    UpdateFn,
    UpdateTransform,
    chain,
    local_sgd,
    norm,
    per_example,
)

Kind = Literal["none", "sign", "prune", "mask", "clip", "noise"]

SAME_NORM = 1e-5  # relative distance at which two norms are one: float32 rounds a sum of squares by about 1e-6
SAME_SIZE = 1e-5  # and two magnitudes
LEVELS = 64  # up to which the sums of signs over steps or examples are told from other values
RANK = 1e-5  # part of a matrix's norm beyond its rank that is more than rounding
SUBMATRIX = 512  # rows and columns that are enough to see a rank
FEW = 20  # entries below which a share tells little
TINY = 1e-3  # part of a matrix's largest entry
AGAINST = 20.0  # nats against pruning by a count that it cannot leave


@dataclass(frozen=True, eq=False)
class Inferred:
    """What the updates betray of the clients' chain.

    Args:
        kind: the one of these defenses that explains them best, or none; what is none of them (a quantiser, the largest
            entries of the whole update) is read as the nearest, which a small margin need not show. Noise and none are told
            apart only where the evidence says so.
        parameters: the defense's, in the units of its place; a mask's keep is what is left after all local steps.
        chain: local training with that defense, made of the attacker's own links.
        evidence: why, in words.
        margin: nats by which the evidence favours this over the nearest other of these; inf where that one is impossible.
        updates: how many were read.
    """

    kind: Kind
    parameters: Mapping[str, float]
    chain: Chain
    evidence: str
    margin: float
    updates: int

    def __str__(self) -> str:
        arguments = ", ".join(f"{k}~{v:.3g}" for k, v in self.parameters.items())
        what = f"{self.kind}({arguments})" if arguments else self.kind
        return f"{what} from {self.updates} update{'' if self.updates == 1 else 's'}"


def infer(
    updates: Wave | Sequence[Update], model: nn.Module, local: local_sgd, batch_size: int, members: int = 1
) -> Inferred:
    """The defense of a federation of which only updates were seen: of one round, or of several.

    Args:
        model: tells which tensors can have zeros by nature.
        local: the local training, as agreed.
        batch_size: examples of a client's round.
        members: clients whose mean each update is, under a secure sum.
    """
    if isinstance(updates, Wave):
        updates = [updates.alone(k) for k in range(len(updates))]
    told = [u for u in updates if any(bool(t.any()) for t in u.values())]
    read = _UpdateEvidence(told, model, local, batch_size, members)
    if not read.updates:
        found = read.verdict("none", {}, None, "the updates are zero", 0.0)
    else:
        found = _sign_of(read) or _sparsity_of(read) or _clip_of(read) or _noise_of(read)
    return replace(found, updates=len(updates))


@dataclass(frozen=True, eq=False)
class _UpdateEvidence:
    """Updates, and what nature could have made of them."""

    updates: Sequence[Update]
    model: nn.Module
    local: local_sgd
    batch_size: int
    members: int

    @property
    def examples(self) -> int:
        """Of a step."""
        return min(self.local.batch_size or self.batch_size, self.batch_size)

    @property
    def rows(self) -> int:
        """The rank of a fully connected layer's update is at most this: one row for each example of each step."""
        return self.members * self.local.steps * self.examples

    @cached_property
    def layers(self) -> "_Layers":
        return _Layers.of(self.model)

    @cached_property
    def tallies(self) -> list[list["_TensorEvidence"]]:
        """By update, then by tensor."""
        return [
            [_TensorEvidence.of(u[name], live) for name, live in self.layers.live(u, self.rows).items()]
            for u in self.updates
        ]

    @property
    def every(self) -> list["_TensorEvidence"]:
        return [tally for tallies in self.tallies for tally in tallies]

    @property
    def certain(self) -> list["_TensorEvidence"]:
        """Those with entries that nature leaves no zero."""
        return [tally for tally in self.every if tally.live]

    @property
    def holes(self) -> int:
        """Zeros where nature leaves none."""
        return sum(tally.live - tally.shown for tally in self.certain)

    def verdict(
        self, kind: Kind, parameters: Mapping[str, float], link: Transform | None, evidence: str, margin: float
    ) -> Inferred:
        """With a link on the finished update."""
        found = Chain((self.local,) if link is None else (self.local, link))
        return Inferred(kind, parameters, found, evidence, margin, len(self.updates))

    def summed(
        self, kind: Kind, parameters: dict[str, float], link: Callable[..., Link], evidence: str, margin: float
    ) -> Inferred:
        """With a link on what was summed: clients' updates, else gradients of steps, else of examples."""
        if self.members > 1:
            return self.verdict(kind, parameters, link(**parameters), evidence, margin)
        if "scale" in parameters:  # in the units of a gradient
            parameters = {"scale": parameters["scale"] / self.local.scale}
        inner = link(**parameters)
        found = chain(inner if self.local.steps > 1 else per_example(inner), self.local)
        return Inferred(kind, parameters, found, evidence, margin, len(self.updates))


# ------------------------------------------------------------------------------------------------------- natural zeros


@dataclass(frozen=True)
class _Layers:
    """Names of weights and biases that have their zeros together."""

    classifier: str | None
    linear: tuple[str, ...]
    biased: tuple[tuple[str, str], ...]  # a bias is zero only where its row of the weight is
    norms: tuple[tuple[str, str], ...]  # a weight is zero only where its bias is, and the other way round

    @classmethod
    def of(cls, model: nn.Module) -> "_Layers":
        modules = dict(model.named_modules())
        linear = tuple(f"{name}.weight" for name, m in modules.items() if isinstance(m, nn.Linear))
        norms = tuple(
            (f"{name}.weight", f"{name}.bias")
            for name, m in modules.items()
            if isinstance(m, nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm)
        )
        # a normalisation behind a convolution makes its bias's gradient zero up to rounding
        kinds = nn.Linear if norms else (nn.Linear, nn.Conv2d)
        biased = tuple((f"{name}.weight", f"{name}.bias") for name, m in modules.items() if isinstance(m, kinds))
        return cls(f"{last_linear(model)}.weight" if linear else None, linear, biased, norms)

    def live(self, update: Update, rows: int) -> dict[str, Tensor]:
        """Where nature leaves no zero, as far as an entry's neighbours tell: the entry itself is not asked."""
        live = {name: torch.zeros_like(t, dtype=torch.bool) for name, t in update.items()}
        # the update by one example is one row times one column: zero in whole rows and columns only
        for name in self.linear if rows == 1 else (self.classifier,):
            if name in update:
                live[name] = _by_neighbours(update[name])
        for weight, bias in self.biased:
            if weight in update and bias in update:
                live[bias] = update[weight].flatten(1).any(1)
        for weight, bias in self.norms:
            if weight in update and bias in update:
                live[weight], live[bias] = update[bias] != 0, update[weight] != 0
        return live


def _by_neighbours(matrix: Tensor) -> Tensor:
    """Entries of a matrix with another one seen in their row, and one in their column that is not tiny.

    A tiny one may be of an example whose loss is all but zero, and whose own label's signal p - 1 was rounded to zero.
    """
    seen, large = matrix != 0, matrix.abs() > TINY * matrix.abs().max()
    return (large.sum(0, keepdim=True) > large.long()) & (seen.sum(1, keepdim=True) > seen.long())


@dataclass(frozen=True, eq=False)
class _TensorEvidence:
    """What one tensor of one update shows.

    Args:
        size, seen: entries, and those that are not zero.
        tied: of the smallest magnitude that was seen.
        live, shown: entries that nature leaves no zero, and those of them that are not zero.
        sizes: magnitudes that were seen, without repeats.
    """

    size: int
    seen: int
    tied: int
    live: int
    shown: int
    sizes: Tensor = field(repr=False)

    @classmethod
    def of(cls, t: Tensor, live: Tensor) -> "_TensorEvidence":
        sizes, counts = t[t != 0].abs().unique(return_counts=True)
        tied = int(counts[sizes <= sizes[0] * (1 + SAME_SIZE)].sum()) if len(sizes) else 0
        return cls(t.numel(), int(counts.sum()), tied, int(live.sum()), int((live & (t != 0)).sum()), sizes)

    @property
    def share(self) -> float:
        return self.seen / self.size

    def fits(self, keep: float) -> bool:
        """Whether pruning leaves this count, of a tensor from which it took something."""
        return self.seen - self.tied < max(1, round(keep * self.size)) <= self.seen

    @property
    def pierced(self) -> bool:
        """Whether something is missing that nature would not leave out."""
        return self.shown < self.live


# ---------------------------------------------------------------------------------------------------------------- sign


def _sign_of(read: _UpdateEvidence) -> Inferred | None:
    """One magnitude everywhere; where several signs were summed, whole multiples of a small part of it."""
    sizes = torch.cat([tally.sizes for tally in read.every]).unique().double()
    largest, count = float(sizes[-1]), sum(tally.seen for tally in read.every)
    summed = [n for n in (1, read.members, read.local.steps, read.examples, read.rows) if n <= min(LEVELS, count / FEW)]
    fitting = (n for n in summed if _are_multiples(sizes, largest / n))
    if (n := next(fitting, None)) is None:
        return None
    margin = (count - 1) * -math.log(n * SAME_SIZE)
    # two steps' signs that differ leave a zero
    if n == 1 and not (read.holes and read.local.steps % 2 == 0):
        evidence = f"all {count:,} entries that are not zero have the magnitude {largest:.4g}"
        return read.verdict("sign", {"scale": largest}, _sign(largest), evidence, margin)
    evidence = f"every entry is a multiple of {largest / n:.4g}, up to {n} times"
    return read.summed("sign", {"scale": largest}, _sign, f"{evidence}: signs were summed", margin)


def _are_multiples(sizes: Tensor, unit: float) -> bool:
    return bool(((sizes / unit).round() * unit - sizes).abs().max() <= SAME_SIZE * sizes[-1])


# ------------------------------------------------------------------------------------------------------ prune and mask


def _sparsity_of(read: _UpdateEvidence) -> Inferred | None:
    if not read.holes:
        return None
    zeros = f"{read.holes:,} of {sum(t.live for t in read.certain):,} entries that no network makes zero are zero"
    if (keeps := _common_keep(read.every)) is not None:
        keep = _roundest(*keeps, [t for t in read.every if t.pierced])
        evidence = (
            f"{zeros}; every tensor keeps round(keep * entries), keep from {keeps[0]:.6g} to {keeps[1]:.6g}, or fewer"
        )
        return read.verdict("prune", {"keep": keep}, _prune(keep), evidence, _surprise(read.certain))
    margin = _counts(read) + _places(read) + _small_survivors(read)
    if margin < 0:
        # no tensor keeps less than each of those that were summed, and most keep more
        keep = min(1.0, *(t.share for t in read.certain if t.pierced))
        evidence = f"{zeros}; large entries are left, in counts that differ: several prunings were summed"
        return read.summed("prune", {"keep": keep}, _prune, evidence, -margin)
    evidence = f"{zeros}; what is left lies anywhere and is small as well as large"
    common = _shared(read, _share(read, 1))
    keep = _share(read, len(read.updates) if common is None else 1)
    if common is None:
        return read.verdict("mask", {"keep": keep}, _mask(keep), evidence, margin)
    evidence += f"; the same places in all {len(read.updates)} updates: a mask that everybody knows"
    return read.verdict("mask", {"keep": keep}, _shown(common), evidence, margin)


def _common_keep(tallies: Sequence[_TensorEvidence]) -> tuple[float, float] | None:
    """Lowest and highest keep that explains every tensor's count; None when there is none.

    Pruning keeps max(1, round(keep * size)) entries and those tied with the last of them, unless nature leaves fewer.
    """
    pierced = [t for t in tallies if t.pierced]
    low, densest = 0.0, pierced[0]
    for t in tallies:
        if t.seen > t.tied and (t.seen - t.tied + 0.5) / t.size > low:
            low, densest = (t.seen - t.tied + 0.5) / t.size, t
    high = min(1.0, *((t.seen + 0.5) / t.size for t in pierced))
    if low > high or any(t.seen == 0 for t in pierced):
        return None
    # the densest of all has hardly come by nature to lie between the others' limits
    return low, min(high, (densest.seen + 0.5) / densest.size)


def _roundest(low: float, high: float, pierced: Sequence[_TensorEvidence]) -> float:
    """The keep with the fewest digits between two limits that leaves the counts that were seen: people choose such ones."""
    middle = (low + high) / 2
    rounded = (float(f"{middle:.{digits}g}") for digits in range(1, 16))
    fitting = (r for r in rounded if low <= r <= high and all(t.fits(r) for t in pierced))
    return next(fitting, middle)


def _surprise(tallies: Sequence[_TensorEvidence]) -> float:
    """-log of how likely a random mask leaves these very counts, less that of the one that any keep fits."""
    live, shown = _live_and_shown(tallies)
    surprises = -Binomial(live, shown.sum() / live.sum()).log_prob(shown)
    return float(surprises.sum() - surprises.max())


def _counts(read: _UpdateEvidence) -> float:
    """Nats by which the tensors' counts speak for a mask: binomial with one keep, against anything that pruning can leave.

    Summed over steps and examples it leaves between keep and `rows` times that.
    """
    pierced = [t for t in read.certain if t.pierced]
    low = min((t.seen + 0.5) / t.size for t in pierced)
    most = [read.rows * max(1, round(low * t.size)) for t in read.every]
    if any(t.seen == 0 for t in pierced) or any(t.seen - t.tied > m for t, m in zip(read.every, most, strict=True)):
        return AGAINST
    live, shown = _live_and_shown(read.certain)
    any_count = (min(1.0, read.rows * low) - low) * live + 1
    return float((Binomial(live, shown.sum() / live.sum()).log_prob(shown) + any_count.log()).sum())


def _live_and_shown(tallies: Sequence[_TensorEvidence]) -> tuple[Tensor, Tensor]:
    """`live` and `shown` of each."""
    live, shown = zip(*((t.live, t.shown) for t in tallies), strict=True)
    return torch.tensor(live, dtype=torch.float64), torch.tensor(shown, dtype=torch.float64)


def _places(read: _UpdateEvidence) -> float:
    """Nats by which rows and columns of the classifier's weight speak for a mask, which does not know them.

    Pruning leaves more of a row with a large signal, and of a column with a large feature.
    """
    name = read.layers.classifier
    if name is None or name not in read.updates[0]:
        return 0.0
    seen = [u[name] != 0 for u in read.updates]
    live = [_by_neighbours(u[name]) for u in read.updates]
    rows = [_rows_alike(la.sum(1).double(), (s & la).sum(1).double()) for s, la in zip(seen, live, strict=True)]
    # one update may be odd by nature: in some of its steps a label's signal p - 1 was rounded to zero
    return sum(max(-AGAINST, nats) for nats in rows) + _columns_alike(torch.cat([s.sum(0) for s in seen]), len(seen[0]))


def _rows_alike(live: Tensor, shown: Tensor) -> float:
    """Counts of rows: binomial with one keep, against any."""
    if not 0 < shown.sum() < live.sum():
        return 0.0
    return float((Binomial(live, shown.sum() / live.sum()).log_prob(shown) + (live + 1).log()).sum())


def _columns_alike(shown: Tensor, high: int) -> float:
    """Counts of columns that show anything: binomial, against their own histogram, for whose freedom BIC charges."""
    often = torch.bincount(shown, minlength=high + 1)[1:].double()
    total, kinds = float(often.sum()), int((often > 0).sum())
    if not often[:-1].any():
        return 0.0
    keeps = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)[:, None]
    counts = torch.arange(1, high + 1, dtype=torch.float64)
    binomial = Binomial(torch.tensor(float(high)), keeps).log_prob(counts) - torch.log1p(-((1 - keeps) ** high))
    own = (often / total).clamp_min(1e-12).log()
    return float((binomial * often).sum(1).max() - (own * often).sum()) + max(0, kinds - 2) / 2 * math.log(total)


def _small_survivors(read: _UpdateEvidence) -> float:
    """Nats, at most 0, by which missing small entries speak against a mask.

    A mask leaves small entries at the rate at which they come; their density is about constant near zero, at least in one
    of the tensors. Where they are there, steps or examples may have cancelled. A tensor from which pruning took nothing, as
    nature had left too little, keeps a smaller part than any other.
    """
    least = min(t.share for t in read.certain if t.pierced)
    part = 0.05 if least > 0.5 else 0.25
    found = []
    for tallies in zip(*read.tallies, strict=True):
        small = seen = 0
        for t in (t for t in tallies if t.share >= least and len(t.sizes)):
            small += int((t.sizes < part * t.sizes.median()).sum())
            seen += len(t.sizes)
        expected, seldom = part / 2 * seen, part / 16 * seen
        if seen >= FEW:
            found.append(small * math.log(expected / seldom) - (expected - seldom))
    return min(0.0, max(found, default=0.0))


def _share(read: _UpdateEvidence, masks: int) -> float:
    """The part that so many masks let through: nature only adds zeros, so the densest place tells that is large enough."""
    places = [(sum(t.shown for t in read.certain), sum(t.live for t in read.certain))]
    places += [(sum(t.seen for t in ts), sum(t.size for t in ts)) for ts in zip(*read.tallies, strict=True)]
    for name in read.layers.linear:
        neighboured = [(u[name][_by_neighbours(u[name])] != 0) for u in read.updates if name in u]
        places.append((sum(int(s.sum()) for s in neighboured), sum(len(s) for s in neighboured)))
    copies = len(read.updates) / masks
    seen, size = max((p for p in places if p[1]), key=lambda place: _at_least(place[0] / copies, place[1] / copies))
    return seen / size


def _at_least(seen: float, size: float) -> float:
    """Wilson's lower limit of a share at 3 standard errors, as many places are asked."""
    share, z = seen / size, 3.0
    spread = math.sqrt(share * (1 - share) / size + z**2 / (4 * size**2))
    return (share + z**2 / (2 * size) - z * spread) / (1 + z**2 / size)


def _shared(read: _UpdateEvidence, keep: float) -> dict[str, Tensor] | None:
    """Where any update shows something, if all have their zeros in the same places; else None."""
    seen = [{k: t != 0 for k, t in u.items()} for u in read.updates]
    live = [read.layers.live(u, read.rows) for u in read.updates]
    sure = [
        _overlap(a, b, {k: la[k] & lb[k] for k in a})
        for (a, b), (la, lb) in zip(pairwise(seen), pairwise(live), strict=True)
    ]
    both, either = map(sum, zip((0, 0), *sure, strict=True))
    if either < FEW:
        both, either = map(sum, zip((0, 0), *(_overlap(a, b, {}) for a, b in pairwise(seen)), strict=True))
    by_chance = keep / (2 - keep)
    if not either or both / either < (1 + by_chance) / 2:
        return None
    return {k: torch.stack([s[k] for s in seen]).any(0) for k in seen[0]}


def _overlap(a: Mapping[str, Tensor], b: Mapping[str, Tensor], among: Mapping[str, Tensor]) -> tuple[int, int]:
    """Entries that both show, and that either shows; among some."""
    counts = [
        (int((a[k] & b[k] & among.get(k, a[k] | b[k])).sum()), int(((a[k] | b[k]) & among.get(k, a[k] | b[k])).sum()))
        for k in a
    ]
    return sum(c[0] for c in counts), sum(c[1] for c in counts)


# ------------------------------------------------------------------------------------------------------ clip and noise


def _clip_of(read: _UpdateEvidence) -> Inferred | None:
    """Several updates at one norm that none exceeds."""
    norms = [float(norm({k: t.double() for k, t in u.items()})) for u in read.updates]
    bound = max(norms)
    at = [i for i, n in enumerate(norms) if n >= bound * (1 - SAME_NORM)]
    if len(at) < 2 or _identical(read.updates[at[0]], read.updates[at[1]]):
        return None
    evidence = f"{len(at)} of {len(norms)} updates have the norm {bound:.6g}, and none a larger one"
    return read.verdict("clip", {"max_norm": bound}, _clip(bound), evidence, (len(at) - 1) * -math.log(SAME_NORM))


def _identical(a: Update, b: Update) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


def _noise_of(read: _UpdateEvidence) -> Inferred:
    """White noise raises the rank of a fully connected layer's update above one for each example and step."""
    free = sum(tally.live for tally in read.certain)
    nature = f"the {free:,} entries that no network makes zero are not zero"
    clip = "a clip cannot be seen in one update" if len(read.updates) == 1 else "no two norms are equal"
    beyond = list(_beyond_rank(read))
    if white := [rest for rest in beyond if rest.white]:
        sigma = math.sqrt(sum(rest.square for rest in white) / sum(rest.entries for rest in white))
        evidence = f"a fully connected layer's update has a rank above {read.rows}, and the rest is white"
        return read.verdict("noise", {"sigma": sigma}, _noise(sigma), evidence, math.inf)
    rank = f"none has a rank above {read.rows}, so there is no noise" if beyond else "noise could not be told from none"
    return read.verdict("none", {}, None, f"{nature}; {clip}; {rank}", free * -math.log(0.9))


class _RankResidual(NamedTuple):
    """What is left of a matrix beyond the rank that examples and steps can give it, and as how many entries' worth."""

    square: float
    entries: int
    white: bool


def _beyond_rank(read: _UpdateEvidence) -> Iterator[_RankResidual]:
    """Of each fully connected layer that is large enough to show it."""
    for update in read.updates:
        for name in read.layers.linear:
            if name not in update or min(update[name].shape) < read.rows + 4:
                continue
            matrix = update[name].double()[:SUBMATRIX, :SUBMATRIX]
            values = torch.linalg.svdvals(matrix)
            rest, (high, wide) = values[read.rows :], (side - read.rows for side in matrix.shape)
            size, largest = float(rest.norm()), float(rest[0])
            # noise's largest singular value (Marchenko & Pastur), with room: whatever decays further is no noise
            edge = 1.5 * (math.sqrt(high) + math.sqrt(wide)) * size / math.sqrt(high * wide)
            yield _RankResidual(size**2, high * wide, size > RANK * float(values.norm()) and largest < edge)


# ----------------------------------------------------------------------------------------------- the attacker's models


@dataclass(frozen=True)
class _sign(UpdateTransform):
    """u / (|u| + mean |u|) of each tensor stands in for a sign, which has no useful derivative."""

    scale: float

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: self.scale * t / (t.abs() + t.abs().mean() + 1e-12) for k, t in update.items()}

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        return replace(before, signed=True)


@dataclass(frozen=True)
class _prune(UpdateTransform):
    """The largest part of each tensor's entries by magnitude."""

    keep: float

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: self._largest(t) for k, t in update.items()}

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        return replace(before, sparse=True)

    def _largest(self, t: Tensor) -> Tensor:
        kept = min(t.numel(), max(1, round(self.keep * t.numel())))
        least = t.detach().abs().flatten().topk(kept).values[-1]
        return torch.where(t.abs() >= least, t, torch.zeros_like(t))


@dataclass(frozen=True)
class _mask(UpdateTransform):
    """The average over masks that are not known."""

    keep: float

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: self.keep * t for k, t in update.items()}

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        return replace(before, sparse=True, shrink=self.keep * before.shrink)


@dataclass(frozen=True, eq=False)
class _shown(UpdateTransform):
    """A mask that everybody knows: where any update shows something."""

    places: Mapping[str, Tensor]

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: torch.where(self.places[k], t, torch.zeros_like(t)) for k, t in update.items()}


@dataclass(frozen=True)
class _clip(UpdateTransform):
    """At most a norm, over all tensors."""

    max_norm: float

    def apply(self, update: Update, rng: Generator | None) -> Update:
        factor = (self.max_norm / norm(update).clamp_min(1e-12)).clamp(max=1.0)
        return {k: t * factor for k, t in update.items()}


@dataclass(frozen=True)
class _noise(UpdateTransform):
    """Normal noise changes nothing of the noise-free form."""

    sigma: float

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        return compute

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return update

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        return replace(before, sigma=self.sigma)
