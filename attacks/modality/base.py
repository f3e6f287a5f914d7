"""One kind of private data as one value: how it is graded, against which baselines, and how people see it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from fedgauge.attacks.base import Knowledge, Reconstruction
from fedgauge.attacks.learned.auxiliary import Auxiliary
from fedgauge.attacks.modality.image_metrics import Metric
from fedgauge.client.components import Table
from fedgauge.client.data.dataset import Dataset

Mark = Literal["right", "misplaced", "wrong"]
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """Properties of a metric, for all code that computes with its values or shows them.

    Args:
        label: on an axis, with the unit.
        unit: of its values; empty if they have none.
        digits: decimals of a value; None: three significant digits, as its size is unknown.
        cap: the most that a value counts in a mean and in a figure; None: no cap.
        ceiling: the value from which on more leakage is not seen: the end of a colour scale that is the same for all runs.
        share: never below 0 nor above the ceiling, so that its intervals are not either.
        fraction: a share of 1, shown in percent.
        rate: 0 or 1 for each example, so that there is no worst case, and intervals are Wilson's.
        of_batch: one value for a whole batch.
    """

    label: str
    higher_is_better: bool = True
    unit: str = ""
    digits: int | None = 3
    cap: float | None = None
    ceiling: float = 1.0
    share: bool = False
    fraction: bool = False
    rate: bool = False
    of_batch: bool = False

    @property
    def sign(self) -> int:
        """The factor that makes the value that leaks most the largest."""
        return 1 if self.higher_is_better else -1

    def leakiest(self, found: Iterable[T], value: Callable[[T], float]) -> T | None:
        """Return the result that leaks most, the first of several; None if there is none."""
        return max(found, key=lambda one: self.sign * value(one), default=None)

    @property
    def complete(self) -> float:
        """The value of a perfect reconstruction: the cap of a mean, or the largest possible value."""
        return self.ceiling if self.cap is None else self.cap

    def came_back_whole(self, value: float) -> bool:
        """Return whether an example's value leaks at least as much."""
        return self.sign * value >= self.sign * self.complete

    @property
    def whole(self) -> float | None:
        """The largest value of a share; None: it is no share."""
        return self.ceiling if self.share or self.fraction else None


PERCENT: Mapping[str, Any] = {"unit": "%", "digits": 1, "ceiling": 100.0, "share": True}
DISTANCE: Mapping[str, Any] = {"higher_is_better": False, "ceiling": 0.0}


@dataclass(frozen=True, kw_only=True)
class MainMetric(Measured):
    """The metric by which attacks are compared.

    Args:
        metric, name: in the ledger, and as people write it.
        margin: no guess beats every baseline by this much through luck, unless it counts few cells.
        beyond: the margin as a phrase.
        whole_as: how an example with the best value is reconstructed.
        by_cell: it counts an example's cells, of which luck may get all right if they are few.
        private: the noun for what is attacked.
        stored: the name in a ledger of the kind of data, where another kind has the same metric; default: the metric.
    """

    metric: str
    name: str
    margin: float
    beyond: str
    private: str
    whole_as: str = "exactly"
    by_cell: bool = False
    stored: str = ""

    @property
    def key(self) -> str:
        return self.stored or self.metric


@dataclass(frozen=True, eq=False)
class Modality(ABC):
    """The kind of a dataset's examples; the class itself answers what needs no dataset.

    Class attributes:
        main: the metric by which attacks are compared.
        measured: what each metric is that a reconstruction may get, in the order in which tables and figures show them.
        baselines: the component of each guess that reads no update.
        given_labels: those of the baselines that are given the true labels, where there is a truth.
        limits: of the error of every attack, where the noise is known.
        attacks: groups of the registry with attacks that reconstruct such examples.
        shown_as: pictures, or words that are each right, misplaced or wrong.
        gives_lengths: whether the threat model may give the attacker the examples' lengths.
        parts: what an example's shape counts.
        bounds: the least and greatest value of a possible example; None: there are none.
        condition: further knowledge of the examples for the threat-model card; {} stands for what is known of their lengths.
    """

    dataset: Dataset

    main: ClassVar[MainMetric]
    measured: ClassVar[Mapping[str, Measured]]
    baselines: ClassVar[Mapping[str, str]]
    given_labels: ClassVar[tuple[str, ...]] = ()
    limits: ClassVar[tuple[str, ...]] = ()
    attacks: ClassVar[tuple[str, ...]]
    shown_as: ClassVar[Literal["image", "text"]]
    gives_lengths: ClassVar[bool] = False
    parts: ClassVar[str] = "numbers"
    bounds: ClassVar[tuple[float, float] | None] = None
    condition: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def holds(cls, x: Tensor) -> bool:
        """Return whether a batch x has the shape and type of such examples."""

    @abstractmethod
    def metrics(self, gallery: Tensor) -> list[Metric]:
        """Return the metrics of every reconstruction; gallery: public examples, for identification."""

    @abstractmethod
    def pairing(self, truth: Tensor, guess: Tensor) -> Tensor:
        """Order (B,) that pairs guess[order[i]] with truth[i], one to one."""

    def arranged(self, x: Tensor) -> Tensor:
        """Examples that somebody hands in, in the dataset's layout; ValueError if they cannot be brought into it."""
        return x

    def possible(self, x: Tensor) -> Tensor:
        """A reconstruction as examples that can be: a client that grades at home takes no others."""
        return x if self.bounds is None else x.clamp(*self.bounds)

    def informed(self, known: Knowledge) -> Knowledge:
        """Add what an attacker knows beforehand of such examples."""
        return known if self.bounds is None else replace(known, low=self.bounds[0], high=self.bounds[1])

    def of_batch(self, truth: Tensor, found: Reconstruction) -> dict[str, float]:
        """Metrics of a whole update, by name, from its truth and what was found, in the same order."""
        return {}

    def small_model(self) -> Table:
        """Return the component table of a small network that reads such examples, to try a client's file with."""
        return {"use": "mlp", "hidden": [16]}

    def auxiliary(self, chosen: Auxiliary, size: int) -> str:
        """The attacker's public examples, for its threat-model card."""
        return f"{size} auxiliary {self.main.private}s of the same distribution"

    def headings(self) -> tuple[str, ...]:
        """Return the names of an example's words, if all examples share them; empty if its words are a text."""
        return ()

    def words(self, x: Tensor) -> list[str]:
        """One example as words; none where examples are shown as images."""
        return []

    def marked(self, guess: Tensor, truth: Tensor | None) -> tuple[tuple[str, Mark], ...]:
        """A guess's words, each compared with the truth; all are wrong without one."""
        return ()
