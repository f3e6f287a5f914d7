"""`python -m docs.generate`: write the tables in docs/ again, from the code and the kept figures (`make docs`)."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from docs.generate import kept_figures, keys, signatures
from docs.generate.markdown import escaped, fill_blocks
from fedgauge.simulations.cli.components import components_of
from fedgauge.simulations.experiments.sweep_file import Sweep
from fedgauge.simulations.experiments.sweep_rows import SweepRow, markdown, summary

DOCS = Path(__file__).parents[1]
SIMULATIONS = DOCS.parent / "simulations"


def components(kind: str) -> str:
    """Return the table of fedgauge's own components of a kind."""
    rows = ""
    for found in components_of(kind, own_only=True):
        arguments = escaped(f"`{found.arguments}`") if found.arguments else ""
        rows += f"| `{found.name}` | {arguments} | {escaped(found.description)} |\n"
    return f"| name | arguments | what it is |\n|---|---|---|\n{rows}"


def sweep(name: str) -> str:
    """Return the kept rows of a sweep with a line for each defense."""
    rows = json.loads((SIMULATIONS / "results" / name / "sweep.json").read_text())
    promises = {cell.defense: cell.promise for cell in Sweep.load(SIMULATIONS / f"{name}.toml").cells}
    return markdown(summary([SweepRow(**row) for row in rows], promises))


BLOCKS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "components.md": ("components", components),
    "scenario-keys.md": ("keys", keys.block),
    "adding-components.md": ("signatures", signatures.block),
    "defenses.md": ("sweep", sweep),
}


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with generated blocks, and its text with today's blocks."""
    for name, (kind, block) in BLOCKS.items():
        yield DOCS / name, fill_blocks((DOCS / name).read_text(), kind, block)
    for page in sorted(DOCS.glob("papers/[a-z]*.md")):
        yield page, kept_figures.fill(page.read_text())


if __name__ == "__main__":
    for page, text in pages():
        page.write_text(text)
