"""Planned against attacked updates: the one count for verdict, gate, terminal, page and report."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from fedgauge.attacks.plan import AttackPlan
from fedgauge.client.components import check_arguments
from fedgauge.client.protocol import Protocol
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.formatting import listed, shortened
from fedgauge.server.views.roles import is_attack

MOST_ROUNDS = 5  # named in a sentence
SELECTION = ("rounds", "every", "clients")  # keys of [audit] that choose what is attacked
REFUSED, LOST, NO_JOB, WAITING = "refused", "lost", "without a job", "waiting"
FATES = (REFUSED, LOST, NO_JOB, WAITING, "failed", "not applicable")  # the order in which they are reported
Reason = tuple[str, str]  # one of FATES, and the reason, if there is one


@dataclass(frozen=True)
class PlanCoverage:
    """The updates and rounds that the plan selects, and those of them that were never attacked.

    A client that sent nothing in a round has no update there. An update was attacked if one attack on it ended with a result.

    Args:
        updates: number of updates that were sent and that the plan selects.
        missed: number of these that were never attacked, by fate and reason.
        rounds: number of planned rounds; while the training goes on, those trained so far.
        missed_rounds: planned rounds without any attacked update, although the plan selects one or none was accepted.
    """

    updates: int = 0
    missed: Mapping[Reason, int] = field(default_factory=Counter)
    rounds: int = 0
    missed_rounds: tuple[int, ...] = ()

    @property
    def attacked(self) -> int:
        """Number of planned updates that were attacked."""
        return self.updates - sum(self.missed.values())

    @property
    def by_fate(self) -> dict[str, int]:
        """Number of never attacked updates by fate."""
        counts = dict.fromkeys(FATES, 0)
        for (fate, _), n in self.missed.items():
            counts[fate] += n
        return {fate: n for fate, n in counts.items() if n}

    @property
    def complete(self) -> bool:
        """Whether every planned update and round was attacked."""
        return not self.missed and not self.missed_rounds

    @property
    def words(self) -> str:
        """Never attacked updates and rounds, with numbers; empty if the plan was carried out.

        4 of 6 planned updates were never attacked: 4 refused (not finite); 1 of 2 planned rounds were never attacked: 3
        """
        found, never = [], "not attacked yet" if WAITING in self.by_fate else "never attacked"
        if self.missed:
            fates = ", ".join(f"{n} {fate}{self._reason(fate)}" for fate, n in self.by_fate.items())
            found.append(f"{self.updates - self.attacked} of {self.updates} planned updates were {never}: {fates}")
        if self.missed_rounds:
            named = listed(list(map(str, self.missed_rounds)), MOST_ROUNDS, ", ")
            found.append(f"{len(self.missed_rounds)} of {self.rounds} planned rounds were {never}: {named}")
        return "; ".join(found)

    def to_json(self) -> dict[str, Any]:
        """All numbers and the sentence, for the page and the JSON log."""
        return {
            "updates": self.updates,
            "attacked": self.attacked,
            "missed": self.by_fate,
            "rounds": self.rounds,
            "missed_rounds": len(self.missed_rounds),
            "words": self.words,
        }

    def _reason(self, fate: str) -> str:
        """The most frequent reason of a fate in brackets, with the number of others."""
        reasons = Counter({reason: n for (of, reason), n in self.missed.items() if of == fate and reason})
        words = listed([shortened(reason) for reason, _ in reasons.most_common()], 1)
        return f" ({words})" if words else ""


def selection(tables: Mapping[str, Any]) -> AttackPlan:
    """The part of a scenario's plan that selects rounds and clients; ValueError if `[audit]` does not hold one."""
    chosen = {key: value for key, value in tables.get("audit", {}).items() if key in SELECTION}
    return AttackPlan(**check_arguments(AttackPlan, chosen, "[audit]", {"attacks": ()}))


def plan_coverage(ledger: Ledger, tables: Mapping[str, Any], training: bool) -> PlanCoverage:
    """Count the planned updates of a run that were attacked and those that never were.

    Args:
        tables: the run's scenario, whose `[audit]` selects rounds and clients; the ledger has the attacks.
        training: whether the run still trains, so that later rounds do not count yet.
    """
    planned = ledger.planned()
    attack = next((p for name, p in planned.items() if is_attack(name)), None)
    if attack is None:
        return PlanCoverage()
    plan, group_of = replace(selection(tables), attacks=tuple(planned.values())), _groups(tables)
    observed = ledger.last_observed()
    last = observed if training else max(observed, int(ledger.meta().get("rounds") or tables["rounds"]))
    if ledger.foreign:  # an app counts its rounds as it likes
        rounds = {o["round"] for o in ledger.observations() if plan.attacks_round(o["round"])}
    elif plan.rounds is None:
        rounds = set(range(1, last + 1, plan.every))
    else:
        rounds = {round for round in plan.rounds if round <= last or not training}
    fates = {(row["round"], row["client"]): row["status"] for row in ledger.fates()}
    missed: Counter[Reason] = Counter()
    updates: set[tuple[int, int]] = set()
    attacked, accepted, chosen = set[int](), set[int](), set[int]()
    for o in sorted(ledger.observations(), key=lambda o: bool(o["status"] != "accepted")):
        round, client = o["round"], o["client"]
        if round not in rounds or o["status"] == "missing":
            continue
        if o["status"] == "accepted":
            accepted.add(round)
        if not plan.targets(round, [client], attack):
            continue
        update = round, group_of(round).get(client, client)
        if update in updates:  # a secure sum is one update, although several of its clients may be listed
            continue
        updates.add(update)
        chosen.add(round)
        fate = fates.get((round, client), "")
        if fate == "attacked":
            attacked.add(round)
        elif o["status"] != "accepted":
            missed[REFUSED, o["reason"]] += 1
        elif fate:
            missed[fate, ""] += 1
        else:
            missed[(NO_JOB, "") if o["digest"] else (LOST, o["reason"] or "not on the tape")] += 1
    never = sorted(round for round in rounds - attacked if round in chosen or round not in accepted)
    return PlanCoverage(len(updates), missed, len(rounds), tuple(never))


def _groups(tables: Mapping[str, Any]) -> Callable[[int], Mapping[int, int]]:
    """By round, the first client of each client's secure sum; empty without one."""
    if "secure_sum" not in tables:
        return lambda round: {}
    protocol = Protocol.from_tables(tables)
    return cache(lambda round: {client: group[0] for group in protocol.groups(round) for client in group})
