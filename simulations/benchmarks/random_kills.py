"""Does a run survive kills at random? Each takes one process of a run at a random moment, then the run is continued."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import tomli_w

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress
from fedgauge.simulations.run import in_memory, processes
from fedgauge.simulations.run.create import create_run

ROUNDS, CLIENTS = 12, 2
MARK = "FEDGAUGE_KILLS"  # in the environment of every process of the runs
LONGEST = 15.0  # seconds from one kill to the next
PATIENCE = 600.0  # seconds for a run to end by itself
TABLES = {
    "rounds": ROUNDS,
    "clients": CLIENTS,
    "data": {"use": "mnist5k", "batch_size": 2},
    "model": {"use": "mlp", "hidden": [16]},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "inverting_gradients", "iterations": 300}],
    "audit": {"executor": "ray", "workers": 1},
}


def kills(progress: Progress, wanted: int = 20, seed: int = 0) -> BenchmarkReport:
    """Rows lost and doubled, and runs whose model differs, after as many kills of random processes of real runs."""
    draw = random.Random(seed)
    victims: list[str] = []
    found: list[tuple[int, int, int, bool]] = []
    with TemporaryDirectory(prefix="fedgauge-") as folder:
        whole = create_run(Scenario.from_tables(TABLES), Path(folder) / "whole")
        in_memory.train(whole)
        (Path(folder) / "kills.toml").write_text(tomli_w.dumps(TABLES))
        while len(victims) < wanted:
            run = _a_run(Path(folder), len(found), draw, victims, wanted)
            found.append(_compare(run, whole))
            progress(min(len(victims), wanted), wanted)
    rows, lost, doubled, same = (tuple(column) for column in zip(*found, strict=True))
    return BenchmarkReport(
        (
            Figure("kills", len(victims), "kills", note=", ".join(f"{n} x {v}" for v, n in Counter(victims).items())),
            Figure("scores expected", sum(rows), "rows", note=f"of {len(found)} runs"),
            Figure("scores lost", sum(lost), "rows", at_most=0),
            Figure("scores doubled", sum(doubled), "rows", at_most=0),
            Figure("models that differ from an undisturbed run's", same.count(False), "runs", at_most=0),
        ),
        settings={
            "rounds, clients": f"{ROUNDS}, {CLIENTS}",
            "seconds between kills": f"0 to {LONGEST:g}",
            "seed": seed,
        },
    )


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
                command = _to_continue(run)
    finally:
        for pid in processes.marked(mark, MARK):
            _kill(pid)


def _to_continue(ledger: Path) -> list[str]:
    """The command that continues a run, as the run itself says."""
    with Ledger(ledger) as open_ledger:
        trained = open_ledger.meta().get("state") == "trained"
    return ["audit", str(ledger.parent)] if trained else ["run", "--resume", str(ledger.parent)]


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


def _compare(run: Run, whole: Run) -> tuple[int, int, int, bool]:
    """Scores expected, lost and doubled, and whether the model is the undisturbed run's, bit for bit."""
    examples = range(2)
    expected = {(r, c, e) for r in range(1, ROUNDS + 1) for c in range(CLIENTS) for e in examples}
    with run.ledger() as ledger:
        rows = Counter(
            (r["round"], r["client"], r["example"])
            for r in ledger.scores("psnr")
            if r["attack"] == "inverting_gradients"
        )
    lost = sum(1 for key in expected if key not in rows)
    doubled = sum(n - 1 for n in rows.values())
    return len(expected), lost, doubled, run.model.read_bytes() == whole.model.read_bytes()
