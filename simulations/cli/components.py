"""Every component by kind, as `fedgauge list` prints it."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from fedgauge.attacks.learned.generators import GENERATOR
from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK
from fedgauge.attacks.matching.priors import PRIOR
from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import ComponentKind, is_own, resolve
from fedgauge.client.entry_points import Entry
from fedgauge.client.federation import DATASET, TRANSFORM
from fedgauge.client.models.build import ADAPTER, MALICIOUS, MODEL, MODEL_DEFENSE
from fedgauge.client.models.losses import LOSS
from fedgauge.server.strategy.build import STRATEGY

KINDS: Mapping[str, ComponentKind] = {
    "dataset": DATASET,
    "model": MODEL,
    "loss": LOSS,
    "link": TRANSFORM,
    "adapter": ADAPTER,
    "model_defense": MODEL_DEFENSE,
    "attack": ATTACK,
    "prior": PRIOR,
    "generator": GENERATOR,
    "server_attack": SERVER_ATTACK,
    "architecture": MALICIOUS,
    "strategy": STRATEGY,
}


@dataclass(frozen=True)
class Component:
    """One listed component."""

    kind: str
    name: str
    target: Callable[..., Any] | None = None  # the class or function; None if it cannot be imported
    description: str = ""  # the first paragraph of its docstring
    package: str = ""  # that registers it
    error: str = ""  # why it cannot be used


def components_of(kind: str | None = None) -> list[Component]:
    """Every registered component of a kind, or of all kinds."""
    listed = []
    for name in KINDS if kind is None else (kind,):
        # what is in two groups, as an attack on two kinds of data, is listed once
        once = {(entry.name, entry.value, entry.package): entry for entry in KINDS[name].entries()}
        listed += [_component(name, entry) for entry in once.values()]
    return listed


def _component(kind: str, entry: Entry) -> Component:
    listed, table = Component(kind, entry.name, package=entry.package), {"use": entry.name}
    if not entry.own and is_own(table, KINDS[kind]):  # no plug-in replaces a name of fedgauge
        return dataclasses.replace(listed, error="fedgauge also has a component of this name")
    try:
        target = resolve(table, kind, KINDS[kind])
    except Exception as error:  # such as a module of fedgauge whose library is not installed
        return dataclasses.replace(listed, error=str(error))
    words = " ".join((inspect.getdoc(target) or "").split("\n\n")[0].split())
    return dataclasses.replace(listed, target=target, description=words)


def print_components(components: Sequence[Component], console: Console) -> None:
    width = max((len(c.name) for c in components), default=0)
    for kind, of_it in groupby(components, lambda component: component.kind):
        console.print(Text(kind, "bold"))
        for component in of_it:
            plug_in = "" if component.package == "fedgauge" else f" [{component.package}]"
            broken = f"cannot be used{plug_in}: {component.error}"
            words = broken if component.error else component.description + plug_in
            console.print(Text(f"  {component.name:{width}}  ").append(words, "red" if component.error else None))
