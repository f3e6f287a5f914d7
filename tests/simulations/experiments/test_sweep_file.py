"""A sweep file is checked as a whole, and every mistake is reported with its place."""

import os
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.experiments import sweep_file
from fedgauge.simulations.experiments.sweep_file import Sweep
from tests.simulations.experiments.small_sweeps import IG, SGD, TABLES, changed, write


def test_a_pipe_is_no_sweep_and_nothing_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(SpecError, match="pipe.toml"):
        Sweep.load(tmp_path / "pipe.toml")


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
    ("changes", "message"),
    [
        ({"cells": 3}, "unknown key 'cells' (a sweep has: scenario, seeds, defense, attack)"),
        ({"seeds": []}, "at least one [[defense]], one [[attack]] and one seed"),
        ({"seeds": [0.5]}, "seeds[0] must be a whole number, got 0.5"),
        ({"defense": []}, "at least one [[defense]], one [[attack]] and one seed"),
        ({"scenario": {**TABLES["scenario"], "chain": [SGD]}}, "[scenario]: chain is what the sweep varies"),
        (changed("defense", 0, name=3), "[[defense]] #1: name must be a text, got 3"),
        (changed("defense", 0, chian=[]), "[[defense]] #1 (none): unknown key 'chian' (it has: name, chain, promise, data, model"),
        (changed("defense", 0, chain=[]), "[[defense]] #1 needs 'chain'"),
        (changed("defense", 0, name=""), "[[defense]] #1 needs 'name'"),
        (changed("defense", 0, chain=[{"use": "sign"}]), "(none): [[chain]]: a chain needs exactly one local"),
        ({"defense": {"name": "none"}}, "write [[defense]] instead of [defense]"),
        ({"seeds": [0, 0]}, "seeds must differ, got [0, 0]"),
        ({"attack": []}, "at least one [[defense]], one [[attack]] and one seed"),
        (changed("attack", 1, defenses=[]), "[[attack]] #2: defenses is empty"),
        ({"chain": [SGD]}, "this looks like a scenario"),
        (changed("defense", 0, model={"width": 2}), "[[defense]] #1 (none): [model]: mlp() has no argument 'width'"),
        (changed("defense", 1, name="none"), "two runs would be called 'none-seed0'"),
        (changed("attack", 1, defenses=["nothing"]), "[[attack]] #2: unknown defense 'nothing' (there are: none, sign"),
        (changed("attack", 0, iterations=0), "[[defense]] #1 (none): [[attack]] #1: iterations must be at least 1"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_place_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, **changes)
    assert main(["sweep", str(path), "-o", str(tmp_path / "out")]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith(f"fedgauge: {path}: ") and message in reported
    assert not (tmp_path / "out").exists()


def test_no_file_no_table_no_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(tmp_path / "none.toml")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    (tmp_path / "broken.toml").write_text("seeds = [")
    assert main(["sweep", str(tmp_path / "broken.toml")]) == 2
    assert "not a readable TOML file" in capsys.readouterr().err
    assert main(["sweep", str(tmp_path)]) == 2
    assert "is a folder; name a sweep file" in capsys.readouterr().err
    assert main(["sweep", str(write(tmp_path)), "-o", str(tmp_path / "broken.toml")]) == 2
    assert "broken.toml is a file, but --output needs a folder" in capsys.readouterr().err
    assert main(["sweep", str(write(tmp_path)), "--parallel", "0"]) == 2
    assert "--parallel must be at least 1, got 0" in capsys.readouterr().err


def test_a_promise_is_text() -> None:
    tables = {**TABLES, **changed("defense", 0, promise=3)}
    with pytest.raises(SpecError, match="promise must be a text, got 3"):
        sweep_file._cells(tables)
