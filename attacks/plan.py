"""The attack plan: which attacks run with which knowledge and budget, and in which rounds and on which clients."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from fedgauge.attacks.base import LIMITS, Attack, Budget, Role
from fedgauge.attacks.candidate_bound import CandidateBound
from fedgauge.attacks.learned.auxiliary import Auxiliary
from fedgauge.attacks.limits import BayesLimit
from fedgauge.attacks.measure import Measure
from fedgauge.attacks.membership.attack import MembershipLimit
from fedgauge.attacks.membership.canaries import Canaries
from fedgauge.attacks.modality.base import Modality
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.membership import GUESSES, HELD, MEMBER
from fedgauge.attacks.modality.registry import MODALITIES
from fedgauge.client.components import (
    Checked,
    ComponentKind,
    Count,
    Natural,
    SpecError,
    Table,
    build,
    call,
    check_arguments,
    coerce,
    errors_in,
    settings_of,
)

MEMBERSHIP = "fedgauge.membership"  # the registry's group of tests of membership
_RECONSTRUCTING = dict.fromkeys(group for modality in MODALITIES.values() for group in modality.attacks)
_BASELINES = "fedgauge.baselines"
ATTACK = ComponentKind("an attack", (*_RECONSTRUCTING, MEMBERSHIP, _BASELINES), Attack)
MEMBERSHIP_LIMIT, CANARIES = "membership_limit", "canaries"
MOST_ATTACKS = 1000  # of a run, baselines included: pages and reports compare each with each
# components that a run adds where they apply, and no scenario names
_ADDED: Mapping[str, type[Measure]] = {
    "bayes_limit": BayesLimit,
    "candidate_bound": CandidateBound,
    MEMBERSHIP_LIMIT: MembershipLimit,
    CANARIES: Canaries,
}
_BUDGET = tuple(f.name for f in dataclasses.fields(Budget))
# keys of an [[attack]] table other than its component's arguments
_OMITTED = {"auxiliary": None, "lengths": "hidden", "tune": "off"}  # from `to_json`, at these values
_NAME = re.compile(r"[\w-]{1,64}")
_OWN = ("name", *_BUDGET, "labels", "lengths", "defense", "auxiliary", "tune")


@dataclass(frozen=True)
class PlannedAttack:
    """One attack of the plan.

    Args:
        name: appears in every row; default: the component's name.
        table: the component table (use and its hyperparameters).
        budget: for each observation.
        labels: restored from the update, or given by the threat model.
        defense: known (inverts the whole chain) or unknown (assumes bare local training).
        auxiliary: its auxiliary images, the table `[attack.auxiliary]`; default: all.
        lengths: of sentences: hidden, or given by the threat model.
        tune: "shadow": in each round choose its prior on shadow updates of auxiliary images; also the default where the chain
            draws noise of a known density.
    """

    name: str
    table: Table
    budget: Budget = dataclasses.field(default_factory=Budget)
    labels: Literal["restored", "given"] = "restored"
    defense: Literal["known", "unknown"] = "known"
    auxiliary: Table | None = None
    lengths: Literal["hidden", "given"] = "hidden"
    tune: Literal["off", "shadow"] = "off"

    kind: ClassVar[ComponentKind] = ATTACK

    @classmethod
    def from_table(cls, table: Table, where: str) -> "PlannedAttack":
        """Read an `[[attack]]` table; SpecError names the mistake, and where the table is in the scenario."""
        spent = {k: v for k, v in table.items() if k in _BUDGET}
        component = {k: v for k, v in table.items() if k not in _OWN}
        attack = build(component, where, ATTACK, more_keys=_OWN)
        own = {k: v for k, v in table.items() if k in _OWN and k not in _BUDGET}
        arguments = check_arguments(cls, {**own, "name": attack_name(table), "table": component}, where)
        budget = settings_of(Budget, spent, where)
        planned: PlannedAttack = call(cls, {**arguments, "budget": budget}, where)
        if not _NAME.fullmatch(planned.name):  # it becomes part of a file name
            raise SpecError(f"{where}: name: at most 64 letters, digits, - and _, got {planned.name!r}")
        if planned.tune == "shadow" and not attack.tunes:
            raise SpecError(f"{where}: {component['use']} has no settings to tune; leave tune out")
        planned.images(where)
        return planned

    def images(self, where: str = "[[attack]]") -> Auxiliary:
        return settings_of(Auxiliary, self.auxiliary or {}, f"{where}: auxiliary")

    def build(self) -> Attack:
        where = f"[[attack]] {self.name}"
        if (added := _ADDED.get(str(self.table.get("use")))) is not None:
            return settings_of(added, {k: v for k, v in self.table.items() if k != "use"}, where)
        built: Attack = build(self.table, where, self.kind)
        return built

    @cached_property
    def role(self) -> Role:
        """The role that its component declares; of an attack in a ledger, that of its row, as the module may be missing."""
        return self.build().role

    @cached_property
    def metric(self) -> str:
        """The metric to report for an attack that reconstructs nothing, read as `role` is; empty for one that reconstructs."""
        return self.build().metric

    @property
    def tests_membership(self) -> bool:
        """Return whether it tests membership in a batch or in a client's dataset."""
        return self.metric in (MEMBER, HELD) and self.role not in LIMITS

    @cached_property
    def watched(self) -> Collection[int]:
        """The only clients it observes, in every round; empty: those that the plan attacks."""
        try:
            return self.build().watched
        except SpecError:  # a ledger from elsewhere may plan anything, which is refused when it is to attack
            return ()

    @property
    def is_stateful(self) -> bool:
        """Return whether a client's earlier rounds influence the attack on the next one, so that its jobs must run in order."""
        return self.build().is_stateful

    def to_json(self) -> str:
        """Return every field as one line of JSON, equal for equal plans: part of a job's key, and what a worker receives."""
        spec = {k: v for k, v in dataclasses.asdict(self).items() if k not in _OMITTED or v != _OMITTED[k]}
        return json.dumps(spec, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, **declared: str) -> "PlannedAttack":
        """Read the text that `to_json` wrote.

        Args:
            declared: role and metric of its component; default: asked of the component.

        Raises:
            SpecError: the text is not of that form.
        """
        where = "a planned attack"
        with errors_in(where, ValueError, RecursionError):
            stored = dict(coerce(json.loads(text), dict, where))
        budget = settings_of(Budget, stored.pop("budget", {}), f"{where}: budget")
        planned: PlannedAttack = call(cls, {**check_arguments(cls, stored, where), "budget": budget}, where)
        vars(planned).update(declared)
        return planned


