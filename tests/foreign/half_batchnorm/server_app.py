"""half_batchnorm: the ServerApp."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvgM
from half_batchnorm.task import ConvNet, to_half

from fedgauge.server.tap import curious  # fedgauge

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = FedAvgM(fraction_evaluate=0.0, server_learning_rate=1.0, server_momentum=0.0)
    strategy = curious(strategy, config["audit"], config["record-to"])  # fedgauge
    strategy.start(grid, ArrayRecord(to_half(ConvNet().state_dict())), num_rounds=config["num-server-rounds"])
