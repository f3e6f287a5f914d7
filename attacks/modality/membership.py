"""What is measured of a test of membership, whatever the kind of data."""

from collections.abc import Mapping
from typing import NamedTuple

from fedgauge.attacks.modality.base import Measured

# of the members of a batch: of one update, and of any of a round that are attacked together; and of a client's data
MEMBER, ANYBODY, HELD = "membership", "anybody_membership", "held_membership"
RATES: Mapping[str, float] = {
    "_at_1_percent": 0.01,
    "_at_0.1_percent": 0.001,
}  # of false positives, by a metric's ending
LABELS_ALONE = "label_frequency"
GUESSES = (LABELS_ALONE, "loss")  # the baselines: scores that read nothing, or the weights alone


class Question(NamedTuple):
    """What a test asks, as the subject of a sentence, and where the members it tells are."""

    asked: str
    where: str


QUESTIONS: Mapping[str, Question] = {
    MEMBER: Question("Who was in a batch", "in the batch"),
    ANYBODY: Question("Who was in anybody's batch", "in anybody's batch"),
    HELD: Question("Whom a client's data holds", "in the client's data"),
}
MEMBERSHIP: Mapping[str, Measured] = {
    name: measured
    for metric, (_, where) in QUESTIONS.items()
    for name, measured in (
        (metric, Measured(f"{where}: area under the ROC curve", share=True)),
        *(
            (metric + ending, Measured(f"{where}, told at {100 * rate:g} % false positives", fraction=True, rate=True))
            for ending, rate in RATES.items()
        ),
    )
}
