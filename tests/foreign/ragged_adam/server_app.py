"""ragged_adam: the ServerApp, which evaluates on its own and has names of its own for its records."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from ragged_adam.task import accuracy, build_model, digits
from torch.utils.data import TensorDataset

from fedgauge.server.tap import curious  # fedgauge

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    model = build_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"test_acc": accuracy(model, TensorDataset(*digits()[-200:]))})


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = FedAvg(
        fraction_evaluate=0.0, weighted_by_key="samples", arrayrecord_key="model", configrecord_key="settings"
    )
    strategy = curious(strategy, config["audit"], config["record-to"])  # fedgauge
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(build_model().state_dict()),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
