"""A small sweep that most tests of sweeps read."""

from pathlib import Path
from typing import Any

import tomli_w

SGD = {"use": "local_sgd", "rate": 0.1}
IG = {"use": "inverting_gradients", "iterations": 5}
TABLES: dict[str, Any] = {
    "seeds": [0, 1],
    "scenario": {
        "rounds": 2,
        "clients": 2,
        "data": {"use": "mnist5k", "auxiliary": 64},
        "model": {"use": "mlp", "hidden": [8]},
    },
    "defense": [
        {"name": "none", "chain": [SGD]},
        {"name": "sign, batch of 2", "chain": [SGD, {"use": "sign"}], "data": {"batch_size": 2}},
    ],
    "attack": [IG, {"use": "analytic", "defenses": ["none"]}],
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps(TABLES | changes))
    return path


def changed(table: str, place: int, **values: Any) -> dict[str, Any]:
    """The sweep's tables, with one entry of a list changed."""
    entries = list(TABLES[table])
    entries[place] = {**entries[place], **values}
    return {table: entries}
