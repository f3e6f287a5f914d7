"""What honest clients' guards would make of the next weights: one update must not make all of them refuse for good."""

import secrets

from torch import nn

from fedgauge.client.inspection.results import DetectorResults
from fedgauge.client.inspection.weights import embedding_weights, inspect_weights
from fedgauge.client.rng import generator
from fedgauge.client.update import Params

# the detectors of one round's movement, which an update causes; others judge weights, or need a client's own examples
MOVEMENT = ("jump", "moved rows")


class GuardCheck:
    """Compares the next weights with those that were sent, as clients do.

    Args:
        seed: samples the rows of large matrices; None: entropy, as clients do that are not simulated.
    """

    def __init__(self, model: nn.Module, seed: int | None = None) -> None:
        self.tables = embedding_weights(model)
        self.seed = secrets.randbits(63) if seed is None else seed

    def alarms(self, round: int, sent: Params, following: Params) -> str:
        """What clients would refuse in weights that follow those that were sent; empty if nothing.

        All calls of a round look at the same rows: what is found without one reply is compared with what was found with it.
        """
        rng = generator(self.seed, "inspection", "server", round)
        results = inspect_weights(following, sent, 1, self.tables, rng)
        moved = DetectorResults.of(result for result in results if result.detector in MOVEMENT)
        return moved.reasons
