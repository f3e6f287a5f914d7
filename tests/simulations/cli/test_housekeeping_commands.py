"""fedgauge runs and stop."""

import fcntl
import signal
import sys

import pytest

from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main
from tests.forks import hold

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc who holds a lock: Linux")


@linux
def test_a_list_of_runs_does_not_wait_for_a_holder_that_says_no_number(
    attacked: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever may read a run's lock may hold it."""
    with (attacked.folder / "training.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["runs", "--runs", str(attacked.folder.parent)]) == 0  # waiting for the lock would never end
    assert "training" in capsys.readouterr().out


def test_stop_ends_the_process_that_holds_the_lock(attacked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    holder = hold(attacked.folder, "audit")
    assert main(["stop", str(attacked.folder)]) == 0
    holder.join()
    assert holder.exitcode == -signal.SIGTERM
    assert "stopped." in capsys.readouterr().out


def test_a_damaged_run_is_listed_as_such_next_to_the_others(attacked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    runs = attacked.folder.parent
    for name, data in (("damaged", b"not a database, whatever its name says" * 100), ("emptied", b"")):
        (runs / name).mkdir()
        (runs / name / "ledger.sqlite").write_bytes(data)
    assert main(["runs", "--runs", str(runs)]) == 0
    told = capsys.readouterr()
    assert attacked.name in told.out and "complete" in told.out
    lines = [line.split() for line in told.out.splitlines()]
    assert [line[:2] for line in lines if "unreadable" in line] == [
        ["emptied", "unreadable"],
        ["damaged", "unreadable"],
    ]
    assert str(runs / "damaged" / "ledger.sqlite") in told.err


def test_runs_lists_and_stop_says_when_nothing_is_at_work(attacked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs", str(attacked.folder.parent)]) == 0
    out = capsys.readouterr().out
    assert attacked.name in out and "complete" in out and "2/2" in out
    assert "local_sgd(rate=0.1)" in out and "analytic" in out, "by what they were, runs can be told apart"
    assert "mean_image" not in out
    assert main(["stop", str(attacked.folder)]) == 0
    assert "nothing" in capsys.readouterr().out
