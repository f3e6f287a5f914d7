"""Quantisation: round each entry at random to one of a few levels, without bias.

QSGD (Alistarh et al., NeurIPS 2017) spaces the levels over a tensor's Euclidean norm, the uniform kind over its largest entry.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Generator, Tensor

from fedgauge.client.components import Range
from fedgauge.client.transforms import Link, UpdateDistribution, UpdateTransform
from fedgauge.client.update import Update, norm
from fedgauge.defenses.noise import identity

Bits = Annotated[int, Range("from 2 (a sign and zero or not) to 16", lambda n: 2 <= n <= 16)]


@dataclass(frozen=True)
class quantize(UpdateTransform):
    """Round each entry to a level of its tensor, at random and without bias.

    The levels are multiples of size / levels.

    Args:
        bits: per entry, with its sign: levels = 2^(bits - 1) - 1, so 8 bits give int8's -127 to 127; 2 to 16.
        kind: "qsgd": size is the tensor's Euclidean norm; "uniform": its largest magnitude.

    Raises:
        ValueError: bits is outside 2 to 16.

    Example:
        >>> quantize(2, kind="uniform").apply({"w": torch.tensor([-4.0, 0.0, 4.0])}, None)
        {'w': tensor([-4.,  0.,  4.])}
    """

    bits: Bits
    kind: Literal["qsgd", "uniform"] = "qsgd"

    @property
    def levels(self) -> int:
        return (1 << self.bits - 1) - 1

    @property
    def mean(self) -> Link:
        """The rounding is unbiased, so its noise-free form changes nothing."""
        return identity()

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """None: the error is at most one level, and its size differs by tensor and depends on the update itself."""
        return None

    @property
    def levels_in_norm(self) -> int:
        """Levels in a tensor's norm, from which an attacker reads the rounding's variance; 0 for other grids."""
        return self.levels if self.kind == "qsgd" else 0

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: self._quantize(t, rng) for k, t in update.items()}

    def _quantize(self, t: Tensor, rng: Generator | None) -> Tensor:
        info = torch.finfo(t.dtype)
        size = norm({"": t}) if self.kind == "qsgd" else t.abs().amax()
        # neither a norm that overflows nor a level that underflows may make NaN of finite entries
        level = (size.clamp_max(info.max).to(t.dtype) / self.levels).clamp_min(info.tiny * info.eps)
        exact = t.abs() / level
        below = exact.floor()
        draws = torch.rand(t.shape, generator=rng, dtype=t.dtype).to(t.device)
        # rounding must not carry the largest entry above the top level, which the bits cannot represent
        rounded = (below + (draws < exact - below)).clamp(max=self.levels)
        return (t.sign() * rounded * level).clamp(info.min, info.max)
