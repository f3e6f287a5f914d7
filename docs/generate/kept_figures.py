"""The kept figures of papers' tables on the pages of docs/papers.

`<!-- figures: SHEET ...; OPTION ... -->` is followed by a table with a row for each setting and a column for each attack.
Options, separated by semicolons, choose what it shows:

- `metrics psnr, mse`, `attacks dager, exact`, `cells images*`: only these (cells by a pattern);
- `rows attack`: a row for each attack, a column for each setting;
- `rows both`: a row for each setting and attack, a column for each metric;
- `split`: the part of a setting's name after its last comma becomes a column;
- `seconds`: what an example took on one core.

`<!-- computed: SHEET ... -->` is followed by when, where and with what each was computed.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd

Row = Mapping[str, Any]

PAPERS = Path(__file__).parents[2] / "simulations" / "papers"
MARKED = re.compile(r"<!-- (figures|computed): ([^>]+) -->\n.*?<!-- end -->", re.DOTALL)
CELLS: Mapping[str, str] = {
    "alone": "the target's update only",
    "class, alone": "class, isolated images only",
    "feature, alone": "feature, isolated images only",
    "input beside the features B=8, distinct labels": "input next to the features B=8, distinct labels",
}


def table(sheets: Sequence[str], options: Mapping[str, str]) -> str:
    """Return a Markdown table of the chosen rows of these sheets, below a line with what holds for all of it."""
    rows = pd.DataFrame([row for name in sheets for row in _kept(name)["rows"] if _chosen(row, options)], dtype=object)
    attack, by = rows.attack.map(_attack), options.get("rows", "cell")
    cell, last = rows.cell.replace(CELLS).str.replace("|", r"\|"), ""
    if "split" in options:
        cell, last = (cell.str.rpartition(", ")[part] for part in (0, 2))
    line = {"cell": cell, "attack": attack, "both": cell + ", " + attack}[by]
    parts = pd.DataFrame(
        {"cell": cell if by == "attack" else last, "attack": attack if by == "cell" else "", "metric": rows.metric}
    )
    varying = [name for name in parts if parts[name].nunique() > 1]
    column = parts[varying].agg(", ".join, axis=1) if varying else pd.Series("here", rows.index)

    about = [", ".join(parts.iloc[0][name] for name in parts if name not in varying and parts.iloc[0][name])]
    shown = ["(95 % interval)"] * bool(rows.low.notna().any()) + ["[reference]"] * bool(rows.reference.notna().any())
    about += [" ".join(["figure", *shown])] if shown else []
    iterations = rows.budget.map(_iterations)
    if by == "cell" and len({*iterations}) > 1:
        iterations = iterations.where(iterations == "", attack + " " + iterations)
    texts = {"accuracy": rows.note.map(_accuracy), "n": rows.n.map(str), "iterations": iterations}
    texts["baseline"] = rows.floor.map(_number)
    if "seconds" in options:
        texts["seconds each"] = (rows.seconds / rows.n).map(lambda each: _number(float(f"{each:.2g}")))
    conditions = pd.DataFrame(texts).groupby(line, sort=False).agg(_joined)
    shared = [head for head in conditions if conditions[head].nunique() == 1]
    about += [f"{head} {conditions[head].iloc[0]}" for head in shared if conditions[head].iloc[0]]
    figures = rows.apply(_figure, axis=1).groupby([line, column]).agg(_joined).unstack(fill_value="")
    body = figures.reindex(line.unique())[column.unique()].join(conditions.drop(columns=shared))
    cells = [["attack" if by == "attack" else "setting", *body.columns], *body.reset_index().to_numpy().tolist()]
    head, *rest = (f"| {' | '.join(line)} |" for line in cells)
    grid = "\n".join([head, "|---" * len(cells[0]) + "|", *rest])
    return f"\n{'; '.join(filter(None, about))}.\n\n{grid}\n"


def computed(sheets: Sequence[str], options: Mapping[str, str]) -> str:
    """Return a line for each file: its version, seed, date, machine, torch, commit and duration."""
    lines = []
    for kept in map(_kept, sheets):
        made = kept["environment"]
        lines.append(
            f"- `{kept['name']}`, version {kept['version']}, seed {kept['seed']}: {kept['date']}, {made['cores']} x "
            f"{made['processor']}, torch {made['packages']['torch']}, commit {made['commit'][:8]}; "
            f"{kept['seconds'] / 60:.0f} minutes."
        )
    return "\n".join(lines)


def fill(page: str) -> str:
    """Return a page with the text of each mark written anew."""

    def filled(mark: re.Match[str]) -> str:
        sheets, *options = (part.strip() for part in mark[2].split(";"))
        chosen = dict(option.partition(" ")[::2] for option in options)
        text = {"figures": table, "computed": computed}[mark[1]](sheets.split(), chosen)
        return f"<!-- {mark[1]}: {mark[2]} -->\n{text}\n<!-- end -->"

    return MARKED.sub(filled, page)


def _kept(name: str) -> Row:
    kept: Row = json.loads(next(PAPERS.glob(f"*/results/{name}.json")).read_text())
    return kept


def _chosen(row: Row, options: Mapping[str, str]) -> bool:
    names = {key: options[key].split(", ") for key in ("metrics", "attacks") if key in options}
    return (
        row["metric"] in names.get("metrics", [row["metric"]])
        and row["attack"] in names.get("attacks", [row["attack"]])
        and any(fnmatchcase(row["cell"], pattern) for pattern in options.get("cells", "*").split(" | "))
    )


def _attack(name: str) -> str:
    name = "no pseudo-images" if name == "alone" else name
    return f"`{name}`" if re.fullmatch(r"[a-z][\w-]*", name) else name


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, texts)))


def _figure(row: Row) -> str:
    """Return a figure with its interval, its reference and the attacks that failed."""
    text = _number(row["here"])
    if row["low"] is not None:
        joint = " to " if row["low"] < 0 else "\N{EN DASH}"
        text += f" ({_number(row['low'])}{joint}{_number(row['high'])})"
    if row["reference"] is not None:
        spread = f" ± {row['spread']:g}" if row["spread"] is not None else ""
        text += f" [{_number(row['reference'])}{spread}]"
    failed = re.match(r"(\d+ of \d+) attacks failed", row["note"])
    return f"{text}; {failed[1]} failed" if failed else text


def _accuracy(note: str) -> str:
    """Return the accuracy of the attacked network that was trained for the table."""
    found = re.search(r"(\d+) ?%", note)
    return f"{found[1]} %" if found and "failed" not in note else ""


def _iterations(budget: str) -> str:
    found = re.search(r"iterations (?!1(,|$))(.*)", budget)  # an attack of one iteration is no search
    return found[2] if found else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{0 if abs(value) < 1e-9 else value:.4g}"
