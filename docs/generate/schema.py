"""The JSON schema of a scenario, with which an editor completes and checks the file; `fedgauge schema` prints it."""

import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from docs.generate.arguments import NEEDED, Key, arguments_of
from docs.generate.scenario_keys import TABLES
from fedgauge.simulations.cli.components import components_of

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
    """Return the JSON schema (draft 7) of a scenario.

    Its `definitions` have, for each kind of component, the schema of `use` for a component that is not fedgauge's own.
    """
    root = _object(TABLES["top"]())
    tables = {name: _table(name) for name in TABLES if name != "top" and "." not in name}
    tables |= {name: {"type": "array", "items": tables[name]} for name in LISTS}
    root["properties"] |= tables
    root["required"] += ["data", "model", "chain"]
    shared = {f"{name}.{key.name}": _described(key) for name in TABLES for key in TABLES[name]() if name in KIND_OF}
    definitions = shared | dict.fromkeys(KIND_OF.values(), OWN)
    title = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "a scenario of fedgauge"}
    return {**title, "definitions": definitions, **root}


def _table(name: str) -> Schema:
    """The schema of one table: one form for each component that its `use` may name, and one for a component of one's own."""
    keys = [key for key in TABLES[name]() if key.name != "use"] if name in TABLES else []
    if name not in KIND_OF:
        return _object(keys)
    kind, shared = KIND_OF[name], {key.name: _reference(f"{name}.{key.name}") for key in keys}
    shared |= {
        path.partition(".")[2]: _table(path) if path in TABLES else {"type": "array", "items": _table(path)}
        for path in (*TABLES, *KIND_OF)
        if path.startswith(f"{name}.")
    }
    forms = []
    for component in (c for c in components_of(kind) if c.package == "fedgauge"):
        assert component.target is not None
        form = _object(arguments_of(component.target))
        form["properties"] |= {"use": {"const": component.name, "description": component.description}, **shared}
        forms.append(form)
    free = _object([]) | {"additionalProperties": True}
    free["properties"] |= {"use": _reference(kind), **shared}
    if name not in TABLES or any(key.name == "use" and key.default == NEEDED for key in TABLES[name]()):
        for form in (*forms, free):
            form["required"].append("use")
    return {"anyOf": [*forms, free]}


def _object(keys: Sequence[Key]) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {key.name: _described(key) for key in keys},
        "required": [key.name for key in keys if key.default == NEEDED],
    }


def _described(key: Key) -> Schema:
    default = "" if key.default in (NEEDED, "none") else f"default: {key.default.strip('`')}"
    described = "; ".join(filter(None, (key.meaning, default)))
    return of_hint(key.hint) | ({"description": described} if described else {})


def _reference(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


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
