"""The registry: which components there are, by kind and short name.

A package adds components through entry points: one group for each kind, such as `fedgauge.attacks`. fedgauge registers its
own in the same groups, in pyproject.toml.
"""

import os
from dataclasses import dataclass
from functools import cache
from importlib import metadata

OWN = "fedgauge"  # our distribution and import name
ALLOW = "FEDGAUGE_ALLOW"  # packages, with commas between, whose modules may be named as module:name
PLUG_INS = "FEDGAUGE_PLUG_INS"  # "allowed": other packages' entry points count only if the package is allowed


@dataclass(frozen=True)
class Entry:
    """One component: its short name, its kind's group, where its object is, and the package that registers it."""

    name: str
    group: str
    value: str
    package: str

    @property
    def module(self) -> str:
        return self.value.partition(":")[0]

    @property
    def own(self) -> bool:
        return self.package == OWN


def allowed() -> tuple[str, ...]:
    """Return the packages outside fedgauge from which this process may take components."""
    return tuple(name for name in os.environ.get(ALLOW, "").split(",") if name)


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    """Check that a module is one of these packages or part of one."""
    return any(module == p or module.startswith(p + ".") for p in packages)


def entries(group: str) -> list[Entry]:
    """The components of a group that may be used in this process, by name; fedgauge's own first."""
    restricted = os.environ.get(PLUG_INS) == "allowed"
    return [e for e in _installed(group) if e.own or not restricted or is_in(e.module, allowed())]


@cache
def _installed(group: str) -> tuple[Entry, ...]:
    # Python's path may show the same package twice: a set keeps one
    found = {Entry(e.name, group, e.value, (e.dist and e.dist.name) or "?") for e in metadata.entry_points(group=group)}
    return tuple(sorted(found, key=lambda e: (not e.own, e.name, e.package)))


def user_packages() -> tuple[str, ...]:
    """The packages of users: those allowed, and those of other distributions that register components."""
    groups = {group for group in metadata.entry_points().groups if group.startswith(f"{OWN}.")}
    return (*allowed(), *{e.module.split(".")[0] for group in groups for e in entries(group) if not e.own})
