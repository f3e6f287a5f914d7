"""A sweep file is checked as a whole, and every mistake is reported with its place."""

from pathlib import Path
from typing import Any

import pytest

from fedgauge.simulations.cli.main import main
from fedgauge.simulations.experiments.sweep_file import Sweep
from tests.simulations.experiments.small_sweeps import IG, SGD, TABLES, changed, write


def test_a_cell_is_the_shared_scenario_with_the_defenses_own_tables(tmp_path: Path) -> None:
    found = Sweep.load(write(tmp_path))
    assert [(c.defense, c.seed, c.folder) for c in found.cells] == [
        ("none", 0, "none-seed0"),
        ("none", 1, "none-seed1"),
        ("sign, batch of 2", 0, "sign-batch-of-2-seed0"),
        ("sign, batch of 2", 1, "sign-batch-of-2-seed1"),
    ]
    signed = found.cells[2].tables
    assert signed["data"] == {"use": "mnist5k", "auxiliary": 64, "batch_size": 2}
    assert signed["chain"] == TABLES["defense"][1]["chain"]
    assert [a["use"] for a in signed["attack"]] == [IG["use"]], "the analytic attack meets only none"
    assert len(found.cells[0].tables["attack"]) == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cells": 3}, "'cells'"),
        ({"clients": 4}, "[scenario]"),
        ({"axes": ["defense", "model"]}, "'axes'"),
        ({"where": [{"defenses": ["none"], "chain": [SGD]}]}, "'where'"),
        ({"data": {"use": "mnist5k"}}, "[scenario]"),
        ({"reference": {"none": {"analytic": {"psnr": 60.0}}}}, "'reference'"),
        ({"seeds": []}, "seed"),
        ({"seeds": [0.5]}, "seeds[0]"),
        ({"seeds": [0, 0]}, "seeds"),
        ({"defense": []}, "[[defense]]"),
        ({"defense": {"name": "none"}}, "[[defense]]"),
        ({"attack": []}, "[[attack]]"),
        ({"scenario": {**TABLES["scenario"], "chain": [SGD]}}, "[scenario]: chain"),
        (changed("defense", 0, name=3), "[[defense]] #1: name"),
        (changed("defense", 1, name=""), "needs a name"),
        (changed("defense", 0, name=""), "unknown defense 'none'"),
        (changed("defense", 0, chian=[]), "'chian'"),
        (changed("defense", 0, chain=[]), "[[chain]]"),
        (changed("defense", 0, chain=[{"use": "sign"}]), "[[defense]] none: [[chain]]"),
        (changed("defense", 0, model={"width": 2}), "'width'"),
        (changed("defense", 1, name="none"), "'none-seed0'"),
        (changed("attack", 1, defenses=["nothing"]), "'nothing'"),
        (changed("attack", 0, iterations=0), "iterations"),
    ],
)
def test_mistakes_are_named_with_their_place_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], named: str
) -> None:
    path = write(tmp_path, **changes)
    assert main(["sweep", str(path), "-o", str(tmp_path / "out")]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith(f"fedgauge: {path}: ") and named in reported
    assert not (tmp_path / "out").exists()


def test_no_file_no_table_no_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.toml").write_text("seeds = [")
    small = str(write(tmp_path))
    for arguments in (
        [str(tmp_path / "none.toml")],
        [str(tmp_path / "broken.toml")],
        [str(tmp_path)],
        [small, "-o", str(tmp_path / "broken.toml")],
    ):
        assert main(["sweep", *arguments]) == 2
        assert capsys.readouterr().err.startswith("fedgauge: ")
