"""Noise: it raises the rank of a fully connected layer's update, and hides every layer's entries under one normal distribution.

A sum of n examples' gradients has a rank of at most n in a fully connected layer. What an update has beyond it is noise if no
singular value of it stands out (Marchenko & Pastur) and its entries are normal. Adam's steps and further steps of SGD go
beyond that rank, too, but not so evenly. Where no layer is large enough, noise shows only if it covers the gradient: the
entries of all weights are normal, with one standard deviation. A gradient's have heavy tails, and another size in each layer.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedgauge.attacks.defense_inference.evidence import Inferred, UpdateEvidence
from fedgauge.client.update import Update

RANK = 1e-5  # share of a matrix's norm beyond its rank that is more than rounding
SUBMATRIX = 512  # rows and columns that suffice to estimate a rank
FREE = 16  # rows and columns beyond the rank that suffice to test the rest
EDGE = 1.25  # times noise's largest singular value
MANY = 128  # entries of a tensor that suffice to estimate its kurtosis
NORMAL = 0.2  # distance of the kurtosis from 3, beyond four standard errors
ONE_SIGMA = 1.25  # the largest ratio of two layers' standard deviations


def find_noise(read: UpdateEvidence) -> Inferred:
    """Noise: it raises the rank of a fully connected layer's update above one for each example and step."""
    beyond = [
        rest for update in read.updates for rest in _beyond_rank(update, read.layers.linear, read.rows, read.rows + 4)
    ]
    if white := [rest for rest in beyond if rest.white]:
        sigma = math.sqrt(sum(rest.square for rest in white) / sum(rest.entries for rest in white))
        evidence = f"a fully connected layer's update has a rank above {read.rows}, and the rest is white"
        return read.verdict("noise", {"sigma": sigma}, evidence)
    if beyond:
        return read.verdict("none", {}, f"no layer has a rank above {read.rows}, so there is no noise")
    return read.verdict("none", {}, "noise cannot be distinguished from none")


class _RankResidual(NamedTuple):
    """The rest of a matrix beyond the rank that examples and steps can give it, and how many entries it counts for.

    Attributes:
        share: its part of the matrix's norm.
        edge: the largest singular value of noise of this size (Marchenko & Pastur).
    """

    name: str
    rest: Tensor
    square: float
    entries: int
    share: float
    largest: float
    edge: float

    @property
    def white(self) -> bool:
        return self.share > RANK and self.largest < 1.5 * self.edge  # with a margin


def _beyond_rank(update: Update, linear: Sequence[str], rows: int, fewest: int) -> Iterator[_RankResidual]:
    """Yield the rest of each fully connected layer of at least `fewest` rows and columns."""
    for name in linear:
        if name not in update or min(SUBMATRIX, *update[name].shape) < fewest:
            continue
        left, values, right = torch.linalg.svd(update[name].double()[:SUBMATRIX, :SUBMATRIX], full_matrices=False)
        rest = (left[:, rows:] * values[rows:]) @ right[rows:]
        high, wide = (side - rows for side in rest.shape)
        size, whole = float(values[rows:].norm()), float(values.norm())
        edge = (math.sqrt(high) + math.sqrt(wide)) * size / math.sqrt(high * wide)
        share = size / whole if whole else 0.0
        yield _RankResidual(name, rest, size**2, high * wide, share, float(values[rows]), edge)
