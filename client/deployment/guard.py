"""A client's guard: it inspects the weights that came and the update that would leave, and may withhold the update.

The server learns that no update comes, but not why. The weights are inspected without the client's examples.
"""

from dataclasses import dataclass

from flwr.app import Error, Message
from torch import Generator, nn

from fedgauge.client.inspection.policy import REASON, InspectionPolicy
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Params

WITHHELD = 111  # an error code of our own


@dataclass(frozen=True)
class Inspection:
    """Result of inspecting the weights of a round; by default there was no inspection.

    Args:
        words: for the owner; "" where the mode keeps quiet.
        withhold: why not to answer, for the owner only; "" if the client may.
        suspicion: the largest score over its threshold, >= 0; an alarm from 1 on.
    """

    words: str = ""
    withhold: str = ""
    alarm: bool = False
    suspicion: float = 0.0


def withheld(message: Message) -> Message:
    """The answer instead of an update."""
    return Message(Error(WITHHELD, REASON), reply_to=message)


def inspect_message(
    inspection_policy: InspectionPolicy,
    model: nn.Module,
    round: int,
    params: Params,
    memory: TransformState,
    rng: Generator | None = None,
) -> Inspection:
    """Inspect the weights that a client received.

    Args:
        memory: what the client kept from earlier rounds; it is updated.
        rng: None: the client's own entropy.
    """
    if inspection_policy.inspect == "off":
        return Inspection()
    results = inspection_policy.findings(model, params, round, memory, rng)
    withhold = results.reasons if inspection_policy.inspect == "refuse" else ""
    words = ""
    if results.alarms:
        words = f"round {round}: alarm, suspicion {results.suspicion:.3g}: {results.reasons}"
    elif inspection_policy.inspect == "log":
        words = f"round {round}: suspicion {results.suspicion:.3g}"
    return Inspection(words, withhold, bool(results.alarms), results.suspicion)
