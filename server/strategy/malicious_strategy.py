"""The malicious server: a strategy that sends chosen clients other weights than the federation's, and otherwise does its work.

It stands between the door and the wrapped strategy, so that what was really sent is what the door remembers and the tape keeps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedgauge.attacks.base import Knowledge, Observation
from fedgauge.attacks.malicious.server_attack import classifier_only
from fedgauge.attacks.malicious.targeting import TargetedServerAttack
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.update import Params
from fedgauge.server.strategy.validator import AcceptedReply, RoundReplies
from fedgauge.server.strategy.wrapper import Wrapper


@dataclass(eq=False)
class MaliciousStrategy(Wrapper):
    """A strategy that wraps another one and changes what some clients receive.

    Args:
        inner: any stock strategy; it chooses clients and averages.
        plan: no two of it meet the same client in the same round.
        known: what the server knows: the network and public examples.
        protocol: whose updates are seen only together.
        clients: node id -> client number: the door's own, which grows.
        trouble: told of what could not be crafted; those clients get honest weights.
        seen: by client, what it answered, as far as a malice asks for it.
    """

    inner: Strategy
    plan: Sequence[TargetedServerAttack]
    known: Knowledge
    protocol: Protocol
    clients: Mapping[int, int] = field(default_factory=dict)
    trouble: Callable[[str], None] = lambda words: None
    seen: dict[int, list[Observation]] = field(default_factory=dict)
    _altered: set[int] = field(default_factory=set)  # clients, in this round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the wrapped strategy choose and address clients, and change the weights of those that are met."""
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        honest = dict(arrays.to_torch_state_dict())
        self._altered = set()
        for message in messages:
            client = self.clients[message.metadata.dst_node_id]
            if (met := self.met(server_round, client)) is not None:
                try:
                    sent = self._crafted(met, server_round, client, honest)
                except ValueError as error:  # it was tried on the first weights, and depends on these
                    self.trouble(f"round {server_round}, client {client}: honest weights were sent: {error}")
                    continue
                # a record of its own: the strategy's messages share one
                message.content = RecordDict({**message.content, "arrays": ArrayRecord(sent)})
                self._altered.add(client)
        return messages

    def met(self, round: int, client: int) -> TargetedServerAttack | None:
        """What a client meets in a round."""
        return next((aimed for aimed in self.plan if aimed.aim.applies_to(round, client)), None)

    def _crafted(self, met: TargetedServerAttack, round: int, client: int, honest: Params) -> Params:
        # the same for all of a secure sum: at different weights nothing adds up
        (group,) = (group for group in self.protocol.groups(round) if client in group)
        rng, server_attack = generator(self.protocol.seed, "malice", round, group[0]), met.server_attack
        seen = (
            [o for o in self.seen.get(client, []) if met.aim.applies_to(o.round, client)]
            if server_attack.is_stateful
            else []
        )
        return {k: t.detach().contiguous() for k, t in server_attack.craft(honest, self.known, rng, seen).items()}

    def note(self, intake: RoundReplies) -> None:
        """Remember what those answered who were sent other weights: the next round's may depend on it."""
        for reply in intake.accepted:
            if reply.client in intake.sent and self.is_stateful(intake.round, reply.client):
                self.remember(_observed(intake, reply))

    def is_stateful(self, round: int, client: int) -> bool:
        """Whether what a client answers in a round is asked for later."""
        met = self.met(round, client)
        return met is not None and met.server_attack.is_stateful

    def remember(self, seen: Observation) -> None:
        """One more answer of a client's, in the order of the rounds."""
        self.seen.setdefault(seen.client, []).append(classifier_only(seen, self.known.model))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As the wrapped strategy does, without the answers that are to be left out."""
        kept = [m for m in replies if self.counts(server_round, self.clients[m.metadata.src_node_id])]
        return self.inner.aggregate_train(server_round, kept) if kept else (None, None)

    def counts(self, round: int, client: int) -> bool:
        """Whether an answer (under a secure sum, its group's) is averaged."""
        altered = [c for c in self.protocol.members(client, round) if c in self._altered]
        return all(met.aim.aggregate for c in altered if (met := self.met(round, c)) is not None)


def _observed(intake: RoundReplies, reply: AcceptedReply) -> Observation:
    return Observation(intake.round, reply.client, intake.sent[reply.client], reply.update, intake.buffers)
