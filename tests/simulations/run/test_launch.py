"""What a training starts ends with it, however it ends, and serves nobody else."""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run import launch, processes
from fedgauge.simulations.run.launch import TrainingProcess
from tests.hostile_folder import hostile
from tests.listening import LOOPBACK, listening
from tests.small_runs import SMALLEST

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
    monkeypatch.setenv(
        "PYTHONPATH", "src:"
    )  # whose second part, which is empty, is Python's word for the current folder
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
    _until(lambda: run.log("deaf.log").read_text().count("ready") == 2)

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


@linux
@pytest.mark.slow
def test_a_training_listens_on_the_loopback_address_alone_and_starts_nothing_that_takes_an_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperLink would take one from any user of the machine, and Ray's own default is every interface.

    Nor do its clients load what lies in the folder where the command is given, which Ray has them search first.
    """
    run = Run.create(tmp_path / "run", Scenario.from_tables(SMALLEST | {"rounds": 200}))
    monkeypatch.chdir(hostile(tmp_path / "theirs"))
    with closing(TrainingProcess(run)) as training:
        _until(lambda: training.status() is not None or _rounds(run) >= 1)
        assert training.status() is None, run.log("flower.log").read_text()[-3000:]
        pids = processes.marked(training.mark)
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
        token = (training.scratch / "ray-token").read_bytes()
        found = listening(pids)
    assert len({port for _, port in found}) >= 4, "Ray's head, node and workers"
    assert {address for address, _ in found} == {LOOPBACK}
    assert not any(b"superlink" in command or token in command for command in commands)
    assert not (tmp_path / "theirs" / "ran").exists()


def _until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def _rounds(run: Run) -> int:
    with run.ledger() as ledger:
        return len(ledger.rounds())
