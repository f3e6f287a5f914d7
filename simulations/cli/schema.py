"""The JSON schema of a scenario, by which an editor completes and checks the file (taplo, Even Better TOML)."""

import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from fedgauge.simulations.cli.components import arguments_of, components_of
from fedgauge.simulations.cli.scenario_keys import NEEDED, TABLES, Key

Schema = dict[str, Any]
# by scenario table, the kind of component that its `use` names
KIND_OF = {
    "data": "dataset",
    "model": "model",
    "loss": "loss",
    "chain": "link",
    "strategy": "strategy",
    "attack": "attack",
    "server_attack": "server_attack",
    "model.adapter": "adapter",
    "model.defense": "model_defense",
}
LISTS = ("chain", "attack", "server_attack")
OWN = {"type": "string", "pattern": "^[\\w.]+:\\w+$", "description": "module:name in a package of your own"}


def scenario_schema() -> Schema:
    """Return the JSON schema (draft 7) of a scenario, with the components of installed plug-ins."""
    root = _object(TABLES["top"]())
    tables = {name: _table(name) for name in TABLES if name != "top" and "." not in name}
    tables |= {name: {"type": "array", "items": tables[name]} for name in LISTS}
    root["properties"] |= tables
    root["required"] += ["data", "model", "chain"]
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "a scenario of fedgauge", **root}


def _table(name: str) -> Schema:
    """The schema of one table: one form for each component that its `use` may name, and one for a component of one's own."""
    keys = [key for key in TABLES[name]() if key.name != "use"] if name in TABLES else []
    if name not in KIND_OF:
        return _object(keys)
    inner = {
        path.partition(".")[2]: _table(path) if path in TABLES else {"type": "array", "items": _table(path)}
        for path in (*TABLES, *KIND_OF)
        if path.startswith(f"{name}.")
    }
    forms = []
    for component in components_of(KIND_OF[name]):
        if component.target is None:
            continue
        own = [
            Key(a.name, a.hint, NEEDED if a.default is None else a.default, "") for a in arguments_of(component.target)
        ]
        form = _object([*keys, *own])
        form["properties"] |= {"use": {"const": component.name, "description": component.description}, **inner}
        forms.append(form)
    free = _object(keys) | {"additionalProperties": True}
    free["properties"] |= {"use": OWN, **inner}
    if name not in TABLES or any(key.name == "use" and key.default == NEEDED for key in TABLES[name]()):
        for form in (*forms, free):
            form["required"].append("use")
    return {"anyOf": [*forms, free]}


def _object(keys: Sequence[Key]) -> Schema:
    shown = [(key, {"description": key.meaning} if key.meaning else {}) for key in keys]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {key.name: of_hint(key.hint) | about for key, about in shown},
        "required": [key.name for key in keys if key.default == NEEDED],
    }


def of_hint(hint: Any) -> Schema:
    """Return the schema of a value of this type, as `fedgauge.client.components.coerce` accepts it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        options = [of_hint(i) for i in inner if i is not type(None)]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (tuple, list, Sequence):
        return {"type": "array", "items": of_hint(inner[0])}
    if origin in (Mapping, dict):
        return {"type": "object"}
    names = {
        int: "integer",
        float: "number",
        str: "string",
        Path: "string",
        bool: "boolean",
        list: "array",
        dict: "object",
    }
    return {"type": names[hint]} if hint in names else {}
