"""quickstart: the ServerApp; the three lines of fedgauge's stand in `curious`."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from quickstart.task import Net

from fedgauge.server.store.scenario import Scenario
from fedgauge.server.strategy.curious_strategy import CuriousStrategy, UpdateRecorder
from fedgauge.simulations.run.create import create_run

app = ServerApp()


def curious(strategy: FedAvg, folder: Path):
    scenario = Scenario.load(folder.parent / "audit.toml")
    run = create_run(scenario, folder, "deployment")
    return CuriousStrategy(strategy, UpdateRecorder(run.ledger(), run.tape(), scenario.plan), replies="weights")


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg()
    if config["record-to"]:
        strategy = curious(strategy, Path(config["record-to"]))
    strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=config["num-server-rounds"],
    )
