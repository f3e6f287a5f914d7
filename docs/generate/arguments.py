"""Arguments of components that a scenario may set."""

import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedgauge.client.components import spell

# required parameters with these names are filled in by fedgauge, not by the scenario
FILLED_IN = ("model", "shape", "classes", "columns", "tokenizer", "task", "normalise", "batch_size", "examples")
# a strategy's arguments that server.strategy.build.build_strategy fixes, and those for which it has other defaults than Flower
FIXED = ("fraction_evaluate", "min_evaluate_nodes", "arrayrecord_key", "configrecord_key", "weighted_by_key")
OTHER_DEFAULTS = {"min_train_nodes": "1", "min_available_nodes": "all"}


NEEDED = "needed"


@dataclass(frozen=True)
class Key:
    """One key of a scenario: the type of its value, its default as a page shows it, and what it decides."""

    name: str
    hint: Any
    default: str
    meaning: str = ""

    @property
    def value(self) -> str:
        return spell(self.hint).replace("'", '"')


def arguments_of(target: Callable[..., Any]) -> list[Key]:
    """Return the arguments that a scenario may set, with their defaults as TOML."""
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    fields = dataclasses.fields(target) if dataclasses.is_dataclass(target) else ()
    defaults = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    found = []
    for name, parameter in inspect.signature(target).parameters.items():
        required = parameter.default is parameter.empty
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        filled_in = name in FIXED or (required and name in FILLED_IN)
        if variadic or filled_in or not _is_settable(hints.get(name, Any)):
            continue
        default = OTHER_DEFAULTS.get(name) or toml(defaults.get(name, parameter.default))
        found.append(Key(name, hints.get(name, Any), NEEDED if required else default))
    return found


def listed_arguments(target: Callable[..., Any]) -> str:
    """Return the names of arguments with their defaults, as TOML; a required one has no default."""
    return ", ".join(a.name if a.default == NEEDED else f"{a.name} = {a.default}" for a in arguments_of(target))


def _is_settable(hint: Any) -> bool:
    """Return whether TOML can hold a value of this type; it cannot hold a tensor or a function."""
    if typing.get_origin(hint) is Callable or hint is Tensor:
        return False
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Mapping, dict, typing.Literal) or not inner:
        return hint is not Callable
    return all(_is_settable(option) for option in inner if option is not Ellipsis)


def toml(value: object) -> str:
    """Return a default as a scenario writes it; "none" for None."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str | bool) else str(value)
