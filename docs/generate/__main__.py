"""`python -m docs.generate`: write the tables in docs/ again, from the code and the kept figures (`make docs`)."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from docs.generate import components, kept_figures, keys, ledger, options, signatures, sweeps
from docs.generate.markdown import fill_blocks

DOCS = Path(__file__).parents[1]
BLOCKS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "components.md": ("components", components.block),
    "scenario-keys.md": ("keys", keys.block),
    "adding-components.md": ("signatures", signatures.block),
    "reference/command-options.md": ("options", options.block),
    "reference/ledger.md": ("ledger", ledger.block),
    "defenses.md": ("sweep", sweeps.block),
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
