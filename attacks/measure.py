"""Attacks that reconstruct nothing: tests of membership, limits on every attack, what canaries show, and leaks of a user's own."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedgauge.attacks.base import Attack, Budget, ClientState, Knowledge, Reconstruction, Streams, Wave, not_applicable
from fedgauge.attacks.score_rows import ScoreRecord
from fedgauge.client.federation import Federation

Rows = dict[int, list[ScoreRecord]]  # by client
Memories = dict[int, ClientState]  # by client


@dataclass(frozen=True, eq=False)
class Case:
    """One wave to measure, with everything else that a measure may read.

    Args:
        name: of the planned attack.
        wave: as the attacker reads it with its knowledge; seen: as it arrived.
        others: by client, another one of the round; its truth grades a baseline.
        memories: by client, what a stateful measure remembers of it.
        seed: of the attacker's randomness.
    """

    fed: Federation
    name: str
    known: Knowledge
    wave: Wave
    seen: Wave
    others: Mapping[int, int]
    memories: Mapping[int, ClientState]
    seed: int

    def rows(self, client: int, values: Mapping[str, Sequence[float]], examples: Sequence[int]) -> list[ScoreRecord]:
        """The rows of a client: of each metric, one value for each of these examples."""
        return [
            ScoreRecord(self.wave.round, client, self.name, example, metric, value, "converged", 0.0)
            for metric, column in values.items()
            for example, value in zip(examples, column, strict=True)
        ]


class Measure(Attack):
    """An attack that returns rows of a metric; `metric` names its headline metric."""

    needs_truth: ClassVar[bool] = True  # whether it is graded by the private batches

    on_cpu = True

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        return not_applicable(wave, "it reconstructs nothing")

    def assumes(self, fed: Federation, batch: str) -> list[str]:
        """Return its assumed knowledge in addition to the clients' chain; batch: their examples, in words."""
        return [batch]

    @abstractmethod
    def measure(self, case: Case) -> tuple[Rows, Memories]:
        """By client, the rows of its update, and what a stateful measure remembers of it; a client without rows has no value.

        Raises:
            ValueError: nothing can be measured, for the reason that the message says.
        """
