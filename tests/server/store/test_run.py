"""A run folder: private, locked by the living, readable later."""

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run, RunBusy
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError, write_tensors

HOLDER = """
import sys, time
from pathlib import Path
from fedgauge.server.store.run import Run
with Run(Path(sys.argv[1])).lock("audit"):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(run: Run) -> subprocess.Popen[bytes]:
    """A process of its own that holds the run's audit."""
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(run.folder)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    child.stdout.close()
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()


@pytest.fixture
def run(kit: Any, tmp_path: Path) -> Run:
    made: Run = kit.make_run(tmp_path / "run", kit.scenario(), tape=False)
    return made


def test_everything_in_a_run_folder_is_behind_a_door_for_its_owner(run: Run) -> None:
    assert stat.S_IMODE(run.folder.stat().st_mode) == 0o700
    folders = [p for p in run.folder.iterdir() if p.is_dir()]
    assert sorted(p.name for p in folders) == ["logs", "reconstructions", "tape"]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o700 for p in folders)


def test_a_run_is_private_whatever_the_umask(kit: Any, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = Run.create(tmp_path / "open", kit.scenario())
    finally:
        os.umask(before)
    assert stat.S_IMODE(run.folder.stat().st_mode) == 0o700


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
    with pytest.raises(TapeError, match=f"{path} is damaged: its digest differs from the one that the ledger recorded"):
        run.read_memory(1, 3, "feedback", digest)


def test_a_run_never_overwrites_another(kit: Any, run: Run) -> None:
    with pytest.raises(FileExistsError):
        Run.create(run.folder, kit.scenario())


def test_a_run_opens_again_with_its_scenario(kit: Any, run: Run) -> None:
    again = Run.open(run.folder)
    assert again.scenario() == Scenario.from_tables(kit.tables())
    assert again.name == "run"


def test_opening_what_is_no_run_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=f"{tmp_path} is not a run folder"):
        Run.open(tmp_path)
    with pytest.raises(LedgerError, match="nowhere is not a run folder"):
        Run.open(tmp_path / "nowhere")


def test_a_second_holder_is_told_who_the_first_is(run: Run) -> None:
    child = hold(run)
    try:
        with pytest.raises(RunBusy, match=f"{run.folder}: process {child.pid} holds its audit"), run.lock("audit"):
            pass
        assert run.holder("audit") == child.pid
        with run.lock("training"):  # another purpose is another lock
            assert run.holder("training") == os.getpid()
    finally:
        end(child)


def test_a_dead_holder_holds_nothing(run: Run) -> None:
    end(hold(run))
    assert run.holder("audit") is None
    with run.lock("audit"):
        assert run.holder("audit") == os.getpid()
    assert run.holder("audit") is None


def test_a_lock_that_was_given_back_can_be_taken_again(run: Run) -> None:
    for _ in range(3):
        with run.lock("audit"):
            pass
    with pytest.raises(RuntimeError, match="inside"), run.lock("audit"):
        raise RuntimeError("inside")
    with run.lock("audit"):
        pass


def test_asking_who_holds_a_lock_takes_it_from_nobody(run: Run) -> None:
    """A dashboard that looks must not make a pool that starts believe another is at work."""
    with run.lock("audit"):
        pass
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            assert run.holder("audit") in (None, os.getpid())

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for thread in lookers:
        thread.start()
    try:
        for _ in range(300):
            with run.lock("audit"):
                pass
    finally:
        over.set()
        for thread in lookers:
            thread.join()


def test_a_holder_that_has_not_yet_said_who_it_is_is_no_process_zero(run: Run) -> None:
    """`fedgauge stop` sends the holder a signal, and process 0 is the sender's own group."""
    import fcntl

    path = run.folder / "audit.lock"
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        names = threading.Timer(0.2, lambda: (file.write("4711"), file.flush()))
        names.start()
        assert run.holder("audit") == 4711
        names.join()


def test_reconstructions_are_kept_by_round_client_and_attack(run: Run) -> None:
    x = torch.rand(2, 1, 3, 3)
    run.write_reconstruction(3, 12, "dlg", {"x": x, "y": torch.tensor([1, 2])})
    path = run.folder / "reconstructions" / "round-00003-client-00012-dlg.safetensors"
    assert run.reconstruction(3, 12, "dlg") == path
    assert torch.equal(run.read_reconstruction(3, 12, "dlg")["x"], x)
    with pytest.raises(TapeError, match="round-00003-client-00013-dlg.safetensors is missing"):
        run.read_reconstruction(3, 13, "dlg")


@pytest.mark.parametrize(
    "name", ["../x", "..", "a/b", "a\\b", "", " ", "a b", "a.b", "a\0b", "a\nb", "~", "-r*", "x" * 300, "é" * 200]
)
def test_attack_names_that_are_no_file_names_are_refused_by_the_plan(kit: Any, name: str) -> None:
    attack = {"use": "dlg", "iterations": 1, "name": name}
    with pytest.raises(SpecError, match=r"\[\[attack\]\] #1: name must be"):
        kit.scenario(attack=[attack])


@pytest.mark.parametrize("name", ["dlg", "dlg-2", "a_b", "DLG2"])
def test_attack_names_that_are_file_names_stay_inside_the_run(kit: Any, run: Run, name: str) -> None:
    plan = kit.scenario(attack=[{"use": "dlg", "iterations": 1, "name": name}]).plan
    path = run.reconstruction(1, 0, plan.attacks[0].name).resolve()
    assert path.parent == (run.folder / "reconstructions").resolve()
