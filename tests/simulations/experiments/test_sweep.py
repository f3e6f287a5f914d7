"""A sweep: checked whole, a run for each defense and seed, every cell a number or a reason, and never twice the same work."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.attacks.grading.replay import ReplayCheck
from fedgauge.client.components import SpecError
from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.experiments import sweep as sweeping
from fedgauge.simulations.experiments.sweep import Sweep, SweepCell, SweepRow, matrix, rows, sweep, write_rows
from fedgauge.simulations.run.simulate import Interrupt

SGD = {"use": "local_sgd", "rate": 0.1}
IG = {"use": "inverting_gradients", "iterations": 5}
TABLES: dict[str, Any] = {
    "seeds": [0, 1],
    "scenario": {
        "rounds": 2,
        "clients": 2,
        "data": {"use": "mnist5k", "auxiliary": 64},
        "model": {"use": "mlp", "hidden": [8]},
    },
    "defense": [
        {"name": "none", "chain": [SGD]},
        {"name": "sign, batch of 2", "chain": [SGD, {"use": "sign"}], "data": {"batch_size": 2}},
    ],
    "attack": [IG, {"use": "analytic", "defenses": ["none"]}],
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps(TABLES | changes))
    return path


def changed(table: str, place: int, **values: Any) -> dict[str, Any]:
    """The sweep's tables, with one entry of a list changed."""
    entries = list(TABLES[table])
    entries[place] = {**entries[place], **values}
    return {table: entries}


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
        ({"defense": {"name": "none"}}, "[defense] is a list of tables: write [[defense]]"),
        ({"seeds": [0, 0]}, "seeds: each once, got [0, 0]"),
        ({"attack": []}, "at least one [[defense]], one [[attack]] and one seed"),
        (changed("attack", 1, defenses=[]), "[[attack]] #2: defenses names none"),
        ({"chain": [SGD]}, "this looks like a scenario: fedgauge run"),
        (changed("defense", 0, model={"width": 2}), "[[defense]] #1 (none): [model]: mlp() has no argument 'width'"),
        (changed("defense", 1, name="none"), "two cells would be called 'none-seed0'"),
        (changed("attack", 1, defenses=["nothing"]), "[[attack]] #2: defenses names 'nothing'; there are: none, sign"),
        (changed("attack", 0, iterations=0), "[[defense]] #1 (none): [[attack]] #1: iterations must be at least 1"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_place_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, **changes)
    assert main(["sweep", str(path), "-o", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"fedgauge: {path}: ") and message in told
    assert not (tmp_path / "out").exists()


def test_no_file_no_table_no_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(tmp_path / "none.toml")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    (tmp_path / "broken.toml").write_text("seeds = [")
    assert main(["sweep", str(tmp_path / "broken.toml")]) == 2
    assert "not a readable TOML file" in capsys.readouterr().err
    assert main(["sweep", str(tmp_path)]) == 2
    assert "is a folder: name a sweep's file" in capsys.readouterr().err
    assert main(["sweep", str(write(tmp_path)), "-o", str(tmp_path / "broken.toml")]) == 2
    assert "broken.toml is a file: --output names the folder" in capsys.readouterr().err
    assert main(["sweep", str(write(tmp_path)), "--parallel", "0"]) == 2
    assert "--parallel must be at least 1, got 0" in capsys.readouterr().err


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cells work in this process, one after the other, which saves each an interpreter; gives the cells that worked."""
    from fedgauge.simulations.experiments import sweep_worker

    worked: list[str] = []

    class Work:
        """As a cell's process: it has ended as soon as it is there."""

        def __init__(self, cell: SweepCell, run: Run) -> None:
            self.cell, self.run = cell, run
            worked.append(cell.folder)
            sweep_worker.work(run)
            self.child = self
            self.returncode = 0

        def poll(self) -> int:
            return 0

        def close(self) -> None: ...

    monkeypatch.setattr(sweeping, "_CellProcess", Work)
    return worked


def numbers(found: list[SweepRow]) -> list[tuple[Any, ...]]:
    return [(r.run, r.attack, r.accuracy, r.mean, r.best, r.baseline, r.n, r.failed, r.reason) for r in found]


def test_an_interrupted_sweep_goes_on_and_ends_as_one_that_was_not(tmp_path: Path, in_this_process: list[str]) -> None:
    found = Sweep.load(write(tmp_path))
    interrupt = Interrupt()

    def stop_after_two(words: str) -> None:
        interrupt.asked = words.startswith("2 of 4")

    early = sweep(found, tmp_path / "a", 1, interrupt, stop_after_two)
    assert in_this_process == ["none-seed0", "none-seed1"]
    assert {r.run for r in early} == {"none-seed0", "none-seed1"}
    told: list[str] = []
    late = sweep(found, tmp_path / "a", 1, Interrupt(), told.append)
    assert in_this_process[2:] == ["sign-batch-of-2-seed0", "sign-batch-of-2-seed1"]
    assert told[0] == "2 of 4 cells were done before"
    whole = sweep(found, tmp_path / "b", 1, Interrupt(), told.append)
    assert numbers(late) == numbers(whole)
    assert numbers(late[:4]) == numbers(early), "rows that were there stay as they were"
    assert sweep(found, tmp_path / "b", 1, Interrupt(), told.append) == whole
    assert len(in_this_process) == 8, "a complete sweep does nothing"


def test_every_cell_has_a_number_or_a_reason_and_the_files_say_the_same(
    tmp_path: Path, in_this_process: list[str]
) -> None:
    attacks = [IG, {"use": "analytic"}]
    found = Sweep.load(write(tmp_path, seeds=[0], attack=attacks))
    result = sweep(found, tmp_path / "out", 1, Interrupt(), lambda words: None)
    by_cell = {(r.defense, r.attack): r for r in result}
    assert len(by_cell) == 4
    exact = by_cell["none", "analytic"]
    assert exact.n == 4 and exact.mean == 60.0 and exact.reason == "", "exact hits count with the cap"
    refused = by_cell["sign, batch of 2", "analytic"]
    assert refused.mean is None and refused.n == 0 and refused.failed == 8
    assert "one example an update is exact; this one sums 2 (4 x)" in refused.reason
    for row in result:
        assert row.mean is not None or row.reason
        assert row.accuracy is not None and 0 < row.accuracy < 1
        assert row.baseline is not None and 5 < row.baseline < 25
    with (tmp_path / "out" / "sweep.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [(r["defense"], r["attack"], r["mean"]) for r in read] == [
        (r.defense, r.attack, "" if r.mean is None else str(r.mean)) for r in result
    ]
    assert [SweepRow(**r) for r in json.loads((tmp_path / "out" / "sweep.json").read_text())] == result
    lines = (tmp_path / "out" / "sweep.md").read_text().splitlines()[2:]
    assert [line.split(" | ")[2] for line in lines] == ["`analytic`", "`inverting_gradients`"], "the strongest of each"
    shown = matrix(result)
    assert [column.header for column in shown.columns][:4] == ["defense", "accuracy", "inverting_gradients", "analytic"]


def test_a_defense_under_which_nothing_arrives_is_a_row_with_its_reason(
    tmp_path: Path, in_this_process: list[str]
) -> None:
    explodes = {"name": "explodes", "chain": [{**SGD, "rate": 1e30, "steps": 3}]}
    found = Sweep.load(write(tmp_path, seeds=[0], attack=[IG], defense=[explodes]))
    (row,) = sweep(found, tmp_path / "out", 1, Interrupt(), lambda words: None)
    assert row.mean is None and "no update was accepted" in row.reason and "not finite" in row.reason
    assert sweep(found, tmp_path / "out", 1, Interrupt(), lambda words: None) == [row], "and it is done with"
    assert in_this_process == ["explodes-seed0"]


def test_a_mismatch_is_told_in_the_row(
    tmp_path: Path, in_this_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ReplayCheck(1, 0, 0.5, 1.0, "the data order differs")
    monkeypatch.setattr("fedgauge.server.pool.service.replay", lambda federation, seen: other)
    found = Sweep.load(write(tmp_path, seeds=[0], attack=[IG], defense=TABLES["defense"][:1]))
    (row,) = sweep(found, tmp_path / "out", 1, Interrupt(), lambda words: None)
    assert row.mean is None and "not attacked, as the replay check fails" in row.reason
    assert "the data order differs" in row.reason


def test_a_folder_with_anything_else_in_it_is_left_alone(tmp_path: Path, in_this_process: list[str]) -> None:
    (tmp_path / "out" / "none-seed0").mkdir(parents=True)
    with pytest.raises(SpecError, match=r"out is not empty and no sweep's: name another folder"):
        sweep(Sweep.load(write(tmp_path)), tmp_path / "out", 1, Interrupt(), lambda words: None)
    assert (tmp_path / "out" / "none-seed0").is_dir()


def test_of_several_seeds_only_the_largest_epsilon_holds_for_all() -> None:
    row = SweepRow("a", "b", 0, 0.5, 20.0, None, None, None, None, None, None, 1.0, 1, 0, "", "r")
    shown = matrix([row, replace(row, seed=1, epsilon=3.0)])
    assert list(shown.columns[-1].cells) == ["3"]


def test_a_folder_of_another_sweep_is_left_alone(tmp_path: Path, in_this_process: list[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sweep.toml").write_text("another")
    with pytest.raises(SpecError, match=r"holds a sweep of another file .* --output, or remove it"):
        sweep(Sweep.load(write(tmp_path)), tmp_path / "out", 1, Interrupt(), lambda words: None)
    assert (tmp_path / "out" / "sweep.toml").read_text() == "another" and in_this_process == []


def test_a_training_that_was_cut_off_begins_again(tmp_path: Path, in_this_process: list[str]) -> None:
    found = Sweep.load(write(tmp_path, seeds=[0], attack=[IG]))
    whole = sweep(found, tmp_path / "out", 1, Interrupt(), lambda words: None)
    with Run(tmp_path / "out" / "none-seed0").ledger() as ledger:
        ledger.set_meta(state="training")
    (tmp_path / "out" / "sign-batch-of-2-seed0" / "ledger.sqlite").unlink()
    assert rows(found, tmp_path / "out") == [], "what has not ended has no row"
    assert numbers(sweep(found, tmp_path / "out", 1, Interrupt(), lambda words: None)) == numbers(whole)
    assert len(in_this_process) == 4


@pytest.mark.slow
def test_a_cell_whose_process_fails_has_its_reason_and_the_others_their_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes: one whose data is gone by the time it begins."""
    prepared: Callable[[SweepCell, Path], Run] = sweeping._prepared

    def spoilt(cell: SweepCell, folder: Path) -> Run:
        run = prepared(cell, folder)
        if cell.defense != "none":
            (run.folder / "scenario.toml").write_text("rounds = 0")
        return run

    monkeypatch.setattr(sweeping, "_prepared", spoilt)
    path = write(tmp_path, seeds=[0], attack=[IG])
    assert main(["sweep", str(path), "-o", str(tmp_path / "out")]) == 1
    told = capfd.readouterr().out
    good, bad = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert good["mean"] is not None and bad["mean"] is None
    assert "its process ended with status 1" in bad["reason"] and "the scenario needs" in bad["reason"]
    assert "sign, batch of 2, inverting_gradients, seed 0: its process ended with status 1" in told
    assert (tmp_path / "out" / "comparison.html").stat().st_size > 100_000


def test_rows_are_written_whole(tmp_path: Path) -> None:
    write_rows(tmp_path, [], Sweep("none", "", ()))
    assert (tmp_path / "sweep.csv").read_text().startswith("defense,attack,seed,accuracy,mean,")
    assert json.loads((tmp_path / "sweep.json").read_text()) == []


def row(defense: str, attack: str, seed: int, **values: Any) -> SweepRow:
    numbers = {"accuracy": 0.8, "mean": 20.0, "low": 18.0, "high": 22.0, "best": 25.0, "baseline": 11.0}
    nothing = {"augmented": None, "limit": None, "epsilon": None, "n": 4, "failed": 0, "reason": "", "run": ""}
    return SweepRow(defense=defense, attack=attack, seed=seed, **{**numbers, **nothing, **values})


def test_the_summary_names_the_strongest_attack_and_the_cost_beside_the_first_defense() -> None:
    found = [
        row("none", "a", 0),
        row("none", "b", 0, mean=21.0, low=19.5, high=22.5),
        row("blend", "a", 0, accuracy=0.5, mean=12.0),
        row("blend", "b", 0, accuracy=0.5, mean=11.5, augmented=30.0, limit=24.0, epsilon=5.551),
        row("hopeless", "a", 0, accuracy=None, mean=None, reason="diverged"),
    ]
    promises = {"none": "", "blend": "blends", "hopeless": ""}
    assert sweeping.summary(found, promises)[2:] == [
        "| none |  | `b` | 21.0 (19.5 to 22.5) | 11.0 | – | – | 80 % | 0 |",
        "| blend | blends | `b` | 11.5 (18.0 to 22.0); 30.0 to what was trained on | 11.0 | 24.0 | 5.55 | 50 % | 30 |",
        "| hopeless |  | none gave a number | – | 11.0 | – | – | – | – |",
    ]


def test_before_the_first_defense_has_ended_no_cost_is_told() -> None:
    (line,) = sweeping.summary([row("blend", "a", 0)], {"none": "", "blend": "blends"})[2:]
    assert line.endswith("| 80 % | – |")


def test_over_several_seeds_the_summary_takes_means_and_no_single_runs_interval() -> None:
    found = [row("none", "a", 0), row("none", "a", 1, mean=22.0, accuracy=0.7), row("none", "b", 0, mean=20.9)]
    assert sweeping.summary(found, {})[2] == "| none |  | `a` | 21.0 | 11.0 | – | – | 75 % | 0 |"


def test_a_promise_is_text() -> None:
    tables = {**TABLES, **changed("defense", 0, promise=3)}
    with pytest.raises(SpecError, match="promise must be a text, got 3"):
        sweeping._cells(tables)
