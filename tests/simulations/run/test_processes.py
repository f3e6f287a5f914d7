"""Child processes end with us: asked, insisted upon, swept up, or told by the kernel."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgauge.simulations.run.processes import MARK, end, is_running, start, sweep
from tests.waiting import wait_for

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and asks for the parent-death signal: Linux")

READY = "print('ready', flush=True)\n"
SLEEP = READY + "import time; time.sleep(120)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
PARENT = """
import subprocess, sys
inner = subprocess.Popen([sys.executable, "-c", {code!r}], stdout=subprocess.PIPE)
inner.stdout.readline()
print(inner.pid, flush=True)
{sleep}
"""
# its child leaves the group and the session, as daemons do, and is deaf
PARENT_OF_STRAY = f"""
import subprocess, sys
stray = subprocess.Popen([sys.executable, "-c", {DEAF!r}], stdout=subprocess.PIPE, start_new_session=True)
stray.stdout.readline()
print(stray.pid, flush=True)
{SLEEP}
"""


class Launch:
    """Children with a mark of their own, and what they said."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.children: list[subprocess.Popen[bytes]] = []

    def __call__(self, code: str, lines: int = 1) -> tuple[subprocess.Popen[bytes], list[str]]:
        log = self.folder / f"{len(self.children)}.log"
        env = {**os.environ, MARK: self.mark}
        self.children.append(start([sys.executable, "-c", code], log, env))
        wait_for(lambda: len(log.read_text().splitlines()) >= lines)
        return self.children[-1], log.read_text().splitlines()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    made = Launch(tmp_path)
    yield made
    for child in made.children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_a_child_writes_to_its_log_and_has_a_session_of_its_own(launch: Launch) -> None:
    child, lines = launch(
        "import os, sys; print('out', flush=True); print('err', file=sys.stderr, flush=True)\n" + SLEEP, 3
    )
    assert lines == ["out", "err", "ready"]
    assert os.getsid(child.pid) == child.pid != os.getsid(0), "a Ctrl-C of our terminal does not reach it"


@pytest.mark.parametrize(("code", "number"), [(SLEEP, signal.SIGTERM), (DEAF, signal.SIGKILL)])
def test_a_child_that_ignores_the_asking_is_killed(launch: Launch, code: str, number: int) -> None:
    child, _ = launch(code)
    end(child, patience=10.0 if code is SLEEP else 0.3)
    assert child.returncode == -number
    end(child)


@linux
@pytest.mark.parametrize("code", [SLEEP, DEAF])
def test_a_childs_whole_group_ends_with_it(launch: Launch, code: str) -> None:
    child, lines = launch(PARENT.format(code=code, sleep=SLEEP), 2)
    inner = int(lines[0])
    assert is_running(inner)
    end(child, patience=0.3)
    try:
        wait_for(lambda: not is_running(inner))
    finally:
        if is_running(inner):
            os.kill(inner, signal.SIGKILL)


@linux
def test_a_grandchild_that_left_the_session_is_found_by_its_mark(launch: Launch) -> None:
    child, lines = launch(PARENT_OF_STRAY, 2)
    stray = int(lines[0])
    end(child)
    assert is_running(stray), "it left the group, so ending the child did not reach it"
    assert sweep(launch.mark, patience=0.3) == [stray]
    assert not is_running(stray)
    assert sweep(launch.mark) == []


@linux
def test_a_sweep_touches_nobody_elses_processes(launch: Launch, tmp_path: Path) -> None:
    other = Launch(tmp_path)
    mine, _ = launch(SLEEP)
    theirs, _ = other(SLEEP)
    try:
        assert sweep(launch.mark) == [mine.pid]
        assert theirs.poll() is None
        assert sweep(launch.mark[:-1]) == [], "a mark is compared whole"
    finally:
        end(theirs)


@linux
@pytest.mark.parametrize(
    ("code", "number"), [(SLEEP, "SIGTERM"), (DEAF, "SIGTERM"), (DEAF, "SIGKILL")], ids=["polite", "deaf", "killed"]
)
def test_children_are_reported_when_their_parent_is_killed(tmp_path: Path, code: str, number: str) -> None:
    """SIGKILL leaves the parent no chance to end anything itself; the kernel sends what it asked for."""
    log = tmp_path / "child.log"
    told = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit()))\n{SLEEP}"
    script = f"""
import os, signal, sys, time
from pathlib import Path
from fedgauge.simulations.run.processes import start
command = [sys.executable, "-c", {told if code is SLEEP else code!r}]
child = start(command, Path({str(log)!r}), os.environ, at_our_death=signal.{number})
print(child.pid, flush=True)
time.sleep(120)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(lambda: "ready" in log.read_text())
    parent.kill()
    parent.communicate()
    if number == "SIGKILL":
        wait_for(lambda: not is_running(pid))
    elif code is SLEEP:
        wait_for(lambda: not is_running(pid))
        assert log.read_text().splitlines() == ["ready", "told"]
    else:  # a request and no more: who ignores it stays, and is what `sweep` is for
        time.sleep(0.3)
        assert is_running(pid)
        os.kill(pid, signal.SIGKILL)
