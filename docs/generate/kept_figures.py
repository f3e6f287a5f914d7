"""The kept figures of papers' tables on the pages of docs/papers.

`<!-- figures: SHEET ... -->` is followed by a table, `<!-- computed: SHEET ... -->` by when, where and with what each was computed.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedgauge.simulations.experiments.measures import ComparedFigure
from fedgauge.simulations.experiments.paper_table_files import PAPERS
from fedgauge.simulations.experiments.results import figures_table, markdown

MARKED = re.compile(r"<!-- (figures|computed): ([\w ]+) -->\n.*?<!-- end -->", re.DOTALL)
VERSIONS = ("fedgauge", "torch", "transformers")  # that a page names; the kept file has all


def table(names: Sequence[str]) -> str:
    """A Markdown table of all rows that were kept under these names."""
    rows = [ComparedFigure(**row) for name in names for row in _kept(name)["rows"]]
    shown = [replace(row, cell=row.cell.replace("|", "\\|"), attack=f"`{row.attack}`") for row in rows]
    return markdown(figures_table(shown)).rstrip()


def computed(names: Sequence[str]) -> str:
    """A line for each file: its version, seed, date, machine, versions and duration."""
    return "\n".join(f"- {_computed(_kept(name))}" for name in names)


def _computed(kept: dict[str, Any]) -> str:
    made = kept["environment"]
    versions = ", ".join(f"{name} {made['packages'][name]}" for name in VERSIONS)
    return (
        f"`{kept['name']}`, version {kept['version']}, seed {kept['seed']}: {kept['date']}, {made['cores']} x {made['processor']}, "
        f"Python {made['python']}, {versions}, commit {made['commit'][:8]}; {kept['seconds'] / 60:.0f} minutes"
    )


def _kept(name: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(next(PAPERS.glob(f"*/results/{name}.json")).read_text())
    return kept


def fill(page: str) -> str:
    """A page with what belongs to each mark written anew."""
    written = {"figures": table, "computed": computed}
    return MARKED.sub(
        lambda mark: f"<!-- {mark[1]}: {mark[2]} -->\n{written[mark[1]](mark[2].split())}\n<!-- end -->", page
    )
