"""A scenario: one TOML file that describes an experiment, checked before the start.

Clients receive its protocol part; the plan of attack, the strategy and the tape options stay with the server.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch

from fedgauge.attacks.effort import Effort, attacks_by_effort
from fedgauge.attacks.engine.devices import Precision, devices_of
from fedgauge.attacks.learned import generators
from fedgauge.attacks.limits import noise_is_known
from fedgauge.attacks.malicious import targeting
from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK
from fedgauge.attacks.malicious.targeting import TargetedServerAttack
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import ATTACK, AttackPlan, attack_name
from fedgauge.client import toml_text
from fedgauge.client.components import (
    Checked,
    Count,
    NotNegative,
    Part,
    Positive,
    SpecError,
    Table,
    coerce,
    errors_in,
    settings_of,
    with_absolute_paths,
)
from fedgauge.client.federation import DATASET, Federation
from fedgauge.client.files import read_file
from fedgauge.client.inspection.policy import fingerprint
from fedgauge.client.local_training import LOCAL_TRAININGS
from fedgauge.client.models.build import MODEL
from fedgauge.client.models.losses import LOSS
from fedgauge.client.protocol import Protocol
from fedgauge.defenses.accounting import DELTA, Accountant, NoGuarantee
from fedgauge.server.store.tape import Keep

_TOP = {
    "seed", "rounds", "clients", "data", "model", "loss", "chain", "secure_sum", "strategy", "attack", "audit",
    "tape", "simulation", "privacy", "server", "server_attack", "guard", "validator", "canaries",
}  # fmt: skip
_UNREAD: Mapping[type[Exception], str] = {
    FileNotFoundError: "no such file; `fedgauge init` writes a scenario to start from",
    IsADirectoryError: "a folder; a Flower app in its folder is audited by `fedgauge app`",
}
_PLAN = tuple(f.name for f in fields(AttackPlan) if f.name != "attacks")
FEDAVG: Table = {"use": "FedAvg"}


@dataclass(frozen=True)
class AuditOptions(Checked):
    """Execution of the plan of attack.

    Args:
        curious: keep and attack updates; false only trains.
        executor: ray (worker processes) or local (in the attack service's own process, one batch of updates at a time).
        workers: attack workers on the CPU, at least 1; each uses one core. A Ray cluster has one on each of its cores.
        devices: "auto" (every GPU that torch can use, else the CPU), "cpu", "cuda" (every GPU), or a list of "cpu" and names
            such as "cuda:0"; each GPU has one worker; local uses the first device.
        precision: of products on a GPU: ieee (float32) or tf32 (faster, 10 bits of mantissa).
        effort: also use the attacks that fit the federation, with budgets of this size.
    """

    curious: bool = True
    executor: Literal["ray", "local"] = "ray"
    workers: Count = 1
    devices: str | tuple[str, ...] = "auto"
    precision: Precision = "ieee"
    effort: Effort | None = None

    def devices_here(self) -> list[torch.device]:
        """Return the devices for attacks on this machine.

        Raises:
            SpecError: torch cannot use one of them.
        """
        with errors_in("[audit] devices", ValueError):
            return devices_of(self.devices)


@dataclass(frozen=True)
class TapeOptions(Checked):
    """Retention of updates on disk.

    Args:
        keep: all: every accepted update; attacked: those that the plan attacks; none: delete each after its attack.
        retention_days: after this many days `fedgauge prune` deletes updates and reconstructions; default: never.
        replies: what the clients of a user's own app upload: weights, updates (trained minus sent weights), or gradients (also
            sent minus trained weights); auto: weights or updates, as the first round shows.
    """

    keep: Keep = "all"
    retention_days: NotNegative | None = None
    replies: Literal["auto", "weights", "updates", "gradients"] = "auto"


@dataclass(frozen=True)
class ValidatorOptions(Checked):
    """Bounds on a client's reply.

    Args:
        max_norm: the largest Euclidean norm of an update, above 0; default: 1000 times the largest of the weights' norm, the
            round's median norm and 1.
        max_examples: the largest number of examples that a client may claim, at least 1; default: in a simulation what it
            trains on, otherwise a billion.
    """

    max_norm: Positive | None = None
    max_examples: Count | None = None


@dataclass(frozen=True)
class SimulationOptions(Checked):
    """Resources of a simulation's clients.

    Args:
        parallel_clients: how many train at the same time, on one core each; at least 1.
        round_timeout: seconds that a round may take, above 0.
    """

    parallel_clients: Count = 2
    round_timeout: Positive = 600.0


@dataclass(frozen=True)
class PrivacyOptions(Checked):
    """Report of epsilons. With a [privacy] table, a chain without a guarantee is refused.

    Args:
        delta: at which epsilons are given, above 0 and below 1.
    """

    delta: Part = DELTA


@dataclass(frozen=True)
class Scenario:
    """Checked scenario with the federation of its protocol."""

    tables: Table
    protocol: Protocol
    federation: Federation = field(repr=False, compare=False)
    plan: AttackPlan
    strategy: Table
    audit: AuditOptions = field(default_factory=AuditOptions)
    tape: TapeOptions = field(default_factory=TapeOptions)
    simulation: SimulationOptions = field(default_factory=SimulationOptions)
    privacy: PrivacyOptions = field(default_factory=PrivacyOptions)
    validator: ValidatorOptions = field(default_factory=ValidatorOptions)
    server_attack: tuple[TargetedServerAttack, ...] = ()

    @classmethod
    def load(
        cls,
        path: Path,
        settings: Sequence[str] = (),
        rounds: int | None = None,
        read: Callable[[Path, int], bytes] = read_file,
        base: Path | None = None,
    ) -> "Scenario":
        """Read and check a file.

        Args:
            settings: "chain.0.max_norm=2", as given on the command line.
            rounds: replaces the file's; later rounds of [audit] are left out.
            read: reads at most a number of bytes of a file.
            base: of relative paths; default: the working directory.

        Raises:
            SpecError: the file is missing or wrong; the message names table, value and allowed values.
        """
        try:
            tables = dict(toml_text.parse(read(path, toml_text.MOST)))
            for setting in settings:
                apply_setting(tables, setting)
            if rounds is not None:
                tables["rounds"] = rounds
                match tables.get("audit"):
                    case {"rounds": list(named)}:
                        tables["audit"]["rounds"] = [r for r in named if not isinstance(r, int) or r <= rounds] or [
                            rounds
                        ]
            return cls.from_tables(tables, base)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, SpecError) as error:
            reason = _UNREAD.get(type(error)) or getattr(error, "strerror", None) or error
            raise SpecError(f"{path}: {reason}") from error

    @classmethod
    def from_tables(cls, tables: Table, base: Path | None = None) -> "Scenario":
        if unknown := sorted(tables.keys() - _TOP):
            hint = "".join(f"; did you mean {key!r}?" for key in get_close_matches(unknown[0], _TOP, 1))
            hint = "; this looks like a sweep: fedgauge sweep" if "defense" in tables else hint
            raise SpecError(f"unknown key {unknown[0]!r} (a scenario has: {', '.join(sorted(_TOP))}){hint}")
        tables = _absolute_paths(tables, base or Path.cwd())
        strategy = dict(coerce(tables.get("strategy", FEDAVG), dict, "[strategy]"))
        server_attack = _server_attacks(tables)
        protocol = Protocol.from_tables(
            {
                **_with_architectures(tables, server_attack),
                "chain": _with_proximal_term(tables.get("chain", []), strategy),
            }
        )
        federation = Federation(protocol).check()
        targeting.check(server_attack, federation)
        attacks = coerce(tables.get("attack", []), list, "[[attack]]")
        audit = coerce(tables.get("audit", {}), dict, "[audit]")
        options = settings_of(AuditOptions, {k: v for k, v in audit.items() if k not in _PLAN}, "[audit]", _PLAN)
        named = [coerce(t, dict, f"[[attack]] #{i}") for i, t in enumerate(attacks, 1)]
        chosen = attacks_by_effort(options.effort, federation) if options.effort else []
        named += [t for t in chosen if attack_name(t) not in map(attack_name, named)]
        when = {"seed": protocol.seed, **{k: v for k, v in audit.items() if k in _PLAN}}
        plan = plan_of(named, when, federation)
        if protocol.secure_sum is not None and strategy.get("fraction_train", 1.0) != 1.0:
            raise SpecError("[secure_sum]: its groups hold all clients, so [strategy] fraction_train must be 1.0")
        targeting.check_decoders(server_attack, plan.attacks, protocol.secure_sum is not None)
        tape = settings_of(TapeOptions, tables.get("tape", {}), "[tape]")
        simulation = settings_of(SimulationOptions, tables.get("simulation", {}), "[simulation]")
        _check_control_variates(federation, strategy, tape)
        privacy = settings_of(PrivacyOptions, tables.get("privacy", {}), "[privacy]")
        if "privacy" in tables:
            with errors_in("[privacy]", NoGuarantee):
                Accountant.of(federation)
        validator = settings_of(ValidatorOptions, tables.get("validator", {}), "[validator]")
        server_side = (options, tape, simulation, privacy, validator)
        return cls(tables, protocol, federation, plan, strategy, *server_side, server_attack)

    @property
    def server(self) -> str:
        """Description of the server for results: honest, or its attacks."""
        return f"malicious server: {'; '.join(map(str, self.server_attack))}" if self.server_attack else "honest server"

    def to_toml(self) -> str:
        return tomli_w.dumps(dict(self.tables))


def _server_attacks(tables: Table) -> tuple[TargetedServerAttack, ...]:
    """Build the attacks of a malicious server, which `server` must announce."""
    server = coerce(tables.get("server", "honest"), Literal["honest", "malicious"], "server")
    planned = coerce(tables.get("server_attack", []), list, "[[server_attack]]")
    if bool(planned) != (server == "malicious"):
        names = ", ".join(SERVER_ATTACK.names())
        raise SpecError(f'set both server = "malicious" and a [[server_attack]] (use = one of {names}), or neither')
    rounds, clients = (coerce(tables.get(key, 1), int, key) for key in ("rounds", "clients"))
    return tuple(
        TargetedServerAttack.from_table(
            coerce(t, dict, f"[[server_attack]] #{i}"), f"[[server_attack]] #{i}", rounds, clients
        )
        for i, t in enumerate(planned, 1)
    )


def _with_architectures(tables: Table, server_attack: Sequence[TargetedServerAttack]) -> Table:
    model = tables.get("model")
    if not isinstance(model, Mapping):
        return tables  # the protocol reports this mistake
    attacks = [aimed.server_attack for aimed in server_attack]
    changes = [attack.architecture for attack in attacks if attack.architecture is not None]
    return _agreed({**tables, "model": {**model, "architectures": changes}}, tables) if changes else tables


def _agreed(malicious: Table, honest: Table) -> Table:
    """Let inspecting clients expect the honest network, unless they name another."""
    guard = malicious.get("guard", {})
    if not isinstance(guard, Mapping) or guard.get("inspect", "off") == "off" or "architecture" in guard:
        return malicious
    model = Federation(Protocol.from_tables({**honest, "guard": {}})).model
    return {**malicious, "guard": {**guard, "architecture": fingerprint(model)}}


def plan_of(tables: Sequence[Table], options: Table, federation: Federation) -> AttackPlan:
    """Make the plan of [[attack]] tables and keys of [audit], with baselines, limits and canaries.

    Under a known noise attacks are tuned, and limits are computed.
    """
    protocol, modality = federation.protocol, type(modality_of(federation.shards.dataset))
    noisy, canaries = noise_is_known(federation), _with_canaries(protocol)
    return AttackPlan.from_tables(tables, options, protocol.rounds, protocol.clients, modality, canaries, noisy)


def _absolute_paths(tables: Table, base: Path) -> Table:
    """Make paths absolute, as other processes run in other folders."""
    kinds = {"data": DATASET, "model": MODEL, "loss": LOSS}
    named = {key: kind for key, kind in kinds.items() if isinstance(tables.get(key), dict)}
    located = {**tables, **{key: with_absolute_paths(tables[key], kind, base) for key, kind in named.items()}}
    if isinstance(located.get("attack"), list):
        located["attack"] = [attack_from(t, base) if isinstance(t, dict) else t for t in located["attack"]]
    return located


def attack_from(table: Table, base: Path) -> Table:
    """An attack's table with absolute paths, its generators' too."""
    return generators.with_absolute_paths(with_absolute_paths(table, ATTACK, base), base)


def _with_canaries(protocol: Protocol) -> Table | None:
    """Return the clients with canaries, and the number of canary examples."""
    canaries = set(protocol.canary_clients)
    if not canaries:
        return None
    # a sum has the number of its first client that answers
    clients = [client for group in protocol.groups if canaries.intersection(group) for client in group]
    return {"clients": clients, **({"examples": each} if (each := protocol.canary_examples) else {})}


def run_command(verb: str, folder: Path, tables: Table, further: Sequence[str] = ()) -> str:
    """Return the command line that does something with a run, with flags that allow the packages of its scenario.

    Args:
        further: packages that the scenario does not name.
    """
    named = re.findall(r'"use": "([^\W\d]\w*)[\w.]*:', json.dumps(tables, default=str, ensure_ascii=False))
    flags = "".join(f" --allow {package}" for package in dict.fromkeys([*further, *named]))
    return f"fedgauge {verb} {shlex.quote(str(folder))}{flags}"


def expected_jobs(scenario: Scenario, done: int, rounds: int | None = None) -> int:
    """Return the number of jobs of the rounds after `done`.

    Args:
        rounds: of the run; default: the scenario's.
    """
    plan, groups = scenario.plan, scenario.protocol.groups
    some = max(1, int(len(groups) * scenario.strategy.get("fraction_train", 1.0)))
    seen = [group[0] for group in groups[:some]]
    kinds: dict[bool, list[int]] = {}  # rounds that are attacked alike
    for round in range(done + 1, (rounds or scenario.protocol.rounds) + 1):
        kinds.setdefault(plan.attacks_round(round), []).append(round)
    return sum(len(alike) * sum(len(plan.targets(alike[0], seen, p)) for p in plan.attacks) for alike in kinds.values())


def component_of(text: str) -> Table:
    """Parse a component with settings from the option --attack."""
    use, *settings = text.split() or [""]
    if not use:
        raise SpecError("--attack is empty: name a component, with its settings, such as --attack 'NAME KEY=VALUE'")
    table: dict[str, Any] = {"use": use}
    for setting in settings:
        apply_setting(table, setting, "--attack")
    return table


def _check_control_variates(federation: Federation, strategy: Table, tape: TapeOptions) -> None:
    """Refuse settings under which control variates are not SCAFFOLD's, or unknown to the server."""
    everyone = strategy.get("fraction_train", 1.0) == 1.0
    plain = strategy.get("use") in ("FedAvg", "flwr.serverapp.strategy:FedAvg")
    if federation.chain.local.remembers and not (plain and everyone and tape.keep == "all"):
        raise SpecError(
            '[[chain]]: scaffold needs the plain average ("FedAvg") of all clients in every round, and all their updates '
            "recorded: remove fraction_train and [tape] keep"
        )


