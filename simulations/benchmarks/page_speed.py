"""The page of a large run: time to the first view, memory of its server, latency of updates.

The run has 200 rounds, 50 clients, two attacks and the baselines, three metrics. The ledger's and the run folder's own
functions write it; scores and images are random, as their values do not matter here.
"""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from fedgauge.attacks.grading.scores import ScoreRecord
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress
from fedgauge.simulations.reports.report import write_report

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the page is on this machine, so no proxy
TOKEN = "benchmark"
DIRECT.addheaders = [("Authorization", f"Bearer {TOKEN}")]
METRICS = {"psnr": 20.0, "ssim": 0.5, "mse": 0.01}
WAVE = 50
VIEWS = {
    "gallery of a round, first view": "gallery?round=1",
    "gallery of all rounds": "gallery?round=all",
    "clients": "clients",
    "a client": "clients/0",
    "overview, again": "overview",
}


def page(progress: Progress, rounds: int = 200, clients: int = 50, news: int = 5) -> BenchmarkReport:
    """First view, further views, memory, latency of updates, and the size of the report."""
    with TemporaryDirectory(prefix="fedgauge-page-") as scratch:
        run = large_run(Path(scratch) / "large", rounds, clients, progress)
        figures = list(_served(run, news))
        progress(rounds + 1, rounds + 2)
        started = time.perf_counter()
        size = write_report(run).stat().st_size / 1e6
        spent = time.perf_counter() - started
        figures.append(Figure("report", size, "MB", at_most=30.0, note=f"written in {spent:.1f} s"))
        progress(rounds + 2, rounds + 2)
    rows = rounds * clients * len(METRICS) * 2
    settings = dict(
        rounds=rounds,
        clients=clients,
        rows=f"{rows}, and as many of two baselines",
        images=rounds * clients * 2,
        seed=0,
    )
    return BenchmarkReport(tuple(figures), settings)


def _scenario(rounds: int, clients: int) -> Scenario:
    return Scenario.from_tables(
        {
            "seed": 0,
            "rounds": rounds,
            "clients": clients,
            "data": {"use": "mnist5k"},
            "model": {"use": "mlp", "hidden": [32]},
            "chain": [{"use": "local_sgd", "rate": 0.1}],
            "attack": [{"use": "inverting_gradients"}, {"use": "dlg"}],
            "audit": {"wave": WAVE},
        }
    )


def large_run(folder: Path, rounds: int, clients: int, progress: Progress) -> Run:
    """Write the run."""
    scenario = _scenario(rounds, clients)
    run, plan, rng = Run.create(folder, scenario), scenario.plan, np.random.default_rng(0)
    images = torch.from_numpy(rng.random((64, 1, 1, 28, 28), np.float32))
    with run.ledger() as ledger:
        ledger.add_attacks(plan, {p.name: "card" for p in plan.attacks})
        ledger.record_round(0, 0.1, 2.3, 1.0, 0.0)
        for r in range(1, rounds + 1):
            seen = [Participation(c, "accepted", "", 1, f"digest {r} {c}") for c in range(clients)]
            ledger.record_intake(r, seen, plan)
            ledger.record_round(r, 0.1 + 0.8 * r / rounds, 1.0, 1.0, 0.0)
            while (lease := ledger.lease()) is not None:
                ledger.finish(lease, {c: _rows(r, c, lease.attack.name, rng) for c in lease.clients})
                if not lease.attack.is_baseline:
                    for c in lease.clients:
                        kept = {"x": images[rng.integers(64)], "y": torch.tensor([int(rng.integers(10))])}
                        run.write_reconstruction(r, c, lease.attack.name, kept)
            progress(r, rounds + 2)
        ledger.set_meta(state="trained", rounds=str(rounds), replay="ok", replay_detail="")
    return run


def _rows(round: int, client: int, attack: str, rng: np.random.Generator) -> list[ScoreRecord]:
    draw = float(rng.random())
    return [
        ScoreRecord(round, client, attack, 0, m, scale * (0.5 + draw), "converged", 0.1) for m, scale in METRICS.items()
    ]


@contextmanager
def watching(path: Path) -> Iterator[tuple[str, int]]:
    """Run `fedgauge watch` on a free port; yields its address without the token, and its process id."""
    command = [sys.executable, "-P", "-m", "fedgauge.simulations.cli.main", "watch", str(path), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--token", TOKEN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().partition("/?")[0], process.pid
    finally:
        process.terminate()
        process.communicate(timeout=20)


def _served(run: Run, news: int) -> Iterator[Figure]:
    address = "/api/runs/large/"
    with watching(run.folder.parent) as (base, pid):
        yield Figure("overview, first view", seconds_of(f"{base}{address}overview"), "s", at_most=2.0)
        for name, view in VIEWS.items():
            yield Figure(name, seconds_of(base + address + view), "s")
        with run.ledger() as ledger:
            waits = [_news(base, ledger, 1000 + i) for i in range(news)]
        yield Figure("a new round until its overview", median(waits), "s", at_most=2.0, note=f"median of {news}")
        yield Figure("server's largest resident memory", peak_memory(pid), "MB", at_most=300.0)


def seconds_of(address: str) -> float:
    """Seconds that a request takes."""
    started = time.perf_counter()
    with DIRECT.open(address, timeout=120) as answer:
        answer.read()
    return time.perf_counter() - started


def _news(base: str, ledger: Any, round: int) -> float:
    """Seconds from a write until the page was notified and has fetched the new data."""
    with DIRECT.open(f"{base}/api/events?run=large", timeout=60) as stream:
        _next_id(stream)
        started = time.perf_counter()
        ledger.record_round(round, 0.9, 1.0, 1.0, 0.0)
        _next_id(stream)
    with DIRECT.open(f"{base}/api/runs/large/overview", timeout=60) as answer:
        assert json.load(answer)["training"]["round"] == round
    return time.perf_counter() - started


def _next_id(stream: Any) -> str:
    for line in stream:
        if line.startswith(b"id: "):
            return str(line)
    raise AssertionError("the stream ended")


def peak_memory(pid: int) -> float:
    """A process's largest resident memory so far, in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1e3
