"""Digests of kept figures: of how each was computed, and of what a file says."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedgauge.simulations.experiments.paper_tables import PaperTable

OUTSIDE = ("digest", "date")  # keys of a file that its digest is not of


def digest_of(value: Any) -> str:
    """The SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def computed(paper_table: PaperTable) -> dict[str, str]:
    """By cell and attack, a digest of all that decides the attack's figures but the code: settings, budget and seed."""
    found = {}
    for cell in paper_table.cells:
        setting = {key: value for key, value in asdict(cell).items() if key != "attacks"}
        for spec in cell.attacks:
            found[f"{cell.name}: {spec.name}"] = digest_of([paper_table.seed, setting, asdict(spec)])
    return found


def figures_digest(kept: Mapping[str, Any]) -> str:
    """The digest that a file of figures carries of itself."""
    return digest_of({key: value for key, value in kept.items() if key not in OUTSIDE})
