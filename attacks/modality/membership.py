"""Metrics of a membership test, for any kind of data."""

from collections.abc import Mapping
from typing import NamedTuple

from fedgauge.attacks.modality.base import Measured

MEMBER, HELD = "membership", "dataset_membership"  # of the members of an update's batch, and of a client's data
RATES = {"_at_1_percent": 0.01, "_at_0.1_percent": 0.001}  # of false positives, by a metric's ending
LABELS_ALONE = "label_frequency"
GUESSES = (LABELS_ALONE, "loss")  # the baselines: scores that read nothing, or the weights alone


class Question(NamedTuple):
    """A test's question as the subject of a sentence, and the place of its members."""

    asked: str
    where: str


QUESTIONS: Mapping[str, Question] = {
    MEMBER: Question("Batch membership", "in the batch"),
    HELD: Question("Dataset membership", "in the client's data"),
}
MEMBERSHIP: dict[str, Measured] = {}
for metric, (_, where) in QUESTIONS.items():
    MEMBERSHIP[metric] = Measured(f"{where}: area under the ROC curve", share=True)
    for ending, rate in RATES.items():
        detected = f"{where}, detected at {100 * rate:g} % false positives"
        MEMBERSHIP[metric + ending] = Measured(detected, fraction=True, rate=True)
