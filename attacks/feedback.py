"""Feedback blending: what was found of a client's earlier images is where the search for the next begins (Leite et al., 2024)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attacks.base import Budget, Knowledge, Reconstruction, Stream, Wave
from attacks.matching import GradientMatching

Judge = Callable[
    [int, int, Reconstruction], bool
]  # (place in the sequence, client's place in the wave, found) -> success


@dataclass(frozen=True)
class FeedbackBlending:
    """An attack with memory, over the sequence of a client's observations.

    Args:
        attack: DLG or iDLG.
        alpha: the share of the older images in a blend.
        discard_failures: blend in successes alone; False is the paper's NF variant, which collapses.
        fit: success is an objective of at most this, the attack's own.
        start: "blend", from noise until two images are there; the controls "half" (constant 1/2), "mean" (the mean auxiliary
            image) and "noise" tell how much of the gain is the start alone.
    """

    attack: GradientMatching
    alpha: float = 0.5
    discard_failures: bool = True
    fit: float = 1e-4
    start: Literal["blend", "half", "mean", "noise"] = "blend"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must lie in 0..1, got {self.alpha}")

    def sequence(
        self,
        waves: Sequence[Wave],
        known: Sequence[Knowledge],
        budget: Budget,
        streams: Callable[[int], Sequence[Stream]],
        judge: Judge | None = None,
    ) -> list[list[Reconstruction]]:
        """One reconstruction for each observation of each wave; the k-th observations of all waves are one client's.

        Args:
            known: for each wave.
            streams: of the wave at a place in the sequence.
            judge: an oracle in place of the attack's own objective, for reproducing the paper's counts and nothing else.
        """
        memory = [_Memory(self.alpha) for _ in waves[0].clients]
        found = []
        for place, (wave, knowledge) in enumerate(zip(waves, known, strict=True)):
            begin = self._begin(memory, wave, knowledge, streams(place))
            results = self.attack.continued(wave, knowledge, budget, streams(place), begin)
            for k, (past, result) in enumerate(zip(memory, results, strict=True)):
                good = result.objective <= self.fit if judge is None else judge(place, k, result)
                if result.x is not None and torch.isfinite(result.x).all() and (good or not self.discard_failures):
                    past.add(result.x)
            found.append(results)
        return found

    def _begin(
        self, memory: Sequence["_Memory"], wave: Wave, known: Knowledge, streams: Sequence[Stream]
    ) -> Tensor | None:
        """Starting images (K, B, C, H, W) in pixels; None: all from noise."""
        like = next(iter(wave.params.values()))
        shape = (known.batch_size, *known.shape)
        if self.start == "noise":
            return None
        if self.start == "half":
            return torch.full((len(wave), *shape), 0.5).to(like)
        if self.start == "mean":
            if known.auxiliary is None:
                raise ValueError("the mean image needs auxiliary images, and the attacker has none")
            return known.auxiliary.x.mean(0).expand(len(wave), *shape).to(like)
        images = []
        for past, stream in zip(memory, streams, strict=True):
            blend = past.blend
            noise = known.pixels(torch.randn(shape, generator=stream("start", 0)))  # what the attack itself would draw
            images.append(noise.to(like) if blend is None else blend.to(like))
        return torch.stack(images)


class _Memory:
    """The blend of one client's images; None until there are two."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.images = 0
        self._sum: Tensor | None = None

    @property
    def blend(self) -> Tensor | None:
        return self._sum if self.images >= 2 else None

    def add(self, x: Tensor) -> None:
        self.images += 1
        self._sum = x if self._sum is None else self.alpha * self._sum + (1 - self.alpha) * x
