"""The names of what is measured of a test of membership."""

from collections.abc import Mapping

# of the members of a batch: of one update, and of any of a round that are attacked together; and of a client's data
MEMBER, ANYBODY, HELD = "membership", "anybody_membership", "held_membership"
RATES: Mapping[str, float] = {
    "_at_1_percent": 0.01,
    "_at_0.1_percent": 0.001,
}  # of false positives, by a metric's ending
LABELS_ALONE = "label_frequency"
GUESSES = (LABELS_ALONE, "loss")  # the baselines: scores that read nothing, or the weights alone
