"""Every key of a scenario with its type, default and meaning: the reference of keys and the JSON schema are made of them."""

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from docs.generate.arguments import NEEDED, Key, toml
from fedgauge.attacks.base import Budget
from fedgauge.attacks.learned.auxiliary import Auxiliary
from fedgauge.attacks.malicious.targeting import TargetedServerAttack
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.client.data.batches import split
from fedgauge.client.inspection.policy import InspectionPolicy
from fedgauge.client.protocol import CanaryOptions, Protocol, SecureSumOptions
from fedgauge.server.store.scenario import (
    AuditOptions,
    PrivacyOptions,
    SimulationOptions,
    TapeOptions,
    ValidatorOptions,
)


def _of(target: Callable[..., Any], leave_out: Sequence[str] = (), **defaults: str) -> list[Key]:
    """The arguments of a dataclass or function that a table of the scenario sets.

    Args:
        defaults: of arguments that the scenario's reader fills in.
    """
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    meanings = meanings_of(inspect.getdoc(target) or "")
    keys = []
    for name, parameter in inspect.signature(target).parameters.items():
        if name not in leave_out:
            default, meaning = defaults.get(name, _default(parameter)), meanings[name].rstrip(".")
            if not default.startswith("`"):  # None in Python: the docstring names the default
                meaning, _, named = meaning.partition("; default: ")
                default = named or default
            keys.append(Key(name, hints[name], default, meaning))
    return keys


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return NEEDED
    return "none" if parameter.default is None else f"`{toml(parameter.default)}`"


def meanings_of(docstring: str) -> dict[str, str]:
    """By argument, what the docstring's Args say of it, on one line."""
    listed = re.search(r"^Args:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    found = re.findall(r"^    ([\w, ]+): (.*(?:\n     .*)*)", listed[1], re.MULTILINE) if listed else []
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def _use(what: str, default: str = NEEDED) -> Key:
    return Key("use", str, default, what)


def _top() -> list[Key]:
    protocol = {key.name: key for key in _of(Protocol, ("data", "model", "chain", *_PARTS), seed="`0`")}
    server = Key(
        "server",
        Literal["honest", "malicious"],
        '`"honest"`',
        "honest: it sends the true weights; malicious: what `[[server_attack]]` says",
    )
    return [*protocol.values(), server]


_PARTS = ("secure_sum", "loss", "guard", "canaries")
_SPLIT = ("dataset", "clients", "seed")  # of split: given by other parts of the scenario
_WEIGHTS = "a safetensors checkpoint to start from, BatchNorm's statistics included"
_ADAPTERS = "small trained parts of a frozen network, each a table `[[model.adapter]]` with `use`"
_DEFENSES = "defenses of the model, each a table `[[model.defense]]` with `use`"
_EACH = "act on each example's gradient by itself; before local training only"
TABLES: Mapping[str, Callable[[], list[Key]]] = {
    "top": _top,
    "data": lambda: [_use("the dataset"), *_of(split, _SPLIT)],
    "model": lambda: [
        _use("the network"),
        Key("mode", Literal["train", "eval"], '`"eval"`', "of its layers while clients train"),
        Key("weights", str, "drawn from the seed", _WEIGHTS),
        Key("adapter", list, "`[]`", _ADAPTERS),
        Key("defense", list, "`[]`", _DEFENSES),
    ],
    "loss": lambda: [_use("what clients minimise", '`"cross_entropy"`')],
    "chain": lambda: [_use("the link"), Key("each", bool, "`false`", _EACH)],
    "secure_sum": lambda: _of(SecureSumOptions, threshold="all of it"),
    "guard": lambda: _of(InspectionPolicy),
    "canaries": lambda: _of(CanaryOptions),
    "strategy": lambda: [_use("the Flower strategy", '`"FedAvg"`')],
    "attack": lambda: [
        _use("the attack"),
        *_of(PlannedAttack, ("table", "budget"), name="that of `use`"),
        *_of(Budget),
    ],
    "attack.auxiliary": lambda: _of(Auxiliary),
    "audit": lambda: [*_of(AttackPlan, ("attacks",), seed="that of the scenario"), *_of(AuditOptions)],
    "server_attack": lambda: [_use("the server attack"), *_of(TargetedServerAttack, ("table",))],
    "tape": lambda: _of(TapeOptions),
    "simulation": lambda: _of(SimulationOptions),
    "privacy": lambda: _of(PrivacyOptions),
    "validator": lambda: _of(ValidatorOptions),
}
