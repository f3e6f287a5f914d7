"""One kind of private data as one value: how it is graded, against which baselines, and how people see it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgauge.attacks.base import Sentences
from fedgauge.attacks.learned.auxiliary import Auxiliary
from fedgauge.attacks.modality.image_metrics import Metric
from fedgauge.client.data.images import Dataset

Mark = Literal["right", "misplaced", "wrong"]


@dataclass(frozen=True)
class MainMetric:
    """The metric by which attacks are compared.

    Args:
        name, unit: as people write them.
        margin: no guess beats every baseline by this much through luck.
        beyond: the margin as a phrase.
        private: the noun for what is attacked.
        cap: the most that a value counts in a mean.
    """

    metric: str
    name: str
    unit: str
    margin: float
    beyond: str
    private: str
    cap: float


@dataclass(frozen=True)
class Measured:
    """A metric as tables and figures show it."""

    label: str
    higher_is_better: bool = True


@dataclass(frozen=True, eq=False)
class Modality(ABC):
    """The kind of a dataset's examples; the class alone says what needs no dataset.

    Class attributes:
        main: the metric by which attacks are compared.
        measured: every metric that a reconstruction may get, in the order in which tables and figures show them.
        baselines: the component of each guess that reads no update.
        limits: bounds on every attack, where the noise is known.
        attacks: groups of the registry whose attacks reconstruct such examples.
        shown_as: pictures, or words that are each right, misplaced or wrong.
        gives_lengths: whether the threat model may give the attacker the examples' lengths.
        hides_defense: why no defense can be inferred from zeros of the update; empty if it can.
        hides_training: why an update does not tell how its client trained; empty if it does.
        blank_name: what `blank` is, in a word or two.
    """

    dataset: Dataset

    main: ClassVar[MainMetric]
    measured: ClassVar[Mapping[str, Measured]]
    baselines: ClassVar[Mapping[str, str]]
    limits: ClassVar[tuple[str, ...]] = ()
    attacks: ClassVar[tuple[str, ...]]
    shown_as: ClassVar[Literal["image", "text"]]
    gives_lengths: ClassVar[bool] = False
    hides_defense: ClassVar[str] = ""
    hides_training: ClassVar[str] = ""
    blank_name: ClassVar[str] = "zeros"

    @classmethod
    @abstractmethod
    def holds(cls, x: Tensor) -> bool:
        """Whether a batch x has the shape and type of such examples."""

    @abstractmethod
    def metrics(self, gallery: Tensor) -> list[Metric]:
        """The metrics of every reconstruction; gallery: public examples, for identification."""

    @abstractmethod
    def pairing(self, truth: Tensor, guess: Tensor) -> Tensor:
        """Order (B,) that pairs guess[order[i]] with truth[i], one to one."""

    def blank(self, truth: Tensor) -> Tensor:
        """The guess of the truth's shape as which a paper's table grades an attack that failed."""
        return torch.zeros_like(truth)

    def known(self) -> Sentences | None:
        """What an attacker knows of such examples besides the model, before anything is given to it."""
        return None

    def condition(self, lengths: str) -> str:
        """What else the attacker knows of the examples, for its knowledge card; empty if nothing."""
        return ""

    def auxiliary(self, chosen: Auxiliary, size: int) -> str:
        """The attacker's public examples, for its knowledge card."""
        return f"{size} auxiliary {self.main.private}s of the same distribution"

    def words(self, x: Tensor) -> list[str]:
        """One example as words, where examples are shown as text."""
        raise NotImplementedError(f"{type(self).__name__} shows its examples as {self.shown_as}")  # only text is asked

    def marked(self, guess: Tensor, truth: Tensor | None) -> tuple[tuple[str, Mark], ...]:
        """A guess's words, each compared with the truth; all are wrong without one."""
        raise NotImplementedError(f"{type(self).__name__} shows its examples as {self.shown_as}")  # only text is asked
