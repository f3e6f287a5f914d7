"""Which kinds of private data there are, and the metrics and baselines of all of them."""

from fedgauge.attacks.modality.base import Modality
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.sentences import SentenceModality
from fedgauge.client.data.corpora import Text
from fedgauge.client.data.images import Dataset

MODALITIES: dict[type[Dataset], type[Modality]] = {}
HIGHER_IS_BETTER: dict[str, bool] = {}  # by metric, in the order in which tables and figures show them
LABELS: dict[str, str] = {}  # of metrics
BASELINES: dict[str, str] = {}  # the component of each name


def register(dataset: type[Dataset], modality: type[Modality]) -> None:
    """Let a modality stand for the datasets of this type."""
    MODALITIES[dataset] = modality
    for name, measured in modality.measured.items():
        HIGHER_IS_BETTER[name], LABELS[name] = measured.higher_is_better, measured.label
    BASELINES.update(modality.baselines)


register(Dataset, ImageModality)
register(Text, SentenceModality)


def modality_of(dataset: Dataset) -> Modality:
    """The modality of a dataset: that of the nearest of its types."""
    return next(MODALITIES[kind] for kind in type(dataset).__mro__ if kind in MODALITIES)(dataset)


def modality_measured(metrics: tuple[str, ...]) -> type[Modality]:
    """The modality whose main metric is among these; images come last, as a wave whose worker died leaves a row of PSNR."""
    return next((m for m in reversed(MODALITIES.values()) if m.main.metric in metrics), ImageModality)
