"""One file that adds a kind of private data, as a user's package would: a number an example, with all that an audit needs of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave
from fedgauge.attacks.modality.base import PERCENT, MainMetric, Mark, Modality
from fedgauge.attacks.modality.image_metrics import Metric
from fedgauge.attacks.modality.registry import register
from fedgauge.client.data.images import Dataset

CLOSE = 0.01


class Numbers(Dataset):
    """Numbers x (N, 1) in [0, 1], in one of two classes by their size."""

    dtype: ClassVar[torch.dtype] = torch.float32
    dimensions: ClassVar[int] = 2


def numbers(count: int = 200) -> Numbers:
    """Uniform numbers; a tenth of them is for test."""
    x = torch.rand(count, 1, generator=torch.Generator().manual_seed(3))
    y, train = (x[:, 0] > 0.5).long(), count - count // 10
    return Numbers("numbers", x[:train], y[:train], x[train:], y[train:], 2, (), ())


def line(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A linear classifier of one number."""
    return nn.Linear(shape[0], classes)


class NumberModality(Modality):
    """Numbers are compared by whether they came back to a hundredth."""

    main = MainMetric(
        "right to a hundredth (%)",
        **PERCENT,
        metric="close",
        name="right numbers",
        margin=50.0,
        leaked=50.0,
        beyond="with half of the scale above every baseline",
        private="number",
    )
    measured: ClassVar = {"close": main}
    baselines: ClassVar = {"mean_number": "mynumbers:mean_number"}
    attacks = ()
    shown_as = "text"

    @classmethod
    def holds(cls, x: Tensor) -> bool:
        return x.dim() == 2 and x.is_floating_point()

    def metrics(self, gallery: Tensor) -> list[Metric]:
        return [Metric("close", lambda truth, guess: 100.0 * ((truth - guess).abs() <= CLOSE).all(1).double())]

    def pairing(self, truth: Tensor, guess: Tensor) -> Tensor:
        return guess[:, 0].argsort()[truth[:, 0].argsort().argsort()]

    def words(self, x: Tensor) -> list[str]:
        return [f"{float(x):.3f}"]

    def marked(self, guess: Tensor, truth: Tensor | None) -> tuple[tuple[str, Mark], ...]:
        right = truth is not None and bool((guess - truth).abs() <= CLOSE)
        return ((self.words(guess)[0], "right" if right else "wrong"),)


@dataclass(frozen=True)
class mean_number(Attack):
    """The mean of the public numbers."""

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        assert known.auxiliary is not None
        x = known.auxiliary.x.mean(0).expand(known.batch_size, 1)
        return [Reconstruction(x.clone(), None, 0.0, 0, 0.0, "converged") for _ in wave.clients]


@dataclass(frozen=True)
class row_over_bias(Attack):
    """The weights' gradient over the biases', which is the number itself."""

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        x = wave.update["weight"][:, :1] / wave.update["bias"][:, :1, None]
        return [Reconstruction(one, None, 0.0, 1, 0.0, "converged") for one in x]


register(Numbers, NumberModality)
