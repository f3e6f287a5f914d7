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
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

PAPERS = Path(__file__).parents[2] / "simulations" / "papers"
MARKED = re.compile(r"<!-- (figures|computed): ([^>]+) -->\n.*?<!-- end -->", re.DOTALL)
ATTACKS: Mapping[str, str] = {"alone": "no pseudo-images"}
CELLS: Mapping[str, str] = {
    "alone": "the target's update only",
    "class, alone": "class, isolated images only",
    "feature, alone": "feature, isolated images only",
    "input beside the features B=8, distinct labels": "input next to the features B=8, distinct labels",
}


def table(sheets: Sequence[str], options: Mapping[str, str]) -> str:
    """Return a Markdown table of the chosen rows of these sheets, below a line with what holds for all of it."""
    rows = [row for name in sheets for row in _kept(name)["rows"] if _chosen(row, options)]
    row_of, column_of = _layout(options)
    columns = {column_of(row): None for row in rows}
    varying = [i for i in range(3) if len({column[i] for column in columns}) > 1]
    fixed = [part for i, part in enumerate(next(iter(columns))) if part and i not in varying]
    conditions: list[dict[str, str]] = []  # that have a column, by line
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row_of(row), []).append(row)

    about = [", ".join(fixed)] if fixed else []
    trained = {_training(line) for line in lines.values()}
    if len(trained) == 1 and len(lines) > 1:
        about += filter(None, [next(iter(trained))])
    low = "95 % interval" if any(row["low"] is not None for row in rows) else ""
    reference = "[reference]" if any(row["reference"] is not None for row in rows) else ""
    about += [" ".join(filter(None, ("figure", f"({low})" if low else "", reference)))] if low or reference else []
    heads = ["attack" if options.get("rows") == "attack" else "setting"]
    heads += [", ".join(column[i] for i in varying) or "here" for column in columns]
    texts = {"n": lambda row: str(row["n"]), "iterations": _iterations, "baseline": _baseline}
    if "seconds" in options:
        texts["seconds each"] = lambda row: _number(float(f"{row['seconds'] / row['n']:.2g}"))
    for head, text in texts.items():
        shared, by_line = _conditions(head, text, lines)
        if shared is None:
            heads.append(head)
            conditions.append(by_line)
        elif shared:
            about.append(shared)
    body = []
    for label, line in lines.items():
        cells: dict[tuple[str, str, str], list[Row]] = {}
        for row in line:
            cells.setdefault(column_of(row), []).append(row)
        found = [cells.get(column, []) for column in columns]
        figures = [_joined(map(_figure, some)) for some in found]
        accuracy = f" ({_training(line)})" if len(trained) > 1 and _training(line) else ""
        body.append([label + accuracy, *figures, *(by_line[label] for by_line in conditions)])
    head, *rest = [f"| {' | '.join(line)} |" for line in (heads, *body)]
    grid = "\n".join([head, "|---" * len(heads) + "|", *rest])
    return f"\n{'; '.join(about)}.\n\n{grid}\n"


def _conditions(
    head: str, text: Callable[[Row], str], lines: Mapping[str, list[Row]]
) -> tuple[str | None, dict[str, str]]:
    """Return a condition as one phrase for the whole table (None: lines differ), and for each line."""
    by_line = {label: _joined(map(text, line)) for label, line in lines.items()}
    if len(set(by_line.values())) > 1:
        return None, by_line
    by_attack: dict[str, str] = {}
    for row in (row for line in lines.values() for row in line):
        by_attack[_attack(row)] = _joined([by_attack.get(_attack(row), ""), text(row)])
    named = {attack: value for attack, value in by_attack.items() if value}
    if len(set(named.values())) == 1 and (head == "baseline" or len(named) == len(by_attack)):
        return f"{head} {next(iter(named.values()))}", by_line
    return f"{head}: {', '.join(f'{attack} {value}' for attack, value in named.items())}" if named else "", by_line


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


def _layout(options: Mapping[str, str]) -> tuple[Callable[[Row], str], Callable[[Row], tuple[str, str, str]]]:
    """Return the functions that give a row of the kept file its line and its column (setting, attack, metric)."""
    rows, split = options.get("rows", "cell"), "split" in options

    def line(row: Row) -> str:
        if rows == "attack":
            return _attack(row)
        cell = _cell(row["cell"].rpartition(", ")[0] if split else row["cell"])
        return f"{cell}, {_attack(row)}" if rows == "both" else cell

    def column(row: Row) -> tuple[str, str, str]:
        cell = _cell(row["cell"]) if rows == "attack" else row["cell"].rpartition(", ")[2] if split else ""
        return cell, "" if rows != "cell" else _attack(row), row["metric"]

    return line, column


def _cell(name: str) -> str:
    return CELLS.get(name, name).replace("|", "\\|")


def _attack(row: Row) -> str:
    name = ATTACKS.get(row["attack"], row["attack"])
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


def _training(line: list[Row]) -> str:
    """Return the accuracies of the attacked networks that were trained for the table."""
    notes = [row["note"] for row in line if "failed" not in row["note"]]
    accuracies = sorted({int(found[1]) for note in notes if (found := re.search(r"(\d+) ?%", note))})
    return f"{' to '.join(map(str, dict.fromkeys(accuracies[:1] + accuracies[-1:])))} % accuracy" if accuracies else ""


def _iterations(row: Row) -> str:
    found = re.search(r"iterations (?!1(,|$))(.*)", row["budget"])  # an attack of one iteration is no search
    return found[2] if found else ""


def _baseline(row: Row) -> str:
    return _number(row["floor"]) if row["floor"] is not None else ""


def _number(value: float) -> str:
    return f"{0 if abs(value) < 1e-9 else value:.4g}"
