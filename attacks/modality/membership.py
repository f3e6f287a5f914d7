"""Metrics of a membership test, for any kind of data."""

from collections.abc import Mapping
from typing import NamedTuple

from fedgauge.attacks.modality.base import Measured

MEMBER, HELD = "membership", "dataset_membership"  # of the members of an update's batch, and of a client's data
RATES: Mapping[str, float] = {
    "_at_1_percent": 0.01,
    "_at_0.1_percent": 0.001,
}  # of false positives, by a metric's ending
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
MEMBERSHIP: Mapping[str, Measured] = {
    name: measured
    for metric, (_, where) in QUESTIONS.items()
    for name, measured in (
        (metric, Measured(f"{where}: area under the ROC curve", share=True)),
        *(
            (
                metric + ending,
                Measured(f"{where}, detected at {100 * rate:g} % false positives", fraction=True, rate=True),
            )
            for ending, rate in RATES.items()
        ),
    )
}
