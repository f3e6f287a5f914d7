"""Stand-ins: clients that hold auxiliary images, so that a scenario can be tried without touching a client's data."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator

from fedgauge.attacks.base import Observation, Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.transforms import GroupMean
from fedgauge.client.update import Batch, Params


@dataclass(frozen=True, eq=False)
class StandIns:
    """Stand-in clients of a federation, numbered from 0; under a secure sum each is a group.

    Args:
        count: of them.
    """

    federation: Federation
    count: int

    @cached_property
    def examples(self) -> Batch:
        """Public ones, from which their batches are drawn."""
        return Auditor(self.federation).auxiliary

    @property
    def members(self) -> int:
        """Clients whose updates are seen as one."""
        return len(self.federation.protocol.groups(1)[0])

    @property
    def size(self) -> int:
        """Examples behind what the server sees of one."""
        return self.members * self.federation.shards.batch_size

    @cached_property
    def start(self) -> tuple[Params, dict[str, torch.Tensor]]:
        """The federation's initial weights and buffers."""
        return self.federation.initial()

    @cached_property
    def batches(self) -> list[Batch]:
        """The examples of each."""
        return [self._batch(k) for k in range(self.count)]

    @cached_property
    def wave(self) -> Wave:
        """What the server would see of all of them in the first round, through the whole chain."""
        wave = Wave.stack([self._observation(k, batch) for k, batch in enumerate(self.batches)])
        self.federation.load_buffers(self.start[1])
        return wave

    def draws(self, k: int) -> Generator:
        """The randomness of one."""
        return generator(self.federation.protocol.seed, "stand-in draws", k)

    def _batch(self, k: int) -> Batch:
        rng = generator(self.federation.protocol.seed, "stand-in", k)
        chosen = torch.randint(len(self.examples.x), (self.size,), generator=rng)
        return Batch(self.examples.x[chosen], self.examples.y[chosen])

    def _observation(self, k: int, batch: Batch) -> Observation:
        params, buffers = self.start
        seen = GroupMean(self.members)(self.federation.chain(self.federation.gradient))
        return Observation(1, k, params, seen(params, batch, self.draws(k)), buffers)
