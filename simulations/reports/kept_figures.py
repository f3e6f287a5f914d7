"""The kept figures of papers' tables, as the pages of docs/papers show them.

`python -m fedgauge.simulations.reports.kept_figures PAGE...` writes the tables between the marks of each page:
`<!-- figures: SHEET ... -->` and `<!-- end -->`.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

PAPERS = Path(__file__).parents[1] / "papers"
MARKED = re.compile(r"<!-- figures: ([\w ]+) -->\n.*?<!-- end -->", re.DOTALL)
HEADS = ("setting", "attack", "metric", "reference", "here", "95 % interval", "n", "baseline", "budget", "remarks")
OPTIONAL = ("reference", "baseline", "remarks")  # left out where no row has any


def table(names: Sequence[str]) -> str:
    """A Markdown table of all rows that were kept under these names."""
    files = [next(PAPERS.glob(f"*/results/{name}.json")) for name in names]
    lines = [_cells(row) for file in files for row in json.loads(file.read_text())["rows"]]
    shown = [
        i for i, head in enumerate(HEADS) if head not in OPTIONAL or any(line[i] not in ("", "-") for line in lines)
    ]
    rows = [HEADS, ["---"] * len(HEADS), *lines]
    return "\n".join(f"| {' | '.join(row[i] for i in shown)} |" for row in rows)


def fill(page: str) -> str:
    """A page with the table of each mark written anew."""
    return MARKED.sub(lambda mark: f"<!-- figures: {mark[1]} -->\n{table(mark[1].split())}\n<!-- end -->", page)


def _cells(row: dict[str, object]) -> list[str]:
    spread = f" ± {row['spread']:g}" if row["spread"] is not None else ""
    interval = "-" if row["low"] is None else f"{_number(row['low'])} to {_number(row['high'])}"
    setting = str(row["cell"]).replace("|", "\\|")
    figures = [_number(row["reference"]) + spread, _number(row["here"]), interval, str(row["n"]), _number(row["floor"])]
    return [setting, f"`{row['attack']}`", str(row["metric"]), *figures, str(row["budget"]), str(row["note"])]


def _number(value: object) -> str:
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(fill(path.read_text()))