@dataclass(frozen=True)
class AttackPlan(Checked):
    """The attacks, and which rounds and clients they attack.

    Args:
        attacks: including the baselines, and the limits if there are any.
        rounds: which to attack, counted from 1; default: those that `every` says.
        every: attack every so many rounds, from the first on; not together with rounds.
        clients: clients to attack, counted from 0 (under a secure sum a group, by its first client); default: all.
        wave: observations that one worker attacks together, at least 1.
        seed: of the attacker's randomness; default: the scenario's.
    """

    attacks: tuple[PlannedAttack, ...]
    rounds: tuple[int, ...] | None = None
    every: Count = 1
    clients: tuple[int, ...] | None = None
    wave: Count = 8
    seed: Natural = 0

    @classmethod
    def from_tables(
        cls,
        tables: Sequence[Table],
        options: Table,
        rounds: int,
        clients: int,
        modality: type[Modality] = ImageModality,
        canaries: Table | None = None,
        noisy: bool = False,
    ) -> "AttackPlan":
        """From the [[attack]] tables and the plan's keys in [audit]; adds the baselines.

        Args:
            modality: of the data; it names the baselines, and the limits under noise.
            canaries: clients: the updates, by their clients, that canaries are in; examples: of each client, if these are examples;
                None: there are none.
            noisy: the chain draws noise of a known density, so that attacks are tuned to it unless their tables say otherwise,
                and there are limits.

        Raises:
            SpecError: names the table, the value and what is allowed.
        """
        planned = [_attack(table, f"[[attack]] #{i}", modality) for i, table in enumerate(tables, 1)]
        if noisy:
            planned = [
                dataclasses.replace(p, tune="shadow") if "tune" not in t and p.build().tunes else p
                for p, t in zip(planned, tables, strict=True)
            ]
        tests_membership = any(p.tests_membership for p in planned)
        planned += [
            PlannedAttack(n, {"use": use}, Budget(1), "given" if n in modality.given_labels else "restored")
            for n, use in modality.baselines.items()
        ]
        if tests_membership:
            planned += [PlannedAttack(n, {"use": "membership", "score": n}, Budget(1)) for n in GUESSES]
        limits = (*modality.limits, *([MEMBERSHIP_LIMIT] if tests_membership else [])) if noisy else ()
        planned += [PlannedAttack(n, {"use": n}, Budget(1)) for n in limits]
        if canaries is not None:
            planned.append(PlannedAttack(CANARIES, {"use": CANARIES, **canaries}, Budget(1)))
        if len(planned) > MOST_ATTACKS:
            raise SpecError(f"[[attack]]: at most {MOST_ATTACKS} attacks with the baselines, got {len(planned)}")
        if repeated := [name for name, count in Counter(p.name for p in planned).items() if count > 1]:
            raise SpecError(f"[[attack]]: two attacks are called {repeated[0]!r}; give one of them a name")
        arguments = check_arguments(cls, options, "[audit]", {"attacks": tuple(planned)})
        if "every" in options and arguments.get("rounds") is not None:
            raise SpecError("[audit]: every has no effect when rounds lists the rounds; leave one of the two out")
        for key, low, high in (("rounds", 1, rounds), ("clients", 0, clients - 1)):
            values = arguments.get(key)
            if values is not None and not (values and all(low <= value <= high for value in values)):
                raise SpecError(f"[audit]: {key} must list numbers in {low}..{high}, got {list(values)}")
        plan: AttackPlan = call(cls, arguments, "[audit]")
        return plan

    def attacks_round(self, round: int) -> bool:
        return round in self.rounds if self.rounds is not None else (round - 1) % self.every == 0

    def targets(self, round: int, seen: Collection[int], planned: PlannedAttack | None = None) -> list[int]:
        """The clients, in order, that the plan attacks among those seen in a round; canaries are looked at in every round.

        Other attacks skip a canary's direction, which contains no data, but not an update with canary examples.

        Args:
            planned: only by this one; default: by any.
        """
        looking = next((p for p in self.attacks if p.watched), None)
        watched = {c for c in seen if looking is not None and c in looking.watched}
        attacked = {c for c in seen if self.attacks_round(round) and (self.clients is None or c in self.clients)}
        if planned is None:
            return sorted(attacked | watched)
        if planned.watched:
            return sorted(watched)
        return sorted(attacked if looking is None or "examples" in looking.table else attacked - watched)


