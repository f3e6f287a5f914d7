"""The tables of docs/scenario-keys.md."""

from docs.generate.markdown import escaped
from fedgauge.simulations.cli.scenario_keys import TABLES, Key

HEADER = "| key | value | default | meaning |\n|---|---|---|---|\n"


def block(table: str) -> str:
    """Return the table of a scenario table's keys."""
    return HEADER + "".join(map(_row, TABLES[table]()))


def _row(key: Key) -> str:
    return f"| `{key.name}` | {escaped(key.value)} | {key.default} | {escaped(key.meaning.rstrip('.'))} |\n"
