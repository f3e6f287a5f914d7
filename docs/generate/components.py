"""The tables of docs/components.md: fedgauge's own components of a kind."""

from docs.generate.markdown import escaped
from fedgauge.simulations.cli.components import Component, components_of

HEADER = "| name | arguments | what it is |\n|---|---|---|\n"


def block(kind: str) -> str:
    """Return the table of a kind."""
    return HEADER + "".join(map(_row, components_of(kind, own_only=True)))


def _row(component: Component) -> str:
    arguments = escaped(f"`{component.arguments}`") if component.arguments else ""
    return f"| `{component.name}` | {arguments} | {escaped(component.description)} |\n"
