"""Types and bounds of a ledger's columns, as SQLite stores any value and a ledger may be foreign."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

MOST = 2**21 - 1  # rounds, clients, examples: the columns that `Scores` packs into one number


@dataclass(frozen=True)
class _Kind:
    """Type with bounds, which for a text bound its length."""

    types: tuple[type, ...]
    least: float
    most: float
    null: bool = False

    def holds(self, value: Any) -> bool:
        if value is None:
            return self.null
        return type(value) in self.types and self.least <= (len(value) if type(value) is str else value) <= self.most

    def or_null(self) -> "_Kind":
        return replace(self, null=True)


_PLACE, _COUNT, _FLAG = _Kind((int,), 0, MOST), _Kind((int,), 0, 2**53), _Kind((int,), 0, 1)
_NAME, _TEXT = _Kind((str,), 0, 300), _Kind((str,), 0, 1 << 20)
# by the names that the queries give their columns
_COLUMNS = {
    name: kind
    for names, kind in (
        ("round client", _PLACE),
        ("other at_round of_client", _PLACE.or_null()),
        ("example", replace(_PLACE, least=-1)),
        ("jobs waves n attempts", _COUNT),
        ("examples latest", _COUNT.or_null()),
        ("id attack_id wave seed", _Kind((int,), -(2**63), 2**63)),
        ("open remembers deterministic flat", _FLAG),
        ("alarm silent", _FLAG.or_null()),
        ("value accuracy loss best mean suspicion graded_to", _Kind((int, float), -inf, inf, null=True)),
        ("seconds intercept_seconds span", _Kind((int, float), -1e12, 1e12, null=True)),  # a clock may go backwards
        ("name role attack status state metric key device precision torch driver code words", _NAME),
        ("digest memory", _NAME.or_null()),
        ("planned knowledge", _TEXT),
        ("reason error metrics training grading", _TEXT.or_null()),
        ("fact", replace(_TEXT, most=16 << 20)),  # an app of a user's own may have 10^5 nodes
    )
    for name in names.split()
}


def columns(names: Iterable[str]) -> list[tuple[int, str, _Kind]]:
    return [(at, name, _COLUMNS[name]) for at, name in enumerate(names) if name in _COLUMNS]
