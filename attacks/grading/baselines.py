"""Baselines: what an attacker gets without reading the update. Leakage is what exceeds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.gaussian_prior import class_means
from fedgauge.attacks.labels import restore
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.tokenizer import framed


@dataclass(frozen=True)
class mean_image(Attack):
    """Guess the mean auxiliary image, which is the prior's mean, for every update."""

    is_random: ClassVar[bool] = False

    on_cpu = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if known.auxiliary is None:
            return not_applicable(wave, "the mean image needs auxiliary data")
        mean = known.auxiliary.x.mean(0).expand(known.batch_size, *known.shape)
        return [_guess(mean) for _ in wave.clients]


@dataclass(frozen=True)
class class_mean_image(Attack):
    """Guess the mean auxiliary image of each label. The labels are given, or restored where nobody knows them (a deployment)."""

    is_random: ClassVar[bool] = False

    on_cpu = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if known.auxiliary is None:
            return not_applicable(wave, "the mean image of a class needs auxiliary data")
        try:
            labels = restore(wave, known)  # the given ones, if they are
        except ValueError as error:
            return not_applicable(wave, str(error))
        return [_guess(class_means(known.auxiliary, own)) for own in labels]


@dataclass(frozen=True)
class random_image(Attack):
    """Guess random auxiliary images for every update."""

    on_cpu = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if known.auxiliary is None:
            return not_applicable(wave, "a random image needs auxiliary data")
        x = known.auxiliary.x
        return [_guess(x[torch.randint(len(x), (known.batch_size,), generator=s("image"))]) for s in streams]


@dataclass(frozen=True)
class random_words(Attack):
    """Guess words at the auxiliary text's frequencies, with the lengths that are known or else the auxiliary text's."""

    on_cpu = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if known.auxiliary is None or known.text is None or not isinstance(known.model, LanguageModel):
            return not_applicable(wave, "random words need auxiliary text and a language model")
        model, x = known.model, known.auxiliary.x
        words = x[~torch.isin(x, torch.tensor(sorted(model.special)))]
        if not len(words):
            return not_applicable(wave, "the auxiliary text has no words")
        guesses = []
        for k, stream in enumerate(streams):
            rng = stream("words")
            if known.text.lengths is not None:
                lengths = known.text.lengths[k]
            else:
                drawn = x[torch.randint(len(x), (known.batch_size,), generator=rng)]
                lengths = (drawn != model.pad).sum(1)
            frame = len(model.start) + len(model.end)
            sentences = [
                words[torch.randint(len(words), (max(n - frame, 0),), generator=rng)].tolist() for n in lengths.tolist()
            ]
            guesses.append(_guess(framed(sentences, known.shape[0], model.pad, model.start, model.end)))
        return guesses


@dataclass(frozen=True)
class mode_row(Attack):
    """Guess each number's mean and each column's most frequent category among the auxiliary rows, for every row."""

    is_random: ClassVar[bool] = False

    on_cpu = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if known.auxiliary is None or known.columns is None:
            return not_applicable(wave, "the most frequent cells need auxiliary rows of a table")
        cells = known.columns.cells(known.auxiliary.x)
        likely = [
            cell.nanmean() if column.numeric else cell.mode().values
            for column, cell in zip(known.columns, cells.unbind(-1), strict=True)
        ]
        row = known.columns.rows(torch.stack(likely))
        return [_guess(row.expand(known.batch_size, -1)) for _ in wave.clients]


@dataclass(frozen=True)
class random_row(Attack):
    """Guess each cell at the auxiliary rows' frequencies, independently of the others."""

    on_cpu = True

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if known.auxiliary is None or known.columns is None:
            return not_applicable(wave, "random cells need auxiliary rows of a table")
        cells, columns = known.columns.cells(known.auxiliary.x), known.columns
        size = (known.batch_size, len(columns))
        drawn = [torch.randint(len(cells), size, generator=stream("cells")) for stream in streams]
        return [_guess(columns.rows(cells.gather(0, chosen))) for chosen in drawn]


def _guess(x: Tensor) -> Reconstruction:
    return Reconstruction(x.clone(), None, 0.0, 0, 0.0, "converged")
