"""A user's app that is killed at any moment loses no recorded row, and doubles none."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedgauge.server.store.run import Run

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("FEDGAUGE_KILLS", "3"))
NODES = 4
APP = """
import sys
from pathlib import Path
from flwr.serverapp.strategy import FedAvg
from tests.server.test_tap import AUDIT, Nodes, start
from fedgauge.server.tap import tap
from fedgauge.simulations.run.in_memory import flower

folder = Path(sys.argv[1])
(folder / "audit.toml").write_text(AUDIT)
with flower():
    grid = tap(Nodes(), folder / "audit.toml", folder / "run")
    print("ready", flush=True)
    start(FedAvg(fraction_evaluate=0.0), grid, rounds=10_000)
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kill", range(KILLS))
def test_a_killed_app_leaves_whole_rows_of_whole_files(tmp_path: Path, kill: int) -> None:
    command = [sys.executable, "-c", APP, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as app:
        assert app.stdout is not None and app.stdout.readline() == "ready\n"
        time.sleep(random.Random(kill).uniform(0.2, 3.0))
        app.send_signal(signal.SIGKILL)
    run = Run.open(tmp_path / "run")
    with run.ledger() as ledger:
        seen, meta = ledger.observations(), ledger.meta()
    rows = [(o["round"], o["client"]) for o in seen]
    rounds = sorted({round for round, _ in rows})
    assert len(rows) == len(set(rows)) and rounds == list(range(1, len(rounds) + 1))
    assert all(sum(r == round for r, _ in rows) == NODES for round in rounds), "a round's rows are one transaction"
    for o in seen:
        run.tape().read(o["round"], o["client"], o["digest"])  # a file that is not whole raises
    assert meta["state"] == "training" and not run.at_work("training")
