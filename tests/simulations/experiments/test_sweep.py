"""A sweep runs each defense and seed once, gives every cell a number or a reason, and never repeats work."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.experiments import sweep as sweeping
from fedgauge.simulations.experiments.sweep import run_cells
from fedgauge.simulations.experiments.sweep_file import Sweep, SweepCell
from fedgauge.simulations.experiments.sweep_rows import SweepRow, rows
from fedgauge.simulations.run.simulate import Interrupt
from tests.simulations.experiments.small_sweeps import IG, SGD, TABLES, write


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cells work in this process, one after the other, which saves each an interpreter; gives the cells that worked."""
    from fedgauge.simulations.experiments import sweep_worker

    worked: list[str] = []

    class Work:
        """As a cell's process: it has ended as soon as it is there."""

        def __init__(self, cell: SweepCell, run: Run, place: int) -> None:
            self.cell, self.run, self.place = cell, run, place
            worked.append(cell.folder)
            sweep_worker.work(run, place)

        def status(self) -> int:
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

    early = run_cells(found, tmp_path / "a", 1, interrupt, stop_after_two)
    assert in_this_process == ["none-seed0", "none-seed1"]
    assert {r.run for r in early} == {"none-seed0", "none-seed1"}
    reported: list[str] = []
    late = run_cells(found, tmp_path / "a", 1, Interrupt(), reported.append)
    assert in_this_process[2:] == ["sign-batch-of-2-seed0", "sign-batch-of-2-seed1"]
    assert reported[0] == "2 of 4 cells were already done"
    whole = run_cells(found, tmp_path / "b", 1, Interrupt(), reported.append)
    assert numbers(late) == numbers(whole)
    assert numbers(late[:4]) == numbers(early), "rows that were there stay as they were"
    assert run_cells(found, tmp_path / "b", 1, Interrupt(), reported.append) == whole
    assert len(in_this_process) == 8, "a complete sweep does nothing"


def test_every_cell_has_a_number_or_a_reason_and_the_files_say_the_same(
    tmp_path: Path, in_this_process: list[str]
) -> None:
    attacks = [IG, {"use": "analytic"}]
    found = Sweep.load(write(tmp_path, seeds=[0], attack=attacks))
    result = run_cells(found, tmp_path / "out", 1, Interrupt(), lambda words: None)
    by_cell = {(r.defense, r.attack): r for r in result}
    assert len(by_cell) == 4
    exact = by_cell["none", "analytic"]
    assert exact.n == 4 and exact.mean == 60.0 and exact.reason == "", "exact hits count with the cap"
    refused = by_cell["sign, batch of 2", "analytic"]
    assert refused.mean is None and refused.n == 0 and refused.failed == 8
    assert "this one sums 2 (4 x)" in refused.reason
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


def test_a_row_stands_for_each_attack_that_the_run_planned(tmp_path: Path, in_this_process: list[str]) -> None:
    """What an effort adds is compared with the others on the same page, and may be the strongest."""
    scenario = {**TABLES["scenario"], "rounds": 1, "audit": {"effort": "quick"}}
    found = Sweep.load(write(tmp_path, seeds=[0], scenario=scenario, defense=TABLES["defense"][:1], attack=[IG]))
    (cell,) = found.cells
    result = run_cells(found, tmp_path / "out", 1, Interrupt(), lambda words: None)
    attacked = [row.attack for row in result]
    assert attacked[0] == "inverting_gradients" and "analytic" in attacked
    with Run(tmp_path / "out" / cell.folder).ledger() as ledger:
        assert attacked == [p.name for p in ledger.planned().values() if not p.is_baseline and not p.is_limit]
    lines = (tmp_path / "out" / "sweep.md").read_text().splitlines()
    assert lines[2].split(" | ")[2] == "`analytic`"
    failed = rows(found, tmp_path / "out", {cell.folder: "its process ended"})
    assert [row.attack for row in failed] == attacked, "a cell that failed has the same rows"


def test_a_sweep_tests_membership_beside_its_attacks(tmp_path: Path, in_this_process: list[str]) -> None:
    membership = {"use": "membership", "strangers": 120, "held": 0, "defenses": ["none"]}
    scenario = {**TABLES["scenario"], "data": {"use": "mnist5k", "auxiliary": 400}}
    path = write(
        tmp_path,
        seeds=[0],
        scenario=scenario,
        attack=[IG, membership, {**membership, "use": "membership_over_rounds", "held": 4}],
    )
    found = {r.attack: r for r in run_cells(Sweep.load(path), tmp_path / "out", 1, Interrupt(), lambda words: None)}
    told = found["membership"]
    assert told.metric == "membership" and told.mean is not None and told.mean > 0.9
    assert told.baseline is not None and 0.2 < told.baseline < 0.8
    held = found["membership_over_rounds"]
    assert held.metric == "held_membership" and held.mean is not None, held.reason
    assert told.told is None, "one label of ten is too few strangers for 1 %"
    lines = (tmp_path / "out" / "sweep.md").read_text().splitlines()
    assert "in the batch" in lines[0] and lines[3].split(" | ")[6] == "not tested"


