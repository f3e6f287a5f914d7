"""The kept figures of papers' tables on the pages of docs/papers.

`<!-- figures: SHEET ...; OPTION ... -->` is followed by a table with a row for each setting and a column for each attack.
Options, separated by semicolons, choose what it shows:

- `metrics psnr, mse`, `attacks dager, exact`, `cells images*`: only these (cells by a pattern);
- `rows attack`: a row for each attack, a column for each setting; `rows both`: a row for each pair, a column for each metric;
- `split`: the part of a setting's name after its last comma becomes a column.

`<!-- computed: SHEET ... -->` is followed by when, where and with what each was computed.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PAPERS = Path(__file__).parents[2] / "simulations" / "papers"
MARKED = re.compile(r"<!-- (figures|computed): ([^>]+) -->\n.*?<!-- end -->", re.DOTALL)
METRICS: Mapping[str, str] = {"told at 1 %": "TPR at 1 % FPR", "area": "AUC"}  # of the kept files, as a page shows them
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
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row_of(row), []).append(row)

    about = [", ".join(fixed)] if fixed else []
    low = "95 % interval" if any(row["low"] is not None for row in rows) else ""
    reference = "[reference]" if any(row["reference"] is not None for row in rows) else ""
    about += [" ".join(filter(None, ("figure", f"({low})" if low else "", reference)))] if low or reference else []
    heads = ["setting" if options.get("rows") != "attack" else "attack"]
    heads += [", ".join(column[i] for i in varying) or "here" for column in columns]
    extra: list[dict[str, str]] = []
    for head, text in (("n", _n), ("iterations", _iterations), ("baseline", _baseline)):
        texts = {key: _joined(map(text, line)) for key, line in lines.items()}
        by_attack = {_attack(row): _joined(text(r) for r in rows if r["attack"] == row["attack"]) for row in rows}
        if len(set(texts.values())) == 1:  # the same in every line, or by attack
            only = {attack: value for attack, value in by_attack.items() if value}
            same = len(set(only.values())) == 1 and (head == "baseline" or len(only) == len(by_attack))
            about += [f"{head} {next(iter(only.values()))}"] if only and same else []
            about += (
                [f"{head}: {', '.join(f'{attack} {value}' for attack, value in only.items())}"]
                if only and not same
                else []
            )
        else:
            heads.append(head)
            extra.append(texts)
    body = []
    for label, line in lines.items():
        cells = {column_of(row): _figure(row) for row in line}
        body.append([label + _training(line), *(cells.get(c, "") for c in columns), *(texts[label] for texts in extra)])
    head, *rest = [f"| {' | '.join(line)} |" for line in (heads, *body)]
    grid = "\n".join([head, "|---" * len(heads) + "|", *rest])
    return f"\n{'; '.join(about)}:\n\n{grid}\n"


def computed(sheets: Sequence[str], options: Mapping[str, str]) -> str:
    """Return a line for each file: its version, seed, date, machine, torch, commit and duration."""
    return "\n".join(f"- {_computed(_kept(name))}" for name in sheets)


def fill(page: str) -> str:
    """Return a page with the text of each mark written anew."""

    def filled(mark: re.Match[str]) -> str:
        sheets, *options = (part.strip() for part in mark[2].split(";"))
        chosen = dict(option.partition(" ")[::2] for option in options)
        text = {"figures": table, "computed": computed}[mark[1]](sheets.split(), chosen)
        return f"<!-- {mark[1]}: {mark[2]} -->\n{text}\n<!-- end -->"

    return MARKED.sub(filled, page)


def _kept(name: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(next(PAPERS.glob(f"*/results/{name}.json")).read_text())
    return kept


def _computed(kept: dict[str, Any]) -> str:
    made = kept["environment"]
    return (
        f"`{kept['name']}`, version {kept['version']}, seed {kept['seed']}: {kept['date']}, {made['cores']} x {made['processor']}, "
        f"torch {made['packages']['torch']}, commit {made['commit'][:8]}; {kept['seconds'] / 60:.0f} minutes"
    )


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
        return cell, "" if rows in ("attack", "both") else _attack(row), METRICS.get(row["metric"], row["metric"])

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
    """Return the accuracy of the attacked network, if it was trained for the table."""
    accuracies = (re.search(r"(\d+) ?%|$", row["note"] if "failed" not in row["note"] else "")[1] for row in line)  # type: ignore[index]  # `$` always fits
    return "".join(f" ({accuracy} % accuracy)" for accuracy in dict.fromkeys(filter(None, accuracies)))


def _n(row: Row) -> str:
    return str(row["n"])


def _iterations(row: Row) -> str:
    found = re.search(r"iterations (?!1(,|$))(.*)", row["budget"])  # an attack of one iteration is no search
    return found[2] if found else ""


def _baseline(row: Row) -> str:
    return _number(row["floor"]) if row["floor"] is not None else ""


def _number(value: float) -> str:
    return f"{0 if abs(value) < 1e-9 else value:.4g}"
