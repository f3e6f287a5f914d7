"""`python -m docs.generate`: write the tables in docs/ and the schema again, from code and kept figures (`make docs`)."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from os.path import commonprefix
from pathlib import Path

from docs.generate import kept_figures
from docs.generate.arguments import listed_arguments
from docs.generate.scenario_keys import TABLES
from docs.generate.schema import scenario_schema
from fedgauge.simulations.cli.components import components_of
from fedgauge.simulations.experiments.sweep_file import Sweep
from fedgauge.simulations.experiments.sweep_rows import SweepRow, summary_as_markdown

DOCS = Path(__file__).parents[1]
SIMULATIONS = DOCS.parent / "simulations"


def escaped(text: str) -> str:
    """Escape text for a table's cell; code between backticks stays code."""
    parts = re.split(r"(`[^`]*`)", text)
    # an underscore within a word is no markup
    return "".join(
        part.replace("|", r"\|") if part.startswith("`") else re.sub(r"([\\|<*\[]|(?<!\w)_|_(?!\w))", r"\\\1", part)
        for part in parts
    )


def components(kind: str) -> str:
    """Return the table of fedgauge's own components of a kind, below the arguments that all of them take first."""
    ours = [found for found in components_of(kind) if found.package == "fedgauge"]
    every = [(found, listed_arguments(found.target)) for found in ours if found.target]
    shared = commonprefix([f"{listed}, " for _, listed in every]).rpartition(", ")[0] if len(every) > 1 else ""
    rows = f"Each takes `{shared}`.\n\n" if shared else ""
    rows += "| name | arguments | what it is |\n|---|---|---|\n"
    for found, listed in every:
        own = listed.removeprefix(shared).removeprefix(", ")
        arguments = escaped(f"`{own}`") if own else ""
        rows += f"| `{found.name}` | {arguments} | {escaped(found.description)} |\n"
    return rows


def keys(table: str) -> str:
    rows = (
        f"| `{key.name}` | {escaped(re.sub('^an? ', '', key.value))} | {key.default} | {escaped(key.meaning.rstrip('.'))} |\n"
        for key in TABLES[table]()
    )
    return "| key | value | default | meaning |\n|---|---|---|---|\n" + "".join(rows)


def sweep(name: str) -> str:
    """Return the kept rows of a sweep with a line for each defense."""
    kept = json.loads((SIMULATIONS / "results" / name / "sweep.json").read_text())
    defenses = Sweep.load(SIMULATIONS / f"{name}.toml").defenses
    return summary_as_markdown([SweepRow(**row) for row in kept["rows"]], defenses)


BLOCKS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "components.md": ("components", components),
    "scenario-keys.md": ("keys", keys),
    "defenses.md": ("sweep", sweep),
}


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with generated blocks, and the schema, with today's text."""
    for name, (kind, block) in BLOCKS.items():
        text = (DOCS / name).read_text()
        for mark in re.finditer(rf"(<!-- generated: {kind} ([\w.]+) -->)\n.*?(?=<!-- end -->)", text, re.DOTALL):
            text = text.replace(mark[0], f"{mark[1]}\n{block(mark[2])}")
        yield DOCS / name, text
    for page in sorted(DOCS.glob("papers/[a-z]*.md")):
        yield page, kept_figures.fill(page.read_text())
    yield SIMULATIONS / "scenario.schema.json", json.dumps(scenario_schema()) + "\n"


if __name__ == "__main__":
    for page, text in pages():
        page.write_text(text)
