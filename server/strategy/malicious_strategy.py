"""The malicious server: a strategy that sends chosen clients other weights than the federation's, and trains as usual.

It sits between the checked strategy and the wrapped one, so the former remembers, and the tape keeps, what was really sent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedgauge.attacks.base import Knowledge, Observation
from fedgauge.attacks.malicious.server_attack import classifier_only, craft_weights
from fedgauge.attacks.malicious.targeting import TargetedServerAttack
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.update import Params
from fedgauge.server.store.ledger_types import sanitised
from fedgauge.server.strategy.reply_checks import RoundReplies
from fedgauge.server.strategy.strategy_wrapper import Wrapper


@dataclass(eq=False)
class MaliciousStrategy(Wrapper):
    """A strategy that wraps another one and changes what some clients receive.

    Args:
        inner: any of Flower's strategies; it chooses clients and averages.
        plan: no two of its attacks target the same client in the same round.
        known: what the server knows: the network and public examples.
        protocol: defines the clients that the server sees only as a sum.
        clients: node id -> client number; the checked strategy's own mapping, which grows.
        trouble: called with a message if weights cannot be crafted; that client then gets honest weights.
        seen: by client, its replies, as far as a server attack asks for them.
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
        """Let the wrapped strategy choose clients, and change the weights of the targeted ones."""
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        honest = dict(arrays.to_torch_state_dict())
        self._altered = set()
        for message in messages:
            client = self.clients[message.metadata.dst_node_id]
            if (attack := self.attack_on(server_round, client)) is not None:
                try:
                    sent = ArrayRecord(self._crafted(attack, server_round, client, honest))
                except Exception as error:
                    # it was tried on the first weights; over others, which one client may have made extreme, or over that
                    # client's replies, a plug-in's attack may raise anything, which must not end everybody's training
                    why = sanitised(error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
                    self.trouble(f"round {server_round}, client {client}: honest weights were sent: {why}")
                    continue
                # a new record, because the strategy's messages share one
                message.content = RecordDict({**message.content, "arrays": sent})
                self._altered.add(client)
        return messages

    def attack_on(self, round: int, client: int) -> TargetedServerAttack | None:
        return next((planned for planned in self.plan if planned.applies_to(round, client)), None)

    def _crafted(self, attack: TargetedServerAttack, round: int, client: int, honest: Params) -> Params:
        # one generator for a whole secure sum: weights that no attack needs to differ must not, as their updates are added
        group = self.protocol.group(client)
        rng = generator(self.protocol.seed, "malice", round, group[0])
        seen = [o for o in self.seen.get(client, []) if attack.applies_to(o.round, client)]
        name = str(attack.table["use"])
        return craft_weights(attack.server_attack, name, honest, self.known, rng, seen, group.index(client))

    def note(self, intake: RoundReplies) -> None:
        """Remember replies to altered weights, because the next round's attack may depend on them."""
        for reply in intake.accepted:
            if reply.client in intake.sent and self.is_stateful(intake.round, reply.client):
                sent = intake.sent[reply.client]
                self.remember(Observation(intake.round, reply.client, sent, reply.update, intake.buffers))

    def is_stateful(self, round: int, client: int) -> bool:
        """Return whether a later attack needs a client's reply of this round."""
        attack = self.attack_on(round, client)
        return attack is not None and attack.server_attack.is_stateful

    def remember(self, seen: Observation) -> None:
        """Add a client's reply; call it in the order of the rounds."""
        self.seen.setdefault(seen.client, []).append(classifier_only(seen, self.known))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The wrapped strategy's, without the replies that must not be averaged."""
        kept = [m for m in replies if self.counts(server_round, self.clients[m.metadata.src_node_id])]
        return self.inner.aggregate_train(server_round, kept) if kept else (None, None)

    def counts(self, round: int, client: int) -> bool:
        """Return whether a client's reply (under a secure sum, its group's) is averaged."""
        altered = [c for c in self.protocol.group(client) if c in self._altered]
        return all(attack.aggregate for c in altered if (attack := self.attack_on(round, c)) is not None)
