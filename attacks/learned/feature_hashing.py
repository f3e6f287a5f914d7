"""Feature hashing: adds up an update's entries in random buckets, so that an inverter has fewer inputs than the model weights.

With random signs (count-sketch: Charikar et al., 2002; Weinberger et al., 2009) inner products are preserved on average;
Learning To Invert (Wu et al., UAI 2023) uses no signs.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from fedgauge.attacks.engine.batch_limiter import SHARE, free_bytes


@dataclass(frozen=True, eq=False)
class Sketch:
    """A fixed linear map of rows (n, entries) to (n, buckets); its matrix is never formed.

    Args:
        bins: (entries,) int64; signs: (entries,) of -1 and 1, or None.
    """

    bins: Tensor
    signs: Tensor | None
    buckets: int

    @classmethod
    def draw(cls, entries: int, buckets: int, signed: bool, rng: Generator) -> "Sketch":
        """A random sketch; ValueError unless there are fewer buckets than entries."""
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
        """Entries in each bucket (buckets,): the variance there of independent noise of variance 1 in every entry."""
        return torch.bincount(self.bins, minlength=self.buckets)


def check_memory(rows: int, columns: int, device: torch.device) -> None:
    """ValueError if a float32 table does not fit into free memory; it says how many columns fit."""
    available = free_bytes(device)
    if available is None or 4 * rows * columns <= SHARE * available:
        return
    fits = int(SHARE * available) // (4 * rows)
    raise ValueError(
        f"{rows:,} simulated updates of {columns:,} numbers need {4 * rows * columns / 2**30:.1f} GiB, and "
        f"{available / 2**30:.1f} are free: set buckets to at most {fits:,}"
    )
