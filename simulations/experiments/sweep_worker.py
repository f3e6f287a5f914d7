"""One cell of a sweep, in its own process: train in memory, then attack the recorded updates."""

import sys
from pathlib import Path

import torch

from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.simulations.run import in_memory


def work(run: Run, place: int = 0) -> None:
    """Train unless that is done, then run the remaining attack jobs.

    Args:
        place: among the cells at work; they share the devices out between them.
    """
    torch.set_num_threads(1)  # cells share the machine, and equal seeds give equal bits
    with run.ledger() as ledger:
        if ledger.meta().get("state") != "trained":
            with run.lock("training"):
                ledger.set_meta(state="training")
                in_memory.train(run)
                ledger.set_meta(state="trained")
    scenario = run.scenario()
    devices = scenario.audit.devices_here()
    serve(run, LocalExecutor(devices[place % len(devices)], scenario.audit.precision), scenario)
    with run.ledger() as ledger:
        ledger.set_meta(cell="ended")  # even after failures: the ledger has the rows and their reasons


if __name__ == "__main__":
    work(Run.open(Path(sys.argv[1])), int(sys.argv[2]))
