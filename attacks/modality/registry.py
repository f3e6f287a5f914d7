"""The kinds of private data, with the metrics of all of them."""

from collections.abc import Collection

from fedgauge.attacks.modality.arrays import ArrayModality
from fedgauge.attacks.modality.base import Measured, Modality
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.membership import MEMBERSHIP
from fedgauge.attacks.modality.rows import RowModality
from fedgauge.attacks.modality.sentences import SentenceModality
from fedgauge.client.data.corpora import Text
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data.own_arrays import Arrays
from fedgauge.client.data.tables import Tabular

MODALITIES: dict[type[Dataset], type[Modality]] = {}
MEASURED: dict[str, Measured] = {}  # what each metric is, in the order in which tables and figures show them


def register(dataset: type[Dataset], modality: type[Modality]) -> None:
    """Register a modality for the datasets of this type."""
    MODALITIES[dataset] = modality
    MEASURED.update(modality.measured)


register(Arrays, ArrayModality)  # first, as images are looked for first by the metric of both
register(Dataset, ImageModality)
register(Text, SentenceModality)
register(Tabular, RowModality)
MEASURED.update(MEMBERSHIP)


def modality_of(dataset: Dataset) -> Modality:
    return next(MODALITIES[kind] for kind in type(dataset).__mro__ if kind in MODALITIES)(dataset)


def further_leaks() -> list[str]:
    """Return the metrics of leaks that are neither reconstructed examples nor membership, as a `Measure` of one's own adds them."""
    of_examples = {name for modality in MODALITIES.values() for name in modality.measured}
    return [name for name in MEASURED if name not in of_examples and name not in MEMBERSHIP]


def modality_stored(key: str) -> type[Modality] | None:
    return next((m for m in MODALITIES.values() if m.main.key == key), None)


def modality_measured(metrics: Collection[str]) -> type[Modality]:
    """Return the modality with its main metric among these; images come last: an older ledger has a row of PSNR for what failed."""
    return next((m for m in reversed(MODALITIES.values()) if m.main.metric in metrics), ImageModality)
