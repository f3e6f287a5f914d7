"""What honest clients' guards would make of the next weights: one update must not make all of them refuse for good."""

from dataclasses import dataclass

from torch import nn

from fedgauge.client.inspection.results import DetectorResults
from fedgauge.client.inspection.weights import embedding_weights, inspect_weights
from fedgauge.client.rng import generator
from fedgauge.client.update import Params

# the detectors of one round's movement, which an update causes; others judge weights, or need a client's own examples
MOVEMENT = ("jump", "moved rows")


@dataclass(eq=False)
class GuardCheck:
    """Compares the next weights with those that were sent, as clients do.

    Args:
        seed: samples the rows of large matrices; None: entropy, as clients do that are not simulated.
        limit: the suspicion of an alarm; a client's is 1.
    """

    model: nn.Module
    seed: int | None = None
    limit: float = 1.0

    def alarms(self, sent: Params, following: Params, near: bool = False) -> str:
        """What clients would refuse in weights that follow those that were sent; empty if nothing.

        Args:
            near: name also what comes half the way to an alarm.
        """
        rng = None if self.seed is None else generator(self.seed, "inspection", "server")
        results = inspect_weights(following, sent, 1, embedding_weights(self.model), rng)
        moved = DetectorResults.of(result for result in results if result.detector in MOVEMENT)
        limit = self.limit / 2 if near else self.limit
        found = [f"{r.layer or 'the network'}: {r.description}" for r in moved.results if r.ratio >= limit]
        return "; ".join(found)
