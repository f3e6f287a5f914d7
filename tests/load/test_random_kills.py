"""A run survives kills at random: each takes one process of a run at a random moment, then the run is continued.

It takes many minutes and runs on request: FEDGAUGE_KILLS=20 pytest -m full tests/load/test_random_kills.py
"""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest
import tomli_w

from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run import in_memory, processes
from fedgauge.simulations.run.create import create_run

ROUNDS, CLIENTS, EXAMPLES = 12, 2, 2
MARK = "FEDGAUGE_KILLS_MARK"  # in the environment of every process of the runs
LONGEST = 15.0  # seconds from one kill to the next
PATIENCE = 600.0  # seconds for a run to end by itself
TABLES = {
    "rounds": ROUNDS,
    "clients": CLIENTS,
    "data": {"use": "mnist5k", "batch_size": EXAMPLES},
    "model": {"use": "mlp", "hidden": [16]},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "inverting_gradients", "iterations": 300}],
    "audit": {"executor": "ray", "workers": 1},
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif("FEDGAUGE_KILLS" not in os.environ, reason="takes many minutes: set FEDGAUGE_KILLS to how many")
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc: Linux")
def test_runs_lose_and_double_no_score_and_end_with_the_same_model(tmp_path: Path) -> None:
    wanted = int(os.environ["FEDGAUGE_KILLS"])
    draw = random.Random(0)
    victims: list[str] = []
    whole = create_run(Scenario.from_tables(TABLES), tmp_path / "whole")
    in_memory.train(whole)
    (tmp_path / "kills.toml").write_text(tomli_w.dumps(TABLES))
    expected = Counter((r, c, e) for r in range(1, ROUNDS + 1) for c in range(CLIENTS) for e in range(EXAMPLES))
    runs = 0
    while len(victims) < wanted:
        run, runs = _a_run(tmp_path, runs, draw, victims, wanted), runs + 1
        with run.ledger() as ledger:
            scores = [row for row in ledger.scores("psnr") if row["attack"] == "inverting_gradients"]
        assert Counter((row["round"], row["client"], row["example"]) for row in scores) == expected
        assert run.model.read_bytes() == whole.model.read_bytes()
    print(", ".join(f"{count} x {name}" for name, count in Counter(victims).items()))


def _a_run(folder: Path, number: int, draw: random.Random, victims: list[str], wanted: int) -> Run:
    """One run, killed at random until it is complete in spite of it, or the kills are used up and it is left in peace."""
    mark, runs = uuid.uuid4().hex, folder / f"runs-{number}"
    command = ["run", str(folder / "kills.toml"), "--runs", str(runs)]
    deadline = time.monotonic() + PATIENCE
    try:
        while True:
            log = folder / "driver.log"
            driver = processes.start(
                [sys.executable, "-P", "-m", "fedgauge.simulations.cli.main", *command, "--log", "quiet"],
                log,
                {**os.environ, MARK: mark},
            )
            _disturb(driver, mark, draw, victims, wanted, deadline)
            run = next(iter(sorted(runs.glob("*/ledger.sqlite"))), None)
            if driver.returncode == 0 and run is not None:
                return Run.open(run.parent)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run did not end: {log.read_text()[-2000:]}")
            if run is not None:
                command = _to_continue(run.parent)
    finally:
        for pid in processes.marked(mark, MARK):
            _kill(pid)


def _to_continue(folder: Path) -> list[str]:
    """The command that continues a run: one with a model is trained, also where it was killed before it could say so."""
    return ["audit", str(folder)] if Run.open(folder).model.exists() else ["run", "--resume", str(folder)]


def _disturb(
    driver: subprocess.Popen[bytes], mark: str, draw: random.Random, victims: list[str], wanted: int, deadline: float
) -> None:
    """Kill a process of the run now and then until its driver has ended."""
    while driver.poll() is None and time.monotonic() < deadline:
        try:
            driver.wait(draw.uniform(0, LONGEST) if len(victims) < wanted else 1.0)
        except subprocess.TimeoutExpired:
            pids = processes.marked(mark, MARK)
            if len(victims) < wanted and pids:
                victim = draw.choice(sorted(pids))
                name = _name(victim)
                if _kill(victim):
                    victims.append(name)
    if driver.poll() is None:
        _kill(driver.pid)
    driver.wait()


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        return "a process that had just ended"
    text = " ".join(words)
    known = {
        "simulation_engine": "training",
        "--follow": "attack service",
        "cli.main": "driver",
        "ray::": "Ray worker",
        "raylet": "Ray node",
        "gcs_server": "Ray head",
    }
    return next((name for sign, name in known.items() if sign in text), "Ray helper")


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
