"""Rows and summaries of a sweep."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedgauge.simulations.experiments.results import ResultsFile
from fedgauge.simulations.experiments.sweep_file import Sweep
from fedgauge.simulations.experiments.sweep_rows import SweepRow, summary_as_markdown, write_tables


def row(defense: str, attack: str, seed: int, **values: Any) -> SweepRow:
    numbers = {"accuracy": 0.8, "mean": 20.0, "low": 18.0, "high": 22.0, "best": 25.0, "baseline": 11.0, "n": 4}
    return SweepRow(defense, attack, seed, **{**numbers, **values})


def lines_of(found: list[SweepRow], defenses: Sequence[str] = ()) -> list[str]:
    return summary_as_markdown(found, defenses).splitlines()[2:]


def test_of_several_seeds_only_the_largest_epsilon_holds_for_all() -> None:
    (line,) = lines_of([row("a", "b", 0, epsilon=1.0), row("a", "b", 1, epsilon=3.0)])
    assert line.split(" | ")[-3] == "3"


def test_a_name_with_a_bar_is_one_cell_of_the_table() -> None:
    (line,) = lines_of([row("clip|noise", "b", 0)])
    assert line.startswith("| clip\\|noise | ")


def test_an_exact_hit_is_inf_in_csv_and_null_in_json_which_says_so(tmp_path: Path) -> None:
    found = [row("none", "a", 0, best=math.inf, exact=True), row("none", "b", 0, best=None)]
    write_tables(tmp_path, found, Sweep("none", ()))
    ResultsFile(tmp_path / "sweep.json", SweepRow, {"computed": {}}).write(found)
    hit, missing = json.loads((tmp_path / "sweep.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert (hit["best"], hit["exact"]) == (None, True) and (missing["best"], missing["exact"]) == (None, False)
    with (tmp_path / "sweep.csv").open() as file:
        assert [line["best"] for line in csv.DictReader(file)] == ["inf", ""]


def test_the_summary_names_the_strongest_attack_and_the_cost_next_to_the_first_defense() -> None:
    found = [
        row("none", "a", 0),
        row("none", "b", 0, mean=21.0, low=19.5, high=22.5),
        row("blend", "a", 0, accuracy=0.5, mean=12.0, limit=24.0, bound=27.0, gap=2.5),
        row("blend", "b", 0, accuracy=0.5, mean=11.5, augmented=30.0, limit=24.0, bound=27.0, gap=1.5, epsilon=5.551),
        row("hopeless", "a", 0, accuracy=None, mean=None, reason="diverged"),
    ]
    assert lines_of(found, ["none", "blend", "hopeless"]) == [
        "| none | `b` | 21.0 (19.5 to 22.5) | 11.0 | – | – | – | not tested | – | 80 % | 0 |",
        "| blend | `a` | 12.0 (18.0 to 22.0); 30.0 to what was trained on, by `b` | 11.0 | 24.0 | 27.0 | 1.5 | not tested "
        "| 5.55 | 50 % | 30 |",
        "| hopeless | none gave a number | – | 11.0 | – | – | – | not tested | – | – | – |",
    ]


def test_before_the_first_defense_has_ended_no_cost_is_reported() -> None:
    (line,) = lines_of([row("blend", "a", 0)], ["none", "blend"])
    assert line.endswith("| 80 % | – |")


def test_over_several_seeds_the_summary_takes_means_and_their_range() -> None:
    found = [row("none", "a", 0), row("none", "a", 1, mean=22.0, accuracy=0.7), row("none", "b", 0, mean=20.9)]
    assert lines_of(found)[0] == "| none | `a` | 21.0 (seeds 20.0 to 22.0) | 11.0 | – | not tested | – | 75 % | 0 |"


def test_what_a_seeds_rows_share_counts_once_however_many_rows_it_has() -> None:
    """Three rows of the first seed, of two trainings, and one of the second."""
    two = (("a", 0.9, 10.0), ("b", 0.7, 12.0), ("c", 0.7, 12.0))
    first = [row("none", a, 0, accuracy=x, baseline=b) for a, x, b in two]
    (line,) = lines_of([*first, row("none", "b", 1, accuracy=0.6, baseline=12.0)])
    assert "| 11.5 |" in line and "| 70 % |" in line


def test_membership_is_next_to_the_strongest_attack_and_is_never_it() -> None:
    of_members = {"metric": "membership", "baseline": 0.5, "low": None, "high": None}
    found = [
        row("none", "a", 0),
        row("none", "ratio", 0, mean=0.98, detected=0.75, **of_members),
        row("none", "filter", 0, mean=0.9, detected=0.8, **of_members),
        row("noise", "a", 0),
        row("noise", "ratio", 0, **{**of_members, "mean": None, "reason": "few strangers"}),
    ]
    assert lines_of(found) == [
        "| none | `a` | 20.0 (18.0 to 22.0) | 11.0 | – | 0.98; 75 % detected | – | 80 % | 0 |",
        "| noise | `a` | 20.0 (18.0 to 22.0) | 11.0 | – | no test gave a number | – | 80 % | 0 |",
    ]
