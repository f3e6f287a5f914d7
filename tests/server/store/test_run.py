"""A run folder: private, locked by the living, readable later."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import Run, RunBusy
from fedgauge.server.store.tape import TapeError, write_tensors
from tests.forks import hold


@pytest.fixture
def run(kit: Any, tmp_path: Path) -> Run:
    made: Run = kit.make_run(tmp_path / "run", kit.scenario(), tape=False)
    return made


def test_every_file_of_a_run_is_the_owners_whatever_the_umask(kit: Any, tmp_path: Path) -> None:
    weights = tmp_path / "start.safetensors"
    write_tensors(weights, dict(kit.scenario().federation.model.named_parameters()))
    weights.chmod(0o644)
    before = os.umask(0)
    try:
        scenario = kit.scenario(model={"use": "mlp", "hidden": [8], "weights": str(weights)})
        run = kit.make_run(tmp_path / "open", scenario)
        run.log("audit.log").write_text("the attack of client 3")
        with run.lock("audit"), run.ledger() as ledger:
            ledger.set_meta(state="trained")
            modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in run.folder.rglob("*") if p.is_file()}
    finally:
        os.umask(before)
    folders = [run.folder, *(p for p in run.folder.iterdir() if p.is_dir())]
    assert {stat.S_IMODE(p.stat().st_mode) for p in folders} == {0o700}
    assert {"ledger.sqlite", "ledger.sqlite-wal", "scenario.toml", "audit.log", "audit.lock"} <= modes.keys()
    assert {"weights.safetensors", "round-00001.safetensors"} <= modes.keys()
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o600} == {}


def test_what_an_attack_remembers_is_the_owners_and_known_by_its_digest(run: Run) -> None:
    memory = {"images": torch.tensor(2), "blend": torch.rand(1, 1, 4, 4)}
    digest = run.write_memory(1, 3, "feedback", memory)
    path = run.memory(1, 3, "feedback")
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    kept = run.read_memory(1, 3, "feedback", digest)
    assert kept.keys() == memory.keys()
    assert all(torch.equal(kept[name], t) and kept[name].dtype == t.dtype for name, t in memory.items())
    assert run.write_memory(1, 3, "feedback", {**memory, "images": torch.tensor(3)}) != digest
    with pytest.raises(TapeError):
        run.read_memory(1, 3, "feedback", digest)


def test_a_run_never_overwrites_another(kit: Any, run: Run) -> None:
    with pytest.raises(FileExistsError):
        Run.create(run.folder, kit.scenario())


def test_opening_a_folder_without_a_run_names_it(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(LedgerError, match=str(folder)):
            Run.open(folder)


def test_a_second_holder_gets_the_process_of_the_first(run: Run) -> None:
    child = hold(run.folder, "audit")
    try:
        with pytest.raises(RunBusy, match=str(child.pid)), run.lock("audit"):
            pass
        assert run.holder("audit") == child.pid
        with run.lock("training"):  # another purpose is another lock
            assert run.holder("training") == os.getpid()
    finally:
        child.kill()


def test_a_dead_holder_holds_nothing(run: Run) -> None:
    child = hold(run.folder, "audit")
    child.kill()
    child.join()
    assert run.holder("audit") is None
    with run.lock("audit"):
        assert run.holder("audit") == os.getpid()
    assert run.holder("audit") is None


@pytest.mark.parametrize("written", ["", "-1", "0", "text"])
def test_a_holder_that_has_not_written_its_number_is_no_process(run: Run, written: str) -> None:
    """`fedgauge stop` sends the holder a signal; process 0 is the sender's own group, -1 every process."""
    import fcntl

    with (run.folder / "audit.lock").open("a+") as file:
        file.write(written)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run.holder("audit") is None and run.at_work("audit")


def test_reconstructions_are_kept_by_round_client_and_attack(run: Run) -> None:
    x = torch.rand(2, 1, 3, 3)
    run.write_reconstruction(3, 12, "dlg", {"x": x, "y": torch.tensor([1, 2])})
    path = run.folder / "reconstructions" / "round-00003-client-00012-dlg.safetensors"
    assert run.reconstruction(3, 12, "dlg") == path
    assert torch.equal(run.read_reconstruction(3, 12, "dlg")["x"], x)
    with pytest.raises(TapeError):
        run.read_reconstruction(3, 13, "dlg")


def test_a_label_may_be_one_number_of_a_regression(run: Run) -> None:
    run.write_reconstruction(1, 0, "dlg", {"x": torch.rand(2, 1, 3, 3), "y": torch.tensor([0.5, -2.0])})
    assert run.read_reconstruction(1, 0, "dlg")["y"].tolist() == [0.5, -2.0]


def test_a_reconstruction_that_is_one_number_is_damaged(run: Run) -> None:
    run.write_reconstruction(1, 0, "dlg", {"x": torch.tensor(1.0), "confidence": torch.zeros(1, 2)})
    with pytest.raises(TapeError):
        run.read_reconstruction(1, 0, "dlg")


@pytest.mark.parametrize("name", ["../x", "..", "a/b", "a\\b", "", "a b", "a\0b", "~", "-r*", "x" * 300, "é" * 200])
def test_attack_names_that_are_no_file_names_are_refused_by_the_plan(kit: Any, name: str) -> None:
    attack = {"use": "dlg", "iterations": 1, "name": name}
    with pytest.raises(SpecError):
        kit.scenario(attack=[attack])
