"""torch_quickstart: the ServerApp."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch_quickstart.task import Net

from fedgauge.server.tap import tap  # fedgauge

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    fraction_train = context.run_config["fraction-train"]
    num_rounds = context.run_config["num-server-rounds"]
    lr = context.run_config["learning-rate"]

    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_train=fraction_train)
    grid = tap(grid, context.run_config["audit"], context.run_config["record-to"])  # fedgauge

    strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=num_rounds,
    )