def apply_setting(tables: dict[str, Any], setting: str, option: str = "--set") -> None:
    """Set one value by its path, such as "chain.0.max_norm=2"; the value is TOML, else text."""
    path, separator, text = setting.partition("=")
    if not separator or not path:
        raise SpecError(f"{option} {setting}: expected KEY=VALUE")
    try:
        value = toml_text.parse(f"value = {text}".encode())["value"]
    except (tomllib.TOMLDecodeError, UnicodeEncodeError):
        value = text
    *parents, last = path.strip().split(".")
    here: Any = tables
    try:
        for key in parents:
            if isinstance(here, dict):
                here.setdefault(key, {})
            here = here[_place(here, key)]
        here[_place(here, last)] = value
    except (TypeError, IndexError) as error:
        raise SpecError(f"{option} {setting}: there is no {path!r} to set") from error


def _place(here: object, key: str) -> str | int:
    return int(key) if isinstance(here, list) and key.isdecimal() else key


def _with_proximal_term(chain: Any, strategy: Table) -> Any:
    """Copy FedProx's weight from the strategy to the clients' local training."""
    if "proximal_mu" not in strategy or not isinstance(chain, list):
        return chain
    mu = coerce(strategy["proximal_mu"], float, "[strategy]: proximal_mu")
    completed = []
    for table in chain:
        if isinstance(table, Mapping) and table.get("use") in LOCAL_TRAININGS:
            if table.get("proximal_mu", mu) != mu:
                raise SpecError(
                    f"[strategy] proximal_mu {mu} and {table['use']}'s proximal_mu {table['proximal_mu']} differ"
                )
            table = {**table, "proximal_mu": mu}
        completed.append(table)
    return completed
