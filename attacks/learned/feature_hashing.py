"""Feature hashing: every entry of an update to a random bucket, so that what is learned from has fewer inputs than the model
has weights.

With random signs (count-sketch: Charikar et al., 2002; Weinberger et al., 2009) inner products are kept in the mean; Learning
To Invert (Wu et al., UAI 2023) sums without them.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from fedgauge.attacks.engine.batch_limiter import SHARE, free_bytes


@dataclass(frozen=True, eq=False)
class Sketch:
    """A fixed linear map of rows (n, entries) to (n, buckets); the matrix of it is never formed.

    Args:
        bins: (entries,) int64; signs: (entries,) of -1 and 1, or None.
    """

    bins: Tensor
    signs: Tensor | None
    buckets: int

    @classmethod
    def draw(cls, entries: int, buckets: int, signed: bool, rng: Generator) -> "Sketch":
        """At random; ValueError where there would be as many buckets as entries, or more: nothing is hashed then."""
        if not 0 < buckets < entries:
            raise ValueError(f"buckets must lie in 1..{entries - 1}, fewer than an update has entries, got {buckets}")
        bins = torch.randint(buckets, (entries,), generator=rng)
        signs = 2.0 * torch.randint(2, (entries,), generator=rng) - 1 if signed else None
        return cls(bins, signs, buckets)

    def __call__(self, rows: Tensor) -> Tensor:
        signed = rows if self.signs is None else rows * self.signs.to(rows)
        return rows.new_zeros(len(rows), self.buckets).index_add_(1, self.bins.to(rows.device), signed)

    @property
    def counts(self) -> Tensor:
        """Entries in each bucket (buckets,): what independent noise of variance 1 in every entry becomes."""
        return torch.bincount(self.bins, minlength=self.buckets)


def check_memory(rows: int, columns: int, device: torch.device) -> None:
    """ValueError where a float32 table does not fit into free memory; it says how many columns do."""
    there = free_bytes(device)
    if there is None or 4 * rows * columns <= SHARE * there:
        return
    fits = int(SHARE * there) // (4 * rows)
    raise ValueError(
        f"{rows:,} simulated updates of {columns:,} numbers need {4 * rows * columns / 2**30:.1f} GiB, and "
        f"{there / 2**30:.1f} are free: set buckets to at most {fits:,}"
    )
