"""What a training starts ends with it, however it ends; and what Flower answers is never taken on trust."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run import launch, processes
from fedgauge.simulations.run.launch import TrainingFailed, TrainingProcess

linux = pytest.mark.skipif(sys.platform != "linux", reason="finds children by /proc: Linux")

TABLES = {
    "rounds": 1,
    "clients": 2,
    "data": {"use": "mnist5k"},
    "model": {"use": "mlp", "hidden": [4]},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "audit": {"executor": "local"},
}
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(120)"


@pytest.fixture
def training(tmp_path: Path) -> Iterator[TrainingProcess]:
    """A training that has not started anything."""
    scenario = Scenario.from_tables(TABLES)
    made = TrainingProcess(Run.create(tmp_path / "run", scenario), scenario)
    yield made
    made.close()


def deaf_child(training: TrainingProcess) -> subprocess.Popen[bytes]:
    """A child of the training that ignores being asked to end."""
    log = training.run.folder / "logs" / f"child-{len(training._children)}.log"
    child = processes.start([sys.executable, "-c", DEAF], log, training.environment())
    training._children.append(child)
    deadline = time.monotonic() + 60
    while "ready" not in log.read_text():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return child


def test_the_app_that_flower_hands_to_every_client_holds_no_code(training: TrainingProcess) -> None:
    launch.write_app(training.scratch, training.run, training.scenario)
    (shipped,) = (path for path in (training.scratch / "app").rglob("*") if path.is_file())
    assert shipped.name == "pyproject.toml"
    components = tomllib.loads(shipped.read_text())["tool"]["flwr"]["app"]["components"]
    assert components == {"serverapp": "fedgauge.server.app:app", "clientapp": "fedgauge.client.app:app"}


def test_a_process_of_a_run_loads_no_folder_of_the_user_as_fedgauge(
    training: TrainingProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a checkout in the folder where the command is given."""
    (tmp_path / "fedgauge" / "simulations").mkdir(parents=True)
    (tmp_path / "fedgauge" / "simulations" / "__init__.py").write_text("raise RuntimeError('the folder of the user')\n")
    monkeypatch.chdir(tmp_path)
    beside = launch._OwnProcess(training.run, "beside.log", "fedgauge.simulations.cli.main", "runs")
    try:
        beside._child.wait(timeout=300)
        assert "the folder of the user" not in training.run.log("beside.log").read_text()
        assert beside.status() == 0
    finally:
        beside.close()


@linux
def test_a_ctrl_c_while_children_are_asked_to_end_leaves_none_of_them(training: TrainingProcess) -> None:
    children = [deaf_child(training) for _ in range(2)]

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
    assert [child.wait() for child in children] == [-signal.SIGKILL] * 2
    assert not training.scratch.exists()


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, training: TrainingProcess):  # type: ignore[no-untyped-def]  # a function
    """Puts a program called flwr where the training looks for Flower's: it begins run 7, and answers as told."""

    def answer(script: str, begun: str = "Successfully started run 7") -> None:
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "flwr").write_text(f"#!/bin/sh\nif [ $1 = run ]; then echo '{begun}'; exit; fi\n{script}\n")
        (programs / "flwr").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(programs / "python"))
        log = training.run.log("flower.log")
        log.write_text("Successfully started run 5\n")  # what was interrupted before
        training._submission = launch.Submission(training.scratch, log, training.environment())
        training._submission.process.wait(20)

    return answer


@pytest.mark.parametrize(
    "said",
    ['{"runs": null}', '{"runs": []}', '{"runs": [{}]}', "[]", "null", "oops", ""],
)
def test_an_answer_that_is_none_is_a_failure_in_words(training: TrainingProcess, answering, said: str) -> None:  # type: ignore[no-untyped-def]
    answering(f"echo '{said}'; echo 'the link is down' >&2")
    with pytest.raises(TrainingFailed, match="its status is unknown: the link is down"):
        training.verify()


def test_an_answer_that_never_comes_is_a_failure_in_words(
    training: TrainingProcess,
    answering,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    monkeypatch.setattr(launch, "PATIENCE", 0.3)
    answering("exec sleep 60")
    with pytest.raises(TrainingFailed, match="its status is unknown: no answer in"):
        training.verify()


def test_a_run_that_failed_is_told_with_the_end_of_its_log(training: TrainingProcess, answering) -> None:  # type: ignore[no-untyped-def]
    answering("""echo '{"runs": [{"status": "finished:failed"}]}'""")
    with training.run.log("flower.log").open("a") as log:
        log.write("first\n" * 50 + "the last words\n")
    with pytest.raises(TrainingFailed) as failed:
        training.verify()
    lines = str(failed.value).splitlines()
    assert lines[0] == "the federation failed: finished:failed"
    assert lines[1] == f"--- the end of {training.run.folder / 'logs' / 'flower.log'}:"
    assert (len(lines), lines[-1]) == (2 + 12, "the last words")


@linux
def test_a_ctrl_c_of_the_terminals_does_not_reach_who_is_asked(training: TrainingProcess, answering) -> None:  # type: ignore[no-untyped-def]
    answering("""echo "{\\"runs\\": [{\\"status\\": \\"session $(cut -d' ' -f6 /proc/$$/stat)\\"}]}\"""")
    with pytest.raises(TrainingFailed, match=r"session \d+") as told:
        training.verify()
    assert f"session {os.getsid(0)}" not in str(told.value)


def test_a_run_that_completed_is_believed(training: TrainingProcess, answering) -> None:  # type: ignore[no-untyped-def]
    answering("""echo '{"runs": [{"status": "finished:completed"}]}'""")
    training.verify()
    assert os.path.isdir(training.scratch)


def test_a_submission_asks_for_its_own_run(training: TrainingProcess, answering) -> None:  # type: ignore[no-untyped-def]
    answering("""echo "{\\"runs\\": [{\\"status\\": \\"$*\\"}]}\"""")
    with pytest.raises(TrainingFailed, match="--run-id 7 --format json"):
        training.verify()


def test_a_submission_that_was_refused_never_began(training: TrainingProcess, answering) -> None:  # type: ignore[no-untyped-def]
    answering("echo never asked; exit 1", begun="no SuperLink is there")
    with pytest.raises(TrainingFailed, match="it never started"):
        training.verify()
