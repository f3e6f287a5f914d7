"""Planned and attacked updates, counted once for verdict, gate, terminal, page and report."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedgauge.attacks.plan import AttackPlan
from fedgauge.client.components import check_arguments
from fedgauge.client.protocol import Protocol
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.formatting import listed

MOST_ROUNDS = 5  # named in a sentence
SELECTION = ("rounds", "every", "clients")  # keys of [audit] that choose what is attacked
ATTACKED, REFUSED, LOST, NO_JOB, WAITING = "attacked", "refused", "lost", "without a job", "waiting"
FATES = (REFUSED, LOST, NO_JOB, WAITING, "failed", "not applicable")  # the order in which they are reported


@dataclass(frozen=True)
class PlanCoverage:
    """Updates and rounds that the plan selects, and those that were never attacked.

    An update counts as attacked if one attack on it ended with a result. A silent client has no update.

    Args:
        updates: number of selected updates that were sent.
        missed: number of these that were never attacked, by fate.
        rounds: number of planned rounds; during training, of those trained so far.
        missed_rounds: planned rounds without an attacked update, if one was selected or none accepted.
    """

    updates: int = 0
    missed: Mapping[str, int] = field(default_factory=Counter)
    rounds: int = 0
    missed_rounds: tuple[int, ...] = ()

    @property
    def attacked(self) -> int:
        return self.updates - sum(self.missed.values())

    @property
    def words(self) -> str:
        """Numbers of updates and rounds never attacked; empty if the plan was carried out."""
        found, never = [], "not attacked yet" if WAITING in self.missed else "never attacked"
        if self.missed:
            fates = ", ".join(f"{self.missed[fate]} {fate}" for fate in FATES if fate in self.missed)
            found.append(f"{self.updates - self.attacked} of {self.updates} planned updates were {never}: {fates}")
        if self.missed_rounds:
            named = listed(list(map(str, self.missed_rounds)), MOST_ROUNDS, ", ")
            found.append(f"{len(self.missed_rounds)} of {self.rounds} planned rounds were {never}: {named}")
        return "; ".join(found)


def selection(tables: Mapping[str, Any]) -> AttackPlan:
    """Return the part of a scenario's plan that selects rounds and clients.

    Raises:
        ValueError: `[audit]` has none.
    """
    chosen = {key: value for key, value in tables.get("audit", {}).items() if key in SELECTION}
    return AttackPlan(**check_arguments(AttackPlan, chosen, "[audit]", {"attacks": ()}))


def plan_coverage(ledger: Ledger, tables: Mapping[str, Any], training: bool) -> PlanCoverage:
    """Count the planned updates of a run, attacked or not.

    Args:
        tables: the run's scenario; `[audit]` selects rounds and clients.
        training: if the run still trains, so that later rounds do not count yet.
    """
    planned = ledger.planned()
    attack = next((p for p in planned.values() if p.role == "attack"), None)
    if attack is None:
        return PlanCoverage()
    plan = replace(selection(tables), attacks=tuple(planned.values()))
    protocol = Protocol.from_tables(tables) if "secure_sum" in tables else None
    observed = ledger.last_observed()
    last = observed if training else max(observed, int(ledger.meta().get("rounds") or tables["rounds"]))
    if ledger.foreign:  # an app numbers its rounds itself
        rounds = {o["round"] for o in ledger.observations() if plan.attacks_round(o["round"])}
    else:
        rounds = set(filter(plan.attacks_round, range(1, last + 1)))
    seen = [o for o in ledger.observations() if o["round"] in rounds and o["status"] != "missing"]
    accepted = {o["round"] for o in seen if o["status"] == "accepted"}
    fates = {(row["round"], row["client"]): row["status"] for row in ledger.fates()}
    updates: dict[tuple[int, int], str] = {}  # a secure sum's by its first client, once
    for o in sorted(seen, key=lambda o: bool(o["status"] != "accepted")):
        round, client = o["round"], o["client"]
        if plan.targets(round, [client], attack):
            lost = REFUSED if o["status"] != "accepted" else NO_JOB if o["digest"] else LOST
            fate = fates.get((round, client), lost)
            updates.setdefault((round, protocol.group(client)[0] if protocol else client), fate)
    attacked = {round for (round, _), fate in updates.items() if fate == ATTACKED}
    chosen, missed = {round for round, _ in updates}, Counter(fate for fate in updates.values() if fate != ATTACKED)
    never = sorted(round for round in rounds - attacked if round in chosen or round not in accepted)
    return PlanCoverage(len(updates), missed, len(rounds), tuple(never))
