"""What is measured of a test of membership, whatever the kind of data."""

from collections.abc import Mapping

from fedgauge.attacks.membership.measured import HELD, MEMBER
from fedgauge.attacks.modality.base import Measured

MEMBERSHIP: Mapping[str, Measured] = {
    MEMBER: Measured("in the batch: area under the ROC curve"),
    "membership_at_1_percent": Measured("in the batch, told at 1 % false positives", fraction=True, rate=True),
    "membership_at_0.1_percent": Measured("in the batch, told at 0.1 % false positives", fraction=True, rate=True),
    HELD: Measured("in the client's data: area under the ROC curve"),
    "held_membership_at_1_percent": Measured(
        "in the client's data, told at 1 % false positives", fraction=True, rate=True
    ),
    "held_membership_at_0.1_percent": Measured(
        "in the client's data, told at 0.1 % false positives", fraction=True, rate=True
    ),
}
