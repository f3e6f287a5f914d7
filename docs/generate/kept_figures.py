"""The kept figures of papers' tables on the pages of docs/papers.

`<!-- figures: SHEET ... -->` is followed by a table, `<!-- computed: SHEET ... -->` by when, where and with what each was computed.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAPERS = Path(__file__).parents[2] / "simulations" / "papers"
MARKED = re.compile(r"<!-- (figures|computed): ([\w ]+) -->\n.*?<!-- end -->", re.DOTALL)
VERSIONS = ("fedgauge", "torch", "transformers")  # that a page names; the kept file has all
HEADS = ("setting", "attack", "metric", "reference", "here", "95 % interval", "n", "baseline", "budget", "remarks")
OPTIONAL = ("reference", "95 % interval", "baseline", "budget", "remarks")  # left out where no row has any


def table(names: Sequence[str]) -> str:
    """A Markdown table of all rows that were kept under these names."""
    lines = [_cells(row) for name in names for row in _kept(name)["rows"]]
    shown = [
        i for i, head in enumerate(HEADS) if head not in OPTIONAL or any(line[i] not in ("", "-") for line in lines)
    ]
    rows = [HEADS, ["---"] * len(HEADS), *lines]
    return "\n".join(f"| {' | '.join(row[i] for i in shown)} |" for row in rows)


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


def _cells(row: dict[str, object]) -> list[str]:
    spread = f" ± {row['spread']:g}" if row["spread"] is not None else ""
    interval = "-" if row["low"] is None else f"{_number(row['low'])} to {_number(row['high'])}"
    setting = str(row["cell"]).replace("|", "\\|")
    figures = [_number(row["reference"]) + spread, _number(row["here"]), interval, str(row["n"]), _number(row["floor"])]
    return [setting, f"`{row['attack']}`", str(row["metric"]), *figures, str(row["budget"]), str(row["note"])]


def _number(value: object) -> str:
    return "-" if value is None else f"{value:.4g}"
