"""What is measured of a test of membership, whatever the kind of data."""

from collections.abc import Mapping

from fedgauge.attacks.membership.measured import ANYBODY, HELD, MEMBER, RATES
from fedgauge.attacks.modality.base import Measured

QUESTIONS: Mapping[str, str] = {MEMBER: "in the batch", ANYBODY: "in anybody's batch", HELD: "in the client's data"}
MEMBERSHIP: Mapping[str, Measured] = {
    name: measured
    for metric, where in QUESTIONS.items()
    for name, measured in (
        (metric, Measured(f"{where}: area under the ROC curve", share=True)),
        *(
            (metric + ending, Measured(f"{where}, told at {100 * rate:g} % false positives", fraction=True, rate=True))
            for ending, rate in RATES.items()
        ),
    )
}
