"""Noise: it raises the rank of a fully connected layer's update."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Generator

from fedgauge.attacks.defense_inference.evidence import Inferred, UpdateEvidence
from fedgauge.client.transforms import UpdateDistribution, UpdateTransform
from fedgauge.client.update import Update, UpdateFn

RANK = 1e-5  # share of a matrix's norm beyond its rank that is more than rounding
SUBMATRIX = 512  # rows and columns that suffice to estimate a rank


def find_noise(read: UpdateEvidence) -> Inferred:
    """Noise: it raises the rank of a fully connected layer's update above one for each example and step."""
    free = sum(tally.live for tally in read.certain)
    nature = f"the {free:,} entries that no network makes zero are not zero"
    clip = "a clip cannot be seen in one update" if len(read.updates) == 1 else "no two norms are equal"
    beyond = list(_beyond_rank(read))
    if white := [rest for rest in beyond if rest.white]:
        sigma = math.sqrt(sum(rest.square for rest in white) / sum(rest.entries for rest in white))
        evidence = f"a fully connected layer's update has a rank above {read.rows}, and the rest is white"
        return read.verdict("noise", {"sigma": sigma}, _noise(sigma), evidence, math.inf)
    rank = (
        f"none has a rank above {read.rows}, so there is no noise"
        if beyond
        else "noise cannot be distinguished from none"
    )
    return read.verdict("none", {}, None, f"{nature}; {clip}; {rank}", free * -math.log(0.9))


class _RankResidual(NamedTuple):
    """The rest of a matrix beyond the rank that examples and steps can give it, and how many entries it counts for."""

    square: float
    entries: int
    white: bool


def _beyond_rank(read: UpdateEvidence) -> Iterator[_RankResidual]:
    """The rest of each fully connected layer that is large enough to show one."""
    for update in read.updates:
        for name in read.layers.linear:
            if name not in update or min(update[name].shape) < read.rows + 4:
                continue
            matrix = update[name].double()[:SUBMATRIX, :SUBMATRIX]
            values = torch.linalg.svdvals(matrix)
            rest, (high, wide) = values[read.rows :], (side - read.rows for side in matrix.shape)
            size, largest = float(rest.norm()), float(rest[0])
            # noise's largest singular value (Marchenko & Pastur), with a margin: a spectrum with larger ones is no noise
            edge = 1.5 * (math.sqrt(high) + math.sqrt(wide)) * size / math.sqrt(high * wide)
            yield _RankResidual(size**2, high * wide, size > RANK * float(values.norm()) and largest < edge)


@dataclass(frozen=True)
class _noise(UpdateTransform):
    """Normal noise; the noise-free form stays as it is."""

    sigma: float

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        return compute

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return update

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        return replace(before, sigma=self.sigma)
