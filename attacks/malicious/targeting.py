"""Whom and when a malice meets: the part of a malicious server's plan that a scenario says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from fedgauge.attacks.malicious.inconsistency import lone_target
from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK, DelegatingAttack, ServerAttack
from fedgauge.attacks.plan import ATTACK, PlannedAttack, describe
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.components import SpecError, Table, build, call, check_arguments
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator


@dataclass(frozen=True)
class Targeting:
    """When and whom a malice meets.

    Args:
        rounds: 1-based; None: all.
        clients: None: all, but for those of all_but.
        all_but: these get honest weights.
        aggregate: what those answer who were sent other weights is averaged into the model; else it is left out, so that
            the model stays as good as the rounds that are spared.
    """

    rounds: tuple[int, ...] | None = None
    clients: tuple[int, ...] | None = None
    all_but: tuple[int, ...] = ()
    aggregate: bool = False

    def applies_to(self, round: int, client: int) -> bool:
        """Whether this client is sent other weights in this round."""
        if client in self.all_but or (self.clients is not None and client not in self.clients):
            return False
        return self.rounds is None or round in self.rounds


@dataclass(frozen=True)
class TargetedServerAttack:
    """A malice of the scenario's, and its aim."""

    table: Table
    aim: Targeting

    @classmethod
    def from_table(cls, table: Table, where: str, rounds: int, clients: int) -> "TargetedServerAttack":
        """From a [[server_attack]] table; SpecError says what is wrong with it."""
        own = tuple(f.name for f in fields(Targeting))
        component = {k: v for k, v in table.items() if k not in own}
        build(component, where, SERVER_ATTACK, beside=own)
        arguments = check_arguments(Targeting, {k: v for k, v in table.items() if k in own}, where)
        aim: Targeting = call(Targeting, arguments, where)
        for key, low, high in (("rounds", 1, rounds), ("clients", 0, clients - 1), ("all_but", 0, clients - 1)):
            for value in getattr(aim, key) or ():
                if not low <= value <= high:
                    raise SpecError(f"{where}: {key} must lie in {low}..{high}, got {value}")
        if not any(aim.applies_to(r, c) for r in range(1, rounds + 1) for c in range(clients)):
            raise SpecError(f"{where}: its rounds, clients and all_but leave nobody whom it meets")
        return cls(component, aim)

    @property
    def server_attack(self) -> ServerAttack:
        """Built anew: it holds nothing between rounds."""
        found: ServerAttack = build(self.table, "[[server_attack]]", SERVER_ATTACK)
        return found

    def __str__(self) -> str:
        aim = self.aim
        whom = "all clients" if aim.clients is None else _listed("client", aim.clients)
        whom += f" but {_listed('client', aim.all_but)}" if aim.all_but else ""
        when = "every round" if aim.rounds is None else _listed("round", aim.rounds)
        return f"{describe(self.table)} to {whom} in {when}"


def _listed(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def check(plan: Sequence[TargetedServerAttack], fed: Federation) -> None:
    """Craft each malice's weights once, before anything starts; SpecError where the network lacks what it needs."""
    params, _ = fed.initial()
    known = public_knowledge(fed)
    for i, aimed in enumerate(plan, 1):
        where = f"[[server_attack]] #{i}: {aimed.table['use']}"
        if aimed.server_attack.is_stateful and fed.protocol.secure_sum is not None:
            raise SpecError(f"{where}: it asks what each client answered, and a [secure_sum] hides that")
        if aimed.server_attack.is_stateful and (whose := _moving(aimed.aim, fed)):
            raise SpecError(
                f"{where}: it searches from round to round in a batch that stays the same, and client {whose[0]} draws its batches "
                f"of {fed.shards.batch_size} from {len(fed.shards.indices[whose[0]])} examples: give it one round, or clients "
                "that hold one batch each"
            )
        call(aimed.server_attack.craft, {"sent": params, "known": known, "rng": generator("a malice is tried")}, where)
        for j, other in enumerate(plan[: i - 1], 1):
            if _both(other.aim, aimed.aim, fed.protocol):
                raise SpecError(
                    f"{where}: it meets the same client in the same round as #{j}, and what one of them crafts the other "
                    "would undo: give them rounds or clients of their own"
                )


def check_decoders(plan: Sequence[TargetedServerAttack], attacks: Sequence[PlannedAttack], summed: bool) -> None:
    """SpecError where an attack reads what only another malice would bring, or a secure sum that is none."""
    sent = {str(aimed.table["use"]) for aimed in plan}
    for planned in attacks:
        made = planned.build() if planned.table["use"] in ATTACK.names() else None
        if not isinstance(made, DelegatingAttack):
            continue
        if made.decodes and not sent & set(made.decodes):
            raise SpecError(
                f"[[attack]] {planned.name}: it reads {' or '.join(made.decodes)}, and no [[server_attack]] here is one"
            )
        if isinstance(made, lone_target) and not summed:
            raise SpecError(f"[[attack]] {planned.name}: it takes a secure sum apart: say [secure_sum], group = N")


def _moving(aim: Targeting, fed: Federation) -> list[int]:
    """The clients whom it meets more than once, and with another batch each time."""
    times = Counter(
        c for r in range(1, fed.protocol.rounds + 1) for c in range(fed.protocol.clients) if aim.applies_to(r, c)
    )
    return [c for c, n in times.items() if n > 1 and len(fed.shards.indices[c]) > fed.shards.batch_size]


def _both(one: Targeting, other: Targeting, protocol: Protocol) -> bool:
    """Whether two malices ever meet the same client in the same round."""
    rounds, clients = range(1, protocol.rounds + 1), range(protocol.clients)
    return any(one.applies_to(r, c) and other.applies_to(r, c) for r in rounds for c in clients)
