"""Baselines: what an attacker gets without reading the update. Leakage is what exceeds them."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Streams, Wave, not_applicable
from fedgauge.attacks.gaussian_prior import class_means
from fedgauge.attacks.label_restoration import restore
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.update import Batch


class Baseline(Attack):
    """An attack that guesses from auxiliary data."""

    on_cpu = True
    role = "baseline"

    @abstractmethod
    def guesses(self, public: Batch, wave: Wave, known: Knowledge, streams: Streams) -> Sequence[Tensor]:
        """A batch for each observation; ValueError says what is missing."""

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        try:
            guesses = self.guesses(known.public, wave, known, streams)
        except ValueError as error:
            return not_applicable(wave, str(error))
        y = known.label_kind.guess(known.batch_size)
        return [Reconstruction(x.clone(), y, 0.0, 0, 0.0, "converged") for x in guesses]


@dataclass(frozen=True)
class mean_image(Baseline):
    """Guess the mean auxiliary image."""

    def guesses(self, public: Batch, wave: Wave, known: Knowledge, streams: Streams) -> Sequence[Tensor]:
        return [public.x.mean(0).expand(known.batch_size, *known.shape)] * len(wave)


@dataclass(frozen=True)
class class_mean_image(Baseline):
    """Guess the mean auxiliary image of each label."""

    def guesses(self, public: Batch, wave: Wave, known: Knowledge, streams: Streams) -> Sequence[Tensor]:
        return [class_means(public, own) for own in restore(wave, known)]  # the given labels, if they are


@dataclass(frozen=True)
class random_image(Baseline):
    """Guess random auxiliary images."""

    def guesses(self, public: Batch, wave: Wave, known: Knowledge, streams: Streams) -> Sequence[Tensor]:
        x = public.x
        return [x[torch.randint(len(x), (known.batch_size,), generator=s("image"))] for s in streams]


@dataclass(frozen=True)
class random_words(Baseline):
    """Guess words at the auxiliary text's frequencies."""

    def guesses(self, public: Batch, wave: Wave, known: Knowledge, streams: Streams) -> Sequence[Tensor]:
        assert isinstance(known.model, LanguageModel)
        model, x = known.model, public.x
        words = x[~torch.isin(x, torch.tensor(sorted(model.special)))]
        guesses = []
        for k, stream in enumerate(streams):
            rng = stream("words")
            if known.lengths is not None:
                lengths = known.lengths[k]
            else:
                drawn = x[torch.randint(len(x), (known.batch_size,), generator=rng)]
                lengths = (drawn != model.pad).sum(1)
            frame = len(model.start) + len(model.end)
            sentences = [
                words[torch.randint(len(words), (max(n - frame, 0),), generator=rng)].tolist() for n in lengths.tolist()
            ]
            guesses.append(framed(sentences, known.shape[0], model.pad, model.start, model.end))
        return guesses


@dataclass(frozen=True)
class mode_row(Baseline):
    """Guess each column's mean or most frequent category among the auxiliary rows."""

    def guesses(self, public: Batch, wave: Wave, known: Knowledge, streams: Streams) -> Sequence[Tensor]:
        assert known.columns is not None
        cells = known.columns.cells(public.x)
        likely = [
            cell.nanmean() if column.numeric else cell.mode().values
            for column, cell in zip(known.columns, cells.unbind(-1), strict=True)
        ]
        return [known.columns.rows(torch.stack(likely)).expand(known.batch_size, -1)] * len(wave)


@dataclass(frozen=True)
class random_row(Baseline):
    """Guess each cell at the auxiliary rows' frequencies, independently of the others."""

    def guesses(self, public: Batch, wave: Wave, known: Knowledge, streams: Streams) -> Sequence[Tensor]:
        assert known.columns is not None
        cells, columns = known.columns.cells(public.x), known.columns
        size = (known.batch_size, len(columns))
        drawn = [torch.randint(len(cells), size, generator=stream("cells")) for stream in streams]
        return [columns.rows(cells.gather(0, chosen)) for chosen in drawn]
