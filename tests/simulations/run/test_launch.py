"""What a training starts ends with it, however it ends."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fedgauge.server.child_processes import scratch_folder
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run import launch, processes
from tests.small_runs import SMALLEST
from tests.waiting import wait_for

linux = pytest.mark.skipif(sys.platform != "linux", reason="finds children by /proc: Linux")

DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
print("ready", flush=True)
time.sleep(120)
"""  # a process and its child, which ignore being asked to end


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that has not started anything."""
    return Run.create(tmp_path / "run", Scenario.from_tables(SMALLEST))


def test_a_process_of_a_run_has_a_folder_of_its_own_and_the_users_python_path(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's workers look for every package in their driver's current folder first; a relative PYTHONPATH stays the user's."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "place.py").write_text("import os, sys\nprint(os.getcwd(), *sys.path, sep='\\n')\n")
    monkeypatch.chdir(tmp_path)
    # whose second part, which is empty, is Python's word for the current folder
    monkeypatch.setenv("PYTHONPATH", "src:")
    beside = launch.OwnProcess(run, "beside.log", "place")
    try:
        assert beside._child.wait(timeout=60) == 0
        here, *looked_in = run.log("beside.log").read_text().splitlines()
    finally:
        beside.close()
    assert here == str(beside.scratch.resolve())
    assert str(tmp_path / "src") in looked_in and str(tmp_path) not in looked_in


@linux
def test_a_ctrl_c_while_children_are_asked_to_end_leaves_none_of_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    training = launch.OwnProcess(run, "deaf.log", "deaf")
    wait_for(lambda: run.log("deaf.log").read_text().count("ready") == 2)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            training.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert processes.marked(training.mark) == []
    assert training._child.wait() == -signal.SIGKILL
    assert not training.scratch.exists()


@pytest.mark.full
def test_a_training_whose_ray_does_not_start_ends(run: Run) -> None:
    command = [sys.executable, "-m", "fedgauge.simulations.run.simulation_engine", str(run.folder)]
    assert subprocess.run(command, env=os.environ | {"RAY_TMPDIR": "/dev/null/none"}, timeout=120).returncode == 1


def test_rays_sockets_have_room_whatever_folder_is_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "as-long-as-those-of-macos-and-of-clusters").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "as-long-as-those-of-macos-and-of-clusters"))
    folder = scratch_folder()
    try:
        session = folder / "ray" / "ray" / "session_2026-11-29_12-05-51_022099_1234567"
        assert len(str(session / "sockets" / "plasma_store")) <= 103, "macOS's limit; Linux has 107"
    finally:
        folder.rmdir()
