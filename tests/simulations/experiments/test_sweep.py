"""A sweep runs each defense and seed once, gives every cell a number or a reason, and never repeats work."""

import csv
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE
from fedgauge.client.components import SpecError
from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.experiments import sweep as sweeping
from fedgauge.simulations.experiments.sweep import _train_and_attack, results_of, run_sweep
from fedgauge.simulations.experiments.sweep_file import Sweep, SweepCell
from fedgauge.simulations.experiments.sweep_rows import DOUBT, SweepRow, failed_rows
from tests.simulations.experiments.small_sweeps import IG, SGD, TABLES, write


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that are trained."""
    names: list[str] = []
    whole = sweeping.in_memory.train

    def train(run: Run) -> None:
        names.append(run.name)
        whole(run)

    monkeypatch.setattr(sweeping.in_memory, "train", train)
    return names


def swept(found: Sweep, folder: Path) -> list[SweepRow]:
    *_, rows = run_sweep(found, results_of(found, folder), 1)
    return rows


def numbers(found: list[SweepRow]) -> list[tuple[Any, ...]]:
    return [(r.run, r.attack, r.accuracy, r.mean, r.best, r.baseline, r.n, r.failed, r.reason) for r in found]


def test_an_interrupted_sweep_goes_on_and_ends_as_one_that_was_not(tmp_path: Path, trained: list[str]) -> None:
    found = Sweep.load(write(tmp_path))
    results = run_sweep(found, results_of(found, tmp_path / "a"), 1)
    assert next(results) == []
    next(results)
    early = next(results)
    results.close()  # type: ignore[attr-defined]  # it is a generator
    assert trained == ["none-seed0", "none-seed1"]
    assert {r.run for r in early} == {"none-seed0", "none-seed1"}
    late = swept(found, tmp_path / "a")
    assert trained[2:] == ["sign-batch-of-2-seed0", "sign-batch-of-2-seed1"]
    whole = swept(found, tmp_path / "b")
    assert numbers(late) == numbers(whole)
    assert numbers(late[:4]) == numbers(early), "rows that were there stay as they were"
    assert swept(found, tmp_path / "b") == whole
    assert len(trained) == 8, "a complete sweep does nothing"


def test_every_cell_has_a_number_or_a_reason_and_the_files_say_the_same(tmp_path: Path) -> None:
    found = Sweep.load(write(tmp_path, seeds=[0], attack=[IG, {"use": "analytic"}]))
    result = swept(found, tmp_path / "out")
    by_cell = {(r.defense, r.attack): r for r in result}
    assert len(by_cell) == 4
    exact = by_cell["none", "analytic"]
    assert exact.n == 4 and exact.mean == 60.0 and exact.reason == "", "exact hits count with the cap"
    refused = by_cell["sign, batch of 2", "analytic"]
    assert refused.mean is None and refused.n == 0 and refused.failed == 8
    assert "sums 2 (4 x)" in refused.reason
    for row in result:
        assert row.mean is not None or row.reason
        assert row.accuracy is not None and 0 < row.accuracy < 1
        assert row.baseline is not None and 5 < row.baseline < 25
    with (tmp_path / "out" / "sweep.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [(r["defense"], r["attack"], r["mean"]) for r in read] == [
        (r.defense, r.attack, "" if r.mean is None else str(r.mean)) for r in result
    ]
    assert results_of(found, tmp_path / "out").rows == result
    lines = (tmp_path / "out" / "sweep.md").read_text().splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["`analytic`", "`inverting_gradients`"], "the strongest of each"


ROUNDED = (
    "from fedgauge.client.transforms import UpdateTransform\n\n\nclass rounded(UpdateTransform):\n"
    "    def apply(self, update, rng):\n        return {k: (t * 1000).round() / 1000 for k, t in update.items()}\n"
)


@pytest.mark.full
def test_a_row_says_why_its_low_leakage_proves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweepsflat.py").write_text(ROUNDED)
    defenses = [{"name": "none", "chain": [SGD]}, {"name": "flat", "chain": [SGD, {"use": "sweepsflat:rounded"}]}]
    noise = {"name": "noise", "chain": [SGD, {"use": "gaussian", "sigma": 0.1}]}
    path = write(tmp_path, seeds=[0], defense=[*defenses, noise], attack=[IG])
    command = ["sweep", str(path), "--output", str(tmp_path / "out"), "--allow", "sweepsflat", "--jobs", "1"]
    for _ in range(2):  # the second call trains nothing
        assert main(command) == 0
        assert f"flat, inverting_gradients, seed 0: {DOUBT}: {NO_DERIVATIVE}" in capsys.readouterr().out
    with (tmp_path / "out" / "sweep.csv").open() as file:
        none, flat, noisy = csv.DictReader(file)
    assert none["reason"] == "" and NO_DERIVATIVE in flat["reason"]
    assert "without a clip" in noisy["reason"] and not noisy["epsilon"]


def test_a_row_stands_for_each_attack_that_the_run_planned(tmp_path: Path) -> None:
    """What an effort adds is compared with the others on the same page, and may be the strongest."""
    scenario = {**TABLES["scenario"], "rounds": 1, "audit": {"effort": "quick"}}
    found = Sweep.load(write(tmp_path, seeds=[0], scenario=scenario, defense=TABLES["defense"][:1], attack=[IG]))
    (cell,) = found.cells
    attacked = [row.attack for row in swept(found, tmp_path / "out")]
    assert attacked[0] == "inverting_gradients" and "analytic" in attacked
    with Run(tmp_path / "out" / cell.folder).ledger() as ledger:
        assert attacked == [p.name for p in ledger.planned().values() if p.role == "attack"]
    lines = (tmp_path / "out" / "sweep.md").read_text().splitlines()
    assert lines[2].split(" | ")[1] == "`analytic`"
    failed = failed_rows(cell, RuntimeError("its process ended"))
    assert [row.attack for row in failed] == attacked, "a cell that failed has the same rows"


def test_a_sweep_tests_membership_next_to_its_attacks(tmp_path: Path) -> None:
    membership = {"use": "membership", "strangers": 120, "held": 0, "defenses": ["none"]}
    scenario = {**TABLES["scenario"], "data": {"use": "mnist5k", "auxiliary": 400}}
    attack = [IG, membership, {**membership, "use": "membership_over_rounds", "held": 4}]
    path = write(tmp_path, seeds=[0], scenario=scenario, attack=attack)
    found = {r.attack: r for r in swept(Sweep.load(path), tmp_path / "out")}
    told = found["membership"]
    assert told.metric == "membership" and told.mean is not None and told.mean > 0.9
    assert told.baseline is not None and 0.2 < told.baseline < 0.8
    held = found["membership_over_rounds"]
    assert held.metric == "dataset_membership" and held.mean is not None, held.reason
    assert told.detected is None, "one label of ten is too few strangers for 1 %"
    lines = (tmp_path / "out" / "sweep.md").read_text().splitlines()
    assert "in the batch" in lines[0] and lines[3].split(" | ")[6] == "not tested"


def test_a_defense_under_which_nothing_arrives_is_a_row_with_its_reason(tmp_path: Path, trained: list[str]) -> None:
    explodes = {"name": "explodes", "chain": [{**SGD, "rate": 1e30, "steps": 3}]}
    found = Sweep.load(write(tmp_path, seeds=[0], attack=[IG], defense=[explodes]))
    (row,) = swept(found, tmp_path / "out")
    assert row.mean is None and "no update" in row.reason and "not finite" in row.reason
    assert swept(found, tmp_path / "out") == [row], "and it is done with"
    assert trained == ["explodes-seed0"]


@pytest.mark.parametrize("kept", ["none-seed0/report.html", "sweep.json"])
def test_a_folder_with_anything_else_in_it_is_left_alone(tmp_path: Path, kept: str) -> None:
    path = tmp_path / "out" / kept
    path.parent.mkdir(parents=True)
    path.write_text("another")
    with pytest.raises(SpecError):
        results_of(Sweep.load(write(tmp_path)), tmp_path / "out")
    assert path.read_text() == "another"


def test_a_training_that_was_cut_off_begins_again(tmp_path: Path, trained: list[str]) -> None:
    found = Sweep.load(write(tmp_path, seeds=[0], attack=[IG]))
    whole = swept(found, tmp_path / "out")
    with Run(tmp_path / "out" / "none-seed0").ledger() as ledger:
        ledger.set_meta(state="training")
    (tmp_path / "out" / "sign-batch-of-2-seed0" / "ledger.sqlite").unlink()
    first = next(run_sweep(found, results_of(found, tmp_path / "out"), 1))
    assert first == [], "what has not ended has no row"
    assert numbers(swept(found, tmp_path / "out")) == numbers(whole)
    assert len(trained) == 4


def test_cells_at_work_share_the_gpus_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    monkeypatch.setattr(sweeping.in_memory, "train", lambda run: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sweeping, "serve", lambda run, executor, scenario: devices.append(str(executor._worker.device)))
    for place, cell in enumerate(Sweep.load(write(tmp_path, seeds=[0, 1])).cells):
        list(_train_and_attack(cell, tmp_path / "out", place))
    assert devices == [f"cuda:{place}" for place in (0, 1, 0, 1)]


def killed(cell: SweepCell, folder: Path, place: int) -> Iterator[list[SweepRow]]:
    """As a cell's work, whose process is killed for every defense but none."""
    if cell.defense != "none":
        signal.raise_signal(signal.SIGKILL)
    yield from _train_and_attack(cell, folder, place)


@pytest.mark.slow
def test_a_cell_whose_process_fails_has_its_reason_and_the_others_their_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "_train_and_attack", killed)
    (tmp_path / "sweepsapart.py").write_text(ROUNDED)
    chains = [SGD, {"use": "sweepsapart:rounded"}], [SGD, {"use": "sign"}]
    defenses = [{"name": name, "chain": chain} for name, chain in zip(("none", "sign"), chains, strict=True)]
    path = write(tmp_path, seeds=[0], attack=[IG], defense=defenses)
    assert main(["sweep", str(path), "-o", str(tmp_path / "out"), "--allow", "sweepsapart"]) == 1
    reported = capfd.readouterr().out
    good, bad = json.loads((tmp_path / "out" / "sweep.json").read_text())["rows"]
    assert good["mean"] is not None and bad["mean"] is None
    assert NO_DERIVATIVE in good["reason"], "what is allowed here is allowed there"
    assert "sign, inverting_gradients, seed 0: " in reported and "status -9" in reported
    assert (tmp_path / "out" / "comparison.html").stat().st_size > 100_000
