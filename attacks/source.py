"""Sources of an audit's waves and truth: a federation in memory, or public examples in place of private ones.

A third source, of a recorded run, is fedgauge.server.store.tape_source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedgauge.attacks.base import Observation, Wave
from fedgauge.attacks.modality.base import Modality
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.transforms import GroupMean
from fedgauge.client.update import Batch, Params, Update

NO_TRUTH = 'labels = "given" needs the true labels, which the server of a deployment does not have: use "restored"'


@dataclass(frozen=True, eq=False)
class FederationSource:
    """A federation in memory: its clients' updates, and their batches as the truth.

    Args:
        federation: the clients, their data and their network.
        blind: there is no truth, as in a deployment.

    Raises:
        SpecError: on first use of a part that the protocol describes wrongly.
    """

    federation: Federation
    blind: bool = False

    @cached_property
    def auxiliary(self) -> Batch:
        """The public examples: the attacker's knowledge of the distribution, and the gallery of identification."""
        return self.federation.shards.auxiliary_batch()

    @cached_property
    def modality(self) -> Modality:
        return modality_of(self.federation.shards.dataset)

    def truth(self, client: int, round: int) -> Batch:
        """Return the private examples behind the server's view of a client in a round.

        Raises:
            ValueError: the source is blind.
        """
        if self.blind:
            raise ValueError(NO_TRUTH)
        return self.federation.batch_at(client, round)

    def trained_on(self, wave: Wave, client: int) -> Batch | None:
        """Return the same examples after the chain's batch transforms, such as mixup; None if there are none."""
        return self.federation.trained_on(wave.params, wave.buffers, client, wave.round)

    def seen(
        self,
        client: int,
        round: int = 1,
        sent: tuple[Params, Mapping[str, Tensor]] | None = None,
        update: Update | None = None,
    ) -> Observation:
        """Return the server's observation of a client in a round.

        Args:
            sent: weights and buffers; default: the initial ones.
            update: if it is there already; default: it is computed.
        """
        params, buffers = self.federation.initial() if sent is None else sent
        if update is None:
            update = self.federation.client_update(params, buffers, client, round)
        return Observation(round, client, params, update, buffers)

    def wave(self, clients: Sequence[int] = (0,), round: int = 1) -> Wave:
        """Return the server's observations of these clients in a round at the initial weights."""
        sent = self.federation.initial()
        return Wave.stack([self.seen(client, round, sent) for client in clients])


@dataclass(frozen=True, eq=False)
class PublicSource(FederationSource):
    """Stand-in clients that hold public examples, numbered from 0: no client's data is touched. Of a secure sum each is a group."""

    count: int = 1

    @property
    def members(self) -> int:
        return self.federation.protocol.group_size

    @property
    def size(self) -> int:
        return self.members * self.federation.shards.batch_size

    @cached_property
    def batches(self) -> list[Batch]:
        public, seed = self.auxiliary, self.federation.protocol.seed
        drawn = [generator(seed, "stand-in", k) for k in range(self.count)]
        chosen = [torch.randint(len(public.x), (self.size,), generator=rng) for rng in drawn]
        return [Batch(public.x[rows], public.y[rows]) for rows in chosen]

    def truth(self, client: int, round: int) -> Batch:
        return self.batches[client]

    @cached_property
    def all(self) -> Wave:
        """Return the server's observations of all of them in the first round, through the whole chain."""
        fed, (params, buffers) = self.federation, self.federation.initial()
        client = GroupMean(self.members)(fed.chain(fed.gradient))
        draws = [generator(fed.protocol.seed, "stand-in draws", k) for k in range(self.count)]
        updates = [client(params, batch, rng) for batch, rng in zip(self.batches, draws, strict=True)]
        wave = Wave.stack([self.seen(k, sent=(params, buffers), update=u) for k, u in enumerate(updates)])
        fed.load_buffers(buffers)
        return wave
