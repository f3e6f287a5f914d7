"""A deployment's secure sum: a real one, in the scenario's groups; the curious server sees, and attacks, their sums alone."""

from collections.abc import Sequence
from dataclasses import replace

from fedgauge.client.deployment.secure_sum_terms import build_secure_sum
from fedgauge.client.protocol import Protocol
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.strategy.checked import CheckedStrategy, RoundReplies
from fedgauge.server.strategy.secure_aggregation import SecureSumStrategy


def secured(strategy: CheckedStrategy, protocol: Protocol, timeout: float) -> SecureSumStrategy:
    """The strategy behind the secure sum of the scenario's terms, which every client's owner has agreed to.

    Args:
        timeout: seconds that clients have to answer a question without training.
    """
    assert protocol.secure_sum is not None

    def groups(round: int, nodes: Sequence[int]) -> list[list[int]]:
        of = {strategy.clients[node]: node for node in nodes}
        return [[of[client] for client in group if client in of] for group in protocol.groups(round)]

    return SecureSumStrategy(strategy, build_secure_sum(protocol.secure_sum.real), "updates", timeout, groups)


def of_sums(intake: RoundReplies, protocol: Protocol) -> RoundReplies:
    """A round by groups: whoever is part of a sum has no entry of its own, and only complete sums are attacked.

    An attack computes what the scenario's whole group would send; a sum that lacks a member is another function.
    """
    groups = {client: group for group in protocol.groups(intake.round) for client in group}
    complete, partial = [], []
    for reply in intake.accepted:
        gone = [c for c in groups[reply.client] if c != reply.client and c not in intake.summed]
        if not gone:
            complete.append(reply)
            continue
        why = f"the sum of its group without client {', '.join(map(str, gone))}: trained on, not attacked"
        partial.append(Participation(reply.client, "accepted", why, reply.examples))
    others = [p for p in intake.refused if p.client not in intake.summed]
    return replace(intake, accepted=tuple(complete), refused=(*others, *partial))
