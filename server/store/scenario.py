"""A scenario: one TOML file, one question; checked whole before anything starts.

Its protocol part is what clients are sent; the plan of attack, the strategy and the tape stay with the server.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from fedgauge.attacks.learned import generators
from fedgauge.attacks.limits import known_noise
from fedgauge.attacks.malicious import targeting
from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK
from fedgauge.attacks.malicious.targeting import TargetedServerAttack
from fedgauge.attacks.plan import IMAGE_BASELINES, LIMITS, TEXT_BASELINES, AttackPlan
from fedgauge.client.components import SpecError, Table, call, check_arguments, coerce, with_absolute_paths
from fedgauge.client.data.corpora import Text
from fedgauge.client.federation import DATASET, Federation
from fedgauge.client.inspection.policy import fingerprint
from fedgauge.client.models.build import MODEL
from fedgauge.client.models.losses import LOSS
from fedgauge.client.protocol import Protocol
from fedgauge.defenses.accounting import DELTA, Accountant, NoGuarantee
from fedgauge.server.store.tape import Keep

_TOP = {
    "seed", "rounds", "clients", "data", "model", "loss", "chain", "stragglers", "secure_sum", "strategy", "attack", "audit",
    "tape", "simulation", "privacy", "server", "server_attack", "guard",
}  # fmt: skip
_PLAN = tuple(f.name for f in fields(AttackPlan) if f.name != "attacks")
FEDAVG: Table = {"use": "FedAvg"}


@dataclass(frozen=True)
class AuditOptions:
    """How the plan is carried out.

    Args:
        curious: False trains without looking.
        executor: ray (workers in processes of their own) or local (in the audit's process, one wave at a time).
        workers: attack workers; each uses one core.
    """

    curious: bool = True
    executor: Literal["ray", "local"] = "ray"
    workers: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")


@dataclass(frozen=True)
class TapeOptions:
    """What stays on disk: all accepted updates; scored, those the plan attacks; none, nothing once it was attacked.

    Args:
        retention_days: after so many days `fedgauge prune` deletes them, and what was reconstructed; None: never.
    """

    keep: Keep = "all"
    retention_days: float | None = None

    def __post_init__(self) -> None:
        if self.retention_days is not None and not self.retention_days >= 0:
            raise ValueError(f"retention_days must be at least 0, got {self.retention_days}")


@dataclass(frozen=True)
class SimulationOptions:
    """How much of this machine the clients get: how many train at the same time, one core each; the patience for a round."""

    parallel_clients: int = 2
    round_timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.parallel_clients < 1:
            raise ValueError(f"parallel_clients must be at least 1, got {self.parallel_clients}")
        if not self.round_timeout > 0:
            raise ValueError(f"round_timeout must be above 0, got {self.round_timeout}")


@dataclass(frozen=True)
class PrivacyOptions:
    """At which delta epsilons are told; who writes the table asks for them, and is refused a chain that has none."""

    delta: float = DELTA

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be above 0 and below 1, got {self.delta}")


@dataclass(frozen=True)
class Scenario:
    """A checked scenario, with the federation that its protocol describes, built."""

    tables: Table
    protocol: Protocol
    federation: Federation = field(repr=False, compare=False)
    plan: AttackPlan
    strategy: Table
    audit: AuditOptions = field(default_factory=AuditOptions)
    tape: TapeOptions = field(default_factory=TapeOptions)
    simulation: SimulationOptions = field(default_factory=SimulationOptions)
    privacy: PrivacyOptions = field(default_factory=PrivacyOptions)
    server_attack: tuple[TargetedServerAttack, ...] = ()
    left_out: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def load(cls, path: Path, settings: Sequence[str] = (), rounds: int | None = None) -> "Scenario":
        """Read and check a file.

        Args:
            settings: "chain.0.max_norm=2", as given on the command line.
            rounds: instead of the file's; those of [audit] rounds that are beyond are `left_out`.

        Raises:
            SpecError: naming the file, the table, the value and what is allowed.
        """
        try:
            tables: dict[str, Any] = tomllib.loads(path.read_text())
            for setting in settings:
                apply_setting(tables, setting)
            left_out = _shorten(tables, rounds) if rounds is not None else ()
            return replace(cls.from_tables(tables), left_out=left_out)
        except FileNotFoundError as error:
            raise SpecError(f"{path}: there is no such file") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SpecError(f"{path}: not a readable TOML file: {error}") from error
        except SpecError as error:
            raise SpecError(f"{path}: {_as_set(str(error), settings)}") from error

    @classmethod
    def from_tables(cls, tables: Table) -> "Scenario":
        """From parsed TOML; every component is built once, so that a mistake is told here."""
        if unknown := sorted(tables.keys() - _TOP):
            hint = "; this looks like a sweep: fedgauge sweep" if "defense" in tables else ""
            raise SpecError(f"unknown key {unknown[0]!r} (a scenario has: {', '.join(sorted(_TOP))}){hint}")
        tables = _located(tables)
        strategy = dict(coerce(tables.get("strategy", FEDAVG), dict, "[strategy]"))
        server_attack = _malice(tables)
        protocol = Protocol.from_tables(
            {**_bent(tables, server_attack), "chain": _with_proximal_term(tables.get("chain", []), strategy)}
        )
        federation = Federation(protocol).check()
        targeting.check(server_attack, federation)
        attacks = coerce(tables.get("attack", []), list, "[[attack]]")
        audit = _table(tables, "audit", (*_PLAN, *_names(AuditOptions)))
        plan = AttackPlan.from_tables(
            [coerce(t, dict, f"[[attack]] #{i}") for i, t in enumerate(attacks, 1)],
            {"seed": protocol.seed, **{k: v for k, v in audit.items() if k in _PLAN}},
            protocol.rounds,
            protocol.clients,
            *_company(federation),
        )
        _check_secure_sum(protocol, strategy, plan)
        targeting.check_decoders(server_attack, plan.attacks, protocol.secure_sum is not None)
        options = _options(AuditOptions, {k: v for k, v in audit.items() if k not in _PLAN}, "[audit]")
        tape = _options(TapeOptions, _table(tables, "tape", _names(TapeOptions)), "[tape]")
        simulation = _options(
            SimulationOptions, _table(tables, "simulation", _names(SimulationOptions)), "[simulation]"
        )
        privacy = _options(PrivacyOptions, _table(tables, "privacy", _names(PrivacyOptions)), "[privacy]")
        if "privacy" in tables:
            _check_guarantee(federation)
        return cls(tables, protocol, federation, plan, strategy, options, tape, simulation, privacy, server_attack)

    @property
    def server(self) -> str:
        """Who the server is, in words: they stand on every result."""
        return f"malicious server: {'; '.join(map(str, self.server_attack))}" if self.server_attack else "honest server"

    def to_toml(self) -> str:
        """The scenario as it was run, settings applied."""
        return tomli_w.dumps(dict(self.tables))


def _malice(tables: Table) -> tuple[TargetedServerAttack, ...]:
    """What a malicious server does; SpecError where the scenario does not call it that, or names nothing that it does."""
    server = coerce(tables.get("server", "honest"), Literal["honest", "malicious"], "server")
    planned = coerce(tables.get("server_attack", []), list, "[[server_attack]]")
    if planned and server == "honest":
        raise SpecError('[[server_attack]] is of a malicious server: say server = "malicious"')
    if server == "malicious" and not planned:
        raise SpecError(
            f'server = "malicious" needs a [[server_attack]]; use is one of {", ".join(SERVER_ATTACK.names())}'
        )
    rounds, clients = (coerce(tables.get(key, 1), int, key) for key in ("rounds", "clients"))
    return tuple(
        TargetedServerAttack.from_table(
            coerce(t, dict, f"[[server_attack]] #{i}"), f"[[server_attack]] #{i}", rounds, clients
        )
        for i, t in enumerate(planned, 1)
    )


def _bent(tables: Table, server_attack: Sequence[TargetedServerAttack]) -> Table:
    """The tables with the architectures that a malicious server passes off as the agreed one."""
    model = tables.get("model")
    if not isinstance(model, Mapping):
        return tables  # told in its place
    if "architectures" in model:
        raise SpecError(
            '[model]: architectures is a key of malicious servers: say server = "malicious" and name a [[server_attack]]'
        )
    changes = [
        aimed.server_attack.architecture for aimed in server_attack if aimed.server_attack.architecture is not None
    ]
    return _agreed({**tables, "model": {**model, "architectures": changes}}, tables) if changes else tables


def _agreed(malicious: Table, honest: Table) -> Table:
    """The tables with the honest network as the one that clients who inspect have agreed to, unless they name another."""
    guard = malicious.get("guard", {})
    if not isinstance(guard, Mapping) or guard.get("inspect", "off") == "off" or "architecture" in guard:
        return malicious
    model = Federation(Protocol.from_tables({**honest, "guard": {}})).model
    return {**malicious, "guard": {**guard, "architecture": fingerprint(model)}}


def _company(federation: Federation) -> tuple[Sequence[str], Sequence[str]]:
    """What stands beside the attacks: limits of images under a known noise, and the baselines of what is attacked."""
    if isinstance(federation.shards.dataset, Text):
        return (), TEXT_BASELINES
    noise = known_noise(federation.as_seen(federation.chain, len(federation.protocol.groups(1)[0])))
    return LIMITS if noise else (), IMAGE_BASELINES


def _located(tables: Table) -> Table:
    """The tables with their paths absolute: Flower's processes and whoever opens the run read them in other folders."""
    kinds = {"data": DATASET, "model": MODEL, "loss": LOSS}
    named = {key: kind for key, kind in kinds.items() if isinstance(tables.get(key), dict)}
    found = {**tables, **{key: with_absolute_paths(tables[key], kind, Path.cwd()) for key, kind in named.items()}}
    if isinstance(found.get("attack"), list):
        found["attack"] = [
            generators.with_absolute_paths(t, Path.cwd()) if isinstance(t, dict) else t for t in found["attack"]
        ]
    return found


def _check_secure_sum(protocol: Protocol, strategy: Table, plan: AttackPlan) -> None:
    """Refuse what a secure sum leaves no meaning."""
    if protocol.secure_sum is None:
        return
    if strategy.get("fraction_train", 1.0) != 1.0:
        raise SpecError("[secure_sum]: groups are of all clients, so [strategy] fraction_train must be 1.0")
    first = [group[0] for group in protocol.groups(1)]
    drawn = protocol.secure_sum.drawn
    if plan.clients is not None and (drawn or not set(plan.clients) <= set(first)):
        allowed = "leave it out, as groups are drawn anew in each round" if drawn else f"choose from {first}"
        raise SpecError(f"[audit]: clients are groups under [secure_sum], each named by its first client: {allowed}")


def apply_setting(tables: dict[str, Any], setting: str) -> None:
    """Set one value by its path, "model.width=4" or "chain.0.max_norm=2"; the value is read as TOML, else as text."""
    path, separator, text = setting.partition("=")
    if not separator or not path:
        raise SpecError(f"--set {setting}: expected table.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = path.strip().split(".")
    here: Any = tables
    for i, key in enumerate(parents):
        if isinstance(here, dict):
            here = here.setdefault(key, {})
        elif isinstance(here, list) and key.isdecimal() and int(key) < len(here):
            here = here[int(key)]
        else:
            raise SpecError(f"--set {setting}: there is no {'.'.join(parents[: i + 1])!r}")
    if isinstance(here, list) and last.isdecimal() and int(last) < len(here):
        here[int(last)] = value
    elif isinstance(here, dict):
        here[last] = value
    else:
        raise SpecError(f"--set {setting}: {'.'.join(parents)!r} has no {last!r}")


def _check_guarantee(federation: Federation) -> None:
    try:
        Accountant.of(federation)
    except NoGuarantee as error:
        raise SpecError(f"[privacy]: {error}") from error


def _with_proximal_term(chain: Any, strategy: Table) -> Any:
    """FedProx's proximal term is the clients' work: its weight becomes part of the protocol's local_sgd."""
    if "proximal_mu" not in strategy or not isinstance(chain, list):
        return chain
    mu = coerce(strategy["proximal_mu"], float, "[strategy]: proximal_mu")
    completed = []
    for table in chain:
        if isinstance(table, Mapping) and table.get("use") == "local_sgd":
            if table.get("proximal_mu", mu) != mu:
                raise SpecError(
                    f"[strategy] proximal_mu {mu} and local_sgd's proximal_mu {table['proximal_mu']} differ"
                )
            table = {**table, "proximal_mu": mu}
        completed.append(table)
    return completed


def _shorten(tables: dict[str, Any], rounds: int) -> tuple[int, ...]:
    """Train for another number of rounds; drops, and returns, the rounds of [audit] that only the file's own number has."""
    before, tables["rounds"] = tables.get("rounds"), rounds
    audit = tables.get("audit")
    named = audit.get("rounds") if isinstance(audit, dict) else None
    if not isinstance(audit, dict) or not isinstance(named, list) or not isinstance(before, int) or rounds < 1:
        return ()
    beyond = [r for r in named if isinstance(r, int) and rounds < r <= before]
    audit["rounds"] = [r for r in named if r not in beyond]
    if beyond and not audit["rounds"]:
        raise SpecError(f"[audit]: none of its rounds is left of {rounds}; add --set audit.rounds=[{rounds}]")
    return tuple(beyond)


def _as_set(message: str, settings: Sequence[str]) -> str:
    """A message on a table of a list; where a setting changed that table, by the setting's name for it, which counts from 0."""
    place = re.match(r"\[\[(\w+)\]\] #(\d+)", message)
    if place is None:
        return message
    name = f"{place[1]}.{int(place[2]) - 1}"
    named = any(re.match(rf"\s*{re.escape(name)}\s*[.=]", setting) for setting in settings)
    return f"{name} ({place[0]}){message[place.end() :]}" if named else message


def _table(tables: Table, name: str, allowed: Sequence[str]) -> Table:
    """A table whose keys are all allowed."""
    table: Table = coerce(tables.get(name, {}), dict, f"[{name}]")
    for key in table:
        if key not in allowed:
            raise SpecError(f"[{name}]: unknown key {key!r} (it has: {', '.join(allowed)})")
    return table


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def _options(kind: Any, table: Table, where: str) -> Any:
    return call(kind, check_arguments(kind, table, where), where)
