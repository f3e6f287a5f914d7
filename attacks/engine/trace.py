"""Tracing: keep a few snapshots of an attack in progress; its result stays the same bit for bit."""

from bisect import bisect_right
from collections.abc import Callable

import torch
from torch import Tensor

from fedgauge.attacks.base import Trace


class Tracer:
    """Snapshots of P problems: what each would return if it stopped there.

    Args:
        snapshots: about this many of each problem; 0 keeps nothing.
        iterations: of the whole budget, over which snapshots are evenly spaced.
        pixels: converts the optimised images to pixels.
    """

    def __init__(self, snapshots: int, iterations: int, problems: int, pixels: Callable[[Tensor], Tensor]) -> None:
        gaps = min(snapshots - 1, iterations)
        self._due = tuple(round(i * iterations / gaps) for i in range(gaps + 1)) if snapshots else ()
        self._pixels = pixels
        self._kept: list[dict[int, tuple[float, Tensor]]] = [{} for _ in range(problems)]  # by iteration

    def __bool__(self) -> bool:
        return bool(self._due)

    def due(self, iteration: int) -> bool:
        """True if a snapshot is due at an iteration of problems that advance together."""
        return iteration in self._due

    def follow(self, rows: Tensor, iterations: Tensor, objectives: Tensor, x: Tensor) -> None:
        """Keep the problems for which a snapshot has become due since their last one."""
        passed = [
            bisect_right(self._due, iteration) > bisect_right(self._due, max(self._kept[row], default=-1))
            for row, iteration in zip(rows.tolist(), iterations.tolist(), strict=True)
        ]
        chosen = torch.tensor(passed, device=x.device)
        self.keep(rows[chosen], iterations[chosen], objectives[chosen], x[chosen])

    def keep(self, rows: Tensor, iterations: Tensor, objectives: Tensor, x: Tensor) -> None:
        """Keep a snapshot of some problems: iterations (N,), objectives (N,), images (N, B, C, H, W)."""
        if not self:
            return
        images = self._pixels(x.detach()).clamp(0, 1).nan_to_num(0.0).mul(255).round().to("cpu", torch.uint8)
        judged = torch.where(objectives.isfinite(), objectives, torch.inf).tolist()
        for row, iteration, objective, image in zip(rows.tolist(), iterations.tolist(), judged, images, strict=True):
            self._kept[row][iteration] = (objective, image)

    def of(self, row: int) -> Trace | None:
        """The trace of one problem; None if there are no snapshots."""
        kept = sorted(self._kept[row].items())
        if not kept:
            return None
        return Trace(
            torch.tensor([iteration for iteration, _ in kept]),
            torch.tensor([objective for _, (objective, _) in kept], dtype=torch.float64),
            torch.stack([image for _, (_, image) in kept]),
        )
