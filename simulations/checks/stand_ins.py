"""Stand-ins: clients that hold auxiliary images, so that a scenario can be tried without touching a client's data."""

from functools import cached_property

import torch

from fedgauge.attacks.base import Observation, Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.transforms import GroupMean
from fedgauge.client.update import Batch


class StandIns:
    """Stand-in clients of a federation, numbered from 0; under a secure sum each is a group.

    Attributes:
        members: clients whose updates are seen as one.
        size: examples behind what the server sees of one.
        params: the federation's initial weights.
        batches: the examples of each, which are public ones.
    """

    def __init__(self, federation: Federation, count: int) -> None:
        self.federation, self.seed, public = federation, federation.protocol.seed, Auditor(federation).auxiliary
        self.members = len(federation.protocol.groups(1)[0])
        self.size = self.members * federation.shards.batch_size
        self.params, self.buffers = federation.initial()
        drawn = [generator(self.seed, "stand-in", k) for k in range(count)]
        chosen = [torch.randint(len(public.x), (self.size,), generator=rng) for rng in drawn]
        self.batches = [Batch(public.x[rows], public.y[rows]) for rows in chosen]

    @cached_property
    def wave(self) -> Wave:
        """What the server would see of all of them in the first round, through the whole chain."""
        seen = GroupMean(self.members)(self.federation.chain(self.federation.gradient))
        updates = [seen(self.params, b, generator(self.seed, "stand-in draws", k)) for k, b in enumerate(self.batches)]
        wave = Wave.stack([Observation(1, k, self.params, u, self.buffers) for k, u in enumerate(updates)])
        self.federation.load_buffers(self.buffers)
        return wave