def attack_name(table: Table) -> Any:
    """Return an unchecked [[attack]] table's name: its own, or its component's."""
    return table.get("name", str(table.get("use")).split(":")[-1])


def _attack(table: Table, where: str, modality: type[Modality]) -> PlannedAttack:
    """An attack from a scenario; SpecError if it is a baseline, or is for other data. Of a user's own nothing is known."""
    planned = PlannedAttack.from_table(table, where)
    use, given = str(planned.table["use"]), f"{modality.main.private}s"
    if any(e.own and e.name == use and e.group == _BASELINES for e in ATTACK.entries()):
        raise SpecError(f"{where}: {use!r} is a baseline, which always runs: leave it out")
    fitting = modalities_of(use)
    if fitting and modality not in fitting:
        raise SpecError(f"{where}: {use} reconstructs {fitting[0].main.private}s, and [data] holds {given}")
    if planned.lengths == "given" and not modality.gives_lengths:
        raise SpecError(f'{where}: lengths = "given" needs sentences, and [data] holds {given}; leave it out')
    return planned


def modalities_of(use: str) -> list[type[Modality]]:
    """Return the kinds of data that a registered attack reconstructs; none for a user's own module."""
    groups = {entry.group for entry in ATTACK.entries() if entry.name == use}
    return [modality for modality in MODALITIES.values() if groups & set(modality.attacks)]


def describe(value: Any) -> str:
    """Write a component table on one line, for tables and threat-model cards."""
    own = {k: v for k, v in value.items() if k not in ("use", "each")}
    arguments = ", ".join(f"{k}={describe(v) if isinstance(v, dict) and 'use' in v else v}" for k, v in own.items())
    return f"{'each ' if value.get('each') else ''}{str(value['use']).split(':')[-1]}({arguments})"
