"""The ServerApp: FedAvg, and around it a curious server, if the app's configuration names a folder to record to."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedgauge.server.tap import curious
from fedgauge.simulations.example_app.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and let the server keep every update."""
    config = context.run_config
    torch.manual_seed(0)
    strategy: Strategy = FedAvg(fraction_evaluate=0.0)
    if record_to := str(config["record-to"]):
        strategy = curious(strategy, Path(__file__).parent / "audit.toml", record_to, [str(__package__)])
    strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=int(config["num-server-rounds"]))
