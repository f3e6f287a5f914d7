"""Targeting: which clients a server attack hits, in which rounds, and the checks of a scenario's [[server_attack]] tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK, ServerAttack, craft_weights
from fedgauge.attacks.plan import PlannedAttack, describe
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.components import SpecError, Table, build, call, check_arguments
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator


@dataclass(frozen=True)
class TargetedServerAttack:
    """A server attack of the scenario, and the rounds and clients that it hits.

    Args:
        table: the attack's component table.
        rounds: in which it attacks, counted from 1; default: all.
        clients: attacked clients, counted from 0; default: all, except those of all_but.
        all_but: these get honest weights.
        aggregate: average the updates of attacked clients into the model; else they are left out, and the model learns only
            from the others.
    """

    table: Table
    rounds: tuple[int, ...] | None = None
    clients: tuple[int, ...] | None = None
    all_but: tuple[int, ...] = ()
    aggregate: bool = False

    @classmethod
    def from_table(cls, table: Table, where: str, rounds: int, clients: int) -> "TargetedServerAttack":
        """From a [[server_attack]] table; SpecError says what is wrong with it."""
        own = tuple(f.name for f in fields(cls) if f.name != "table")
        component = {k: v for k, v in table.items() if k not in own}
        build(component, where, SERVER_ATTACK, more_keys=own)
        arguments = {k: v for k, v in table.items() if k in own}
        made: TargetedServerAttack = call(cls, check_arguments(cls, arguments, where, {"table": component}), where)
        for key, low, high in (("rounds", 1, rounds), ("clients", 0, clients - 1), ("all_but", 0, clients - 1)):
            if outside := [value for value in getattr(made, key) or () if not low <= value <= high]:
                raise SpecError(f"{where}: {key} must be in {low}..{high}, got {outside[0]}")
        if not made.hits(rounds, clients):
            raise SpecError(f"{where}: its rounds, clients and all_but leave no client to attack")
        return made

    def applies_to(self, round: int, client: int) -> bool:
        if client in self.all_but or (self.clients is not None and client not in self.clients):
            return False
        return self.rounds is None or round in self.rounds

    def hits(self, rounds: int, clients: int) -> set[tuple[int, int]]:
        return {(r, c) for r in range(1, rounds + 1) for c in range(clients) if self.applies_to(r, c)}

    @property
    def server_attack(self) -> ServerAttack:
        """A new instance: it keeps nothing between rounds."""
        built: ServerAttack = build(self.table, "[[server_attack]]", SERVER_ATTACK)
        return built

    def __str__(self) -> str:
        whom = "all clients" if self.clients is None else _listed("client", self.clients)
        whom += f" but {_listed('client', self.all_but)}" if self.all_but else ""
        when = "every round" if self.rounds is None else _listed("round", self.rounds)
        return f"{describe(self.table)} to {whom} in {when}"


def _listed(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def check(plan: Sequence[TargetedServerAttack], fed: Federation) -> None:
    """Craft each server attack's weights once before anything starts.

    Raises:
        SpecError: the network lacks what it needs.
    """
    params, _ = fed.initial()
    known, taken = public_knowledge(fed), set[tuple[int, int]]()
    for i, targeted in enumerate(plan, 1):
        where = f"[[server_attack]] #{i}: {targeted.table['use']}"
        hits = targeted.hits(fed.protocol.rounds, fed.protocol.clients)
        if targeted.server_attack.is_stateful:
            if fed.protocol.secure_sum is not None:
                raise SpecError(f"{where}: it needs each client's own updates, which [secure_sum] hides: remove one")
            for client, times in Counter(client for _, client in sorted(hits)).items():
                if times > 1 and len(fed.shards.indices[client]) > fed.shards.batch_size:
                    raise SpecError(
                        f"{where}: it searches over several rounds of the same batch, and client {client} draws its batches "
                        "anew: give it one round, or clients that hold one batch each"
                    )
        last = fed.protocol.group_size - 1
        craft_weights(targeted.server_attack, where, params, known, generator("a malice is tried"), place=last)
        if hits & taken:
            raise SpecError(f"{where}: another one attacks a client in the same round: change rounds or clients")
        taken |= hits


def check_decoders(plan: Sequence[TargetedServerAttack], attacks: Sequence[PlannedAttack], summed: bool) -> None:
    """SpecError where a decoder's server attack is not in the plan, or its secure sum is missing."""
    sent = {str(targeted.table["use"]) for targeted in plan}
    for planned in attacks:
        made = planned.build()
        if made.decodes and not sent & set(made.decodes):
            raise SpecError(f"[[attack]] {planned.name}: it decodes {' or '.join(made.decodes)}: add one")
        if made.needs_secure_sum and not summed:
            raise SpecError(f"[[attack]] {planned.name}: it reads a secure sum: set [secure_sum] group = N")