def test_a_defense_under_which_nothing_arrives_is_a_row_with_its_reason(
    tmp_path: Path, in_this_process: list[str]
) -> None:
    explodes = {"name": "explodes", "chain": [{**SGD, "rate": 1e30, "steps": 3}]}
    found = Sweep.load(write(tmp_path, seeds=[0], attack=[IG], defense=[explodes]))
    (row,) = run_cells(found, tmp_path / "out", 1, Interrupt(), lambda words: None)
    assert row.mean is None and "no update was accepted" in row.reason and "not finite" in row.reason
    assert run_cells(found, tmp_path / "out", 1, Interrupt(), lambda words: None) == [row], "and it is done with"
    assert in_this_process == ["explodes-seed0"]


@pytest.mark.parametrize("kept", ["none-seed0/report.html", "sweep.toml"])
def test_a_folder_with_anything_else_in_it_is_left_alone(tmp_path: Path, in_this_process: list[str], kept: str) -> None:
    path = tmp_path / "out" / kept
    path.parent.mkdir(parents=True)
    path.write_text("another")
    with pytest.raises(SpecError, match="another folder"):
        run_cells(Sweep.load(write(tmp_path)), tmp_path / "out", 1, Interrupt(), lambda words: None)
    assert path.read_text() == "another" and in_this_process == []


@pytest.mark.parametrize("kind", ["folder", "ledger"])
def test_a_cell_that_is_a_link_is_refused_and_what_it_points_to_stays(
    tmp_path: Path, in_this_process: list[str], kind: str
) -> None:
    found = Sweep.load(write(tmp_path, seeds=[0]))
    outside = Run.create(tmp_path / "outside", Scenario.from_tables(found.cells[0].tables))
    with outside.ledger() as ledger:
        ledger.set_meta(state="trained")
    folder = tmp_path / "out"
    cell = folder / "none-seed0"
    folder.mkdir()
    (folder / "sweep.toml").write_text(found.text)
    if kind == "ledger":
        cell.mkdir()
        (cell / "ledger.sqlite").symlink_to(outside.folder / "ledger.sqlite")
    else:
        cell.symlink_to(outside.folder)
    before = {path: path.read_bytes() for path in outside.folder.rglob("*") if path.is_file()}
    with pytest.raises(LedgerError):
        run_cells(found, folder, 1, Interrupt(), lambda words: None)
    assert {path: path.read_bytes() for path in outside.folder.rglob("*") if path.is_file()} == before
    assert in_this_process == []


def test_a_training_that_was_cut_off_begins_again(tmp_path: Path, in_this_process: list[str]) -> None:
    found = Sweep.load(write(tmp_path, seeds=[0], attack=[IG]))
    whole = run_cells(found, tmp_path / "out", 1, Interrupt(), lambda words: None)
    with Run(tmp_path / "out" / "none-seed0").ledger() as ledger:
        ledger.set_meta(state="training")
    (tmp_path / "out" / "sign-batch-of-2-seed0" / "ledger.sqlite").unlink()
    assert rows(found, tmp_path / "out") == [], "what has not ended has no row"
    assert numbers(run_cells(found, tmp_path / "out", 1, Interrupt(), lambda words: None)) == numbers(whole)
    assert len(in_this_process) == 4


def test_cells_at_work_share_the_gpus_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgauge.simulations.experiments import sweep_worker

    places: list[int] = []
    devices: list[list[str]] = []

    class Work:
        """A cell's process that has just been started; the first ends after a while, when another one has its place."""

        def __init__(self, cell: SweepCell, run: Run, place: int) -> None:
            self.cell, self.run, self.place = cell, run, place
            places.append(place)
            sweep_worker.work(run, place)

        def status(self) -> int | None:
            return 0 if self.place or len(places) > 2 else None

        def close(self) -> None: ...

    monkeypatch.setattr(sweeping, "_CellProcess", Work)
    monkeypatch.setattr("fedgauge.simulations.run.in_memory.train", lambda run: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sweep_worker, "serve", lambda run, executor, scenario: devices.append(list(executor.load())))
    run_cells(Sweep.load(write(tmp_path, seeds=[0, 1])), tmp_path / "out", 2, Interrupt(), lambda words: None)
    assert places == [0, 1, 1, 0] and devices == [[f"cuda:{place}"] for place in places]


@pytest.mark.slow
def test_a_cell_whose_process_fails_has_its_reason_and_the_others_their_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes: one whose data is gone by the time it begins."""
    prepared: Callable[[SweepCell, Path], Run] = sweeping._prepare_run

    def spoilt(cell: SweepCell, folder: Path) -> Run:
        run = prepared(cell, folder)
        if cell.defense != "none":
            (run.folder / "scenario.toml").write_text("rounds = 0")
        return run

    monkeypatch.setattr(sweeping, "_prepare_run", spoilt)
    path = write(tmp_path, seeds=[0], attack=[IG])
    assert main(["sweep", str(path), "-o", str(tmp_path / "out")]) == 1
    reported = capfd.readouterr().out
    good, bad = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert good["mean"] is not None and bad["mean"] is None
    assert "its process ended with status 1" in bad["reason"] and "the scenario needs" in bad["reason"]
    assert "sign, batch of 2, inverting_gradients, seed 0: its process ended with status 1" in reported
    assert (tmp_path / "out" / "comparison.html").stat().st_size > 100_000
