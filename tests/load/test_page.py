"""The page of a large run: memory of its server, size of the report, and, printed with -s, the time of its views.

The run has 100 rounds, 50 clients, two attacks and the baselines, three metrics. The ledger's and the run folder's own
functions write it; scores and images are random, as their values do not matter here.
"""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgauge.attacks.score_rows import ScoreRecord
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.reports.report import write_report
from tests.load.memory_use import memory_of

TOKEN = "load"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the page is on this machine, so no proxy
DIRECT.addheaders = [("Authorization", f"Bearer {TOKEN}")]
ROUNDS, CLIENTS = 100, 50
METRICS = {"psnr": 20.0, "ssim": 0.5, "mse": 0.01}
TABLES = {
    "rounds": ROUNDS,
    "clients": CLIENTS,
    "data": {"use": "mnist5k"},
    "model": {"use": "mlp", "hidden": [32]},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "inverting_gradients"}, {"use": "dlg"}],
    "audit": {"wave": 50},
}
VIEWS = ("overview", "gallery?round=1", "gallery?round=all", "clients", "overview")


def large_run(folder: Path) -> Run:
    scenario = Scenario.from_tables(TABLES)
    run, plan, rng = Run.create(folder, scenario), scenario.plan, np.random.default_rng(0)
    images = torch.from_numpy(rng.random((64, 1, 1, 28, 28), np.float32))
    with run.ledger() as ledger:
        ledger.add_attacks(plan, {p.name: "card" for p in plan.attacks})
        ledger.record_round(0, 0.1, 2.3, 1.0)
        for r in range(1, ROUNDS + 1):
            seen = [Participation(c, "accepted", "", 1, f"digest {r} {c}") for c in range(CLIENTS)]
            ledger.record_intake(r, seen, plan)
            ledger.record_round(r, 0.1 + 0.8 * r / ROUNDS, 1.0, 1.0)
            while (lease := ledger.lease()) is not None:
                ledger.finish(lease, {c: rows(r, c, lease.attack.name, rng) for c in lease.clients})
                if lease.attack.role == "attack":
                    for c in lease.clients:
                        kept = {"x": images[rng.integers(64)], "y": torch.tensor([int(rng.integers(10))])}
                        run.write_reconstruction(r, c, lease.attack.name, kept)
        ledger.set_meta(state="trained", rounds=str(ROUNDS), replay="ok", replay_detail="")
    return run


def rows(round: int, client: int, attack: str, rng: np.random.Generator) -> list[ScoreRecord]:
    draw = float(rng.random())
    return [
        ScoreRecord(round, client, attack, 0, m, scale * (0.5 + draw), "converged", 0.1) for m, scale in METRICS.items()
    ]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc: Linux")
def test_a_large_run_is_shown_with_bounded_memory(tmp_path: Path) -> None:
    run = large_run(tmp_path / "large")
    command = [
        sys.executable,
        "-P",
        "-m",
        "fedgauge.simulations.cli.main",
        "watch",
        str(tmp_path),
        "--port",
        "0",
        "--token",
        TOKEN,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            base = process.stdout.readline().partition("/?")[0]
            for view in VIEWS:
                started = time.perf_counter()
                with DIRECT.open(f"{base}/api/runs/large/{view}", timeout=120) as answer:
                    assert answer.status == 200 and answer.read()
                print(f"{view}: {time.perf_counter() - started:.2f} s")
            with run.ledger() as ledger:
                ledger.record_round(1000, 0.9, 1.0, 1.0)
            with DIRECT.open(f"{base}/api/runs/large/overview", timeout=60) as answer:
                assert json.load(answer)["progress"]["round"] == 1000
            peak = memory_of(process.pid, ROUNDS).peak
            print(f"server's largest resident memory: {peak:.0f} MiB")
            assert peak < 375
        finally:
            process.terminate()
    assert write_report(run).stat().st_size < 15e6
