"""Feedback blending: earlier reconstructions of a client's images are the start of the next search (Leite et al., 2024)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedgauge.attacks.base import (
    Attack,
    Budget,
    ClientState,
    Knowledge,
    Reconstruction,
    StatefulAttack,
    Streams,
    Wave,
    not_applicable,
)
from fedgauge.attacks.delegating import DelegatingAttack
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.client.components import Proportion


@dataclass(frozen=True)
class feedback_blending(StatefulAttack, DelegatingAttack):
    """Feedback blending (Leite et al., 2024): iDLG-FB, DLG-FB and, with the failures, their NF variants.

    Another attack starts from a blend of its earlier reconstructions of a client. The state holds `images`, the number of
    images in the blend, and `blend` (B, C, H, W), if there is one.

    Args:
        attack: a recipe of gradient matching, by its name or as a table: {use = "dlg", double = false}.
        alpha: the share of older images in a blend.
        discard_failures: blend in only successes; False is the paper's NF variant, which collapses.
        fit: the attack's whole objective up to which a reconstruction is a success; 1e-4 suits DLG and iDLG.
        start: "blend", from noise until there are two images. The controls "half" (constant 1/2), "mean" (the mean auxiliary
            image) and "noise" measure the effect of the start by itself.

    Raises:
        ValueError: attack is not a gradient-matching recipe, or alpha is outside 0 to 1.
    """

    attack: str | Mapping[str, Any] | Attack = "idlg"
    alpha: Proportion = 0.5
    discard_failures: bool = True
    fit: float = 1e-4
    start: Literal["blend", "half", "mean", "noise"] = "blend"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner, GradientMatching):
            raise ValueError("attack must be a gradient-matching recipe such as idlg")

    @property
    def label_source(self) -> Literal["restored", "optimised"]:
        return self.inner.label_source

    def advance(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams, memories: Sequence[ClientState]
    ) -> tuple[list[Reconstruction], list[ClientState]]:
        try:
            begin = self._begin(wave, known, streams, memories)
        except ValueError as error:
            return not_applicable(wave, str(error)), list(memories)
        assert isinstance(self.inner, GradientMatching)  # checked above
        results = self.inner.continued(wave, known, budget, streams, begin)
        return results, [self._remember(memory, found) for memory, found in zip(memories, results, strict=True)]

    def _remember(self, memory: ClientState, found: Reconstruction) -> ClientState:
        x, images = found.x, int(memory.get("images", 0))
        failed = self.discard_failures and not found.objective <= self.fit
        if x is None or not torch.isfinite(x).all() or failed:
            return memory
        if images and memory["blend"].shape != x.shape:  # a secure sum over another number of clients
            return memory
        blend = self.alpha * memory["blend"] + (1 - self.alpha) * x if images else x
        return {"images": torch.tensor(images + 1), "blend": blend}

    def _begin(self, wave: Wave, known: Knowledge, streams: Streams, memories: Sequence[ClientState]) -> Tensor | None:
        """Starting images (K, B, C, H, W) in pixels; None: all from noise."""
        like = next(iter(wave.params.values()), torch.zeros(()))  # without parameters the attack itself declines
        shape = (known.batch_size, *known.shape)
        if self.start == "noise":
            return None
        if self.start == "half":
            return torch.full((len(wave), *shape), 0.5).to(like)
        if self.start == "mean":
            return known.public.x.mean(0).expand(len(wave), *shape).to(like)
        images = []
        for memory, stream in zip(memories, streams, strict=True):
            if int(memory.get("images", 0)) >= 2 and memory["blend"].shape == shape:
                images.append(memory["blend"].to(like))
            else:
                noise = torch.randn(shape, generator=stream("start", 0))  # the draw of the attack itself
                images.append(known.pixels(noise).to(like))
        return torch.stack(images)
