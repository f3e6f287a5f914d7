"""A scenario: one TOML file, one question; checked whole before anything starts.

Its protocol part is what clients are sent; the plan of attack, the strategy and the tape stay with the server.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import tomli_w

from attacks.limits import known_noise
from attacks.plan import LIMITS, AttackPlan
from client.components import SpecError, Table, call, check_arguments, conform
from client.protocol import Federation, Protocol
from server.tape import Keep

_TOP = {
    "seed", "rounds", "clients", "data", "model", "chain", "stragglers", "strategy", "attack", "audit", "tape", "simulation",
}  # fmt: skip
_PLAN = {f.name for f in fields(AttackPlan)} - {"attacks"}
FEDAVG: Table = {"use": "flwr.serverapp.strategy:FedAvg"}


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
    """What stays on disk: all accepted updates; scored, those the plan attacks; none, nothing once it was attacked."""

    keep: Keep = "all"


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

    @classmethod
    def load(cls, path: Path, settings: Sequence[str] = ()) -> "Scenario":
        """Read and check a file; settings are "chain.0.max_norm=2" as given on the command line.

        Raises:
            SpecError: naming the file, the table, the value and what is allowed.
        """
        try:
            tables: dict[str, Any] = tomllib.loads(path.read_text())
            for setting in settings:
                apply_setting(tables, setting)
            return cls.from_tables(tables)
        except FileNotFoundError as error:
            raise SpecError(f"{path}: there is no such file") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SpecError(f"{path}: not a readable TOML file: {error}") from error
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from error

    @classmethod
    def from_tables(cls, tables: Table) -> "Scenario":
        """From parsed TOML; every component is built once, so that a mistake is told here."""
        if unknown := sorted(tables.keys() - _TOP):
            raise SpecError(f"unknown key {unknown[0]!r} (a scenario has: {', '.join(sorted(_TOP))})")
        strategy = dict(conform(tables.get("strategy", FEDAVG), dict, "[strategy]"))
        protocol = Protocol.from_tables({**tables, "chain": _with_proximal_term(tables.get("chain", []), strategy)})
        federation = Federation(protocol).check()
        attacks = conform(tables.get("attack", []), list, "[[attack]]")
        audit = conform(tables.get("audit", {}), dict, "[audit]")
        plan = AttackPlan.from_tables(
            [conform(t, dict, f"[[attack]] #{i}") for i, t in enumerate(attacks, 1)],
            {"seed": protocol.seed, **{k: v for k, v in audit.items() if k in _PLAN}},
            protocol.rounds,
            protocol.clients,
            LIMITS if known_noise(federation.chain) is not None else (),
        )
        options = _options(AuditOptions, {k: v for k, v in audit.items() if k not in _PLAN}, "[audit]")
        tape = _options(TapeOptions, tables.get("tape", {}), "[tape]")
        simulation = _options(SimulationOptions, tables.get("simulation", {}), "[simulation]")
        return cls(tables, protocol, federation, plan, strategy, options, tape, simulation)

    def to_toml(self) -> str:
        """The scenario as it was run, settings applied."""
        return tomli_w.dumps(dict(self.tables))


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


def _with_proximal_term(chain: Any, strategy: Table) -> Any:
    """FedProx's proximal term is the clients' work: its weight becomes part of the protocol's local_sgd."""
    if "proximal_mu" not in strategy or not isinstance(chain, list):
        return chain
    mu = conform(strategy["proximal_mu"], float, "[strategy]: proximal_mu")
    completed = []
    for table in chain:
        if isinstance(table, Mapping) and table.get("use") == "client.update:local_sgd":
            if table.get("proximal_mu", mu) != mu:
                raise SpecError(
                    f"[strategy] proximal_mu {mu} and local_sgd's proximal_mu {table['proximal_mu']} differ"
                )
            table = {**table, "proximal_mu": mu}
        completed.append(table)
    return completed


def _options(kind: Any, table: Any, where: str) -> Any:
    return call(kind, check_arguments(kind, conform(table, dict, where), where), where)
