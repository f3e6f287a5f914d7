"""flowertune: the ServerApp."""

from flowertune.models import get_model
from flowertune.strategy import FlowerTuneLlm
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from fedgauge.server.tap import curious  # fedgauge

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    num_rounds, save_path = config["num-server-rounds"], config["save-path"]

    arrays = ArrayRecord(get_peft_model_state_dict(get_model(config)))

    strategy = FlowerTuneLlm(fraction_train=config["strategy.fraction-train"], fraction_evaluate=0.0)
    strategy = curious(strategy, config["audit"], config["record-to"])  # fedgauge
    strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"save_path": save_path}),
        num_rounds=num_rounds,
        evaluate_fn=get_evaluate_fn(config, num_rounds, save_path),
    )


def get_evaluate_fn(config, total_round, save_path):
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == total_round:  # keep the adapters
            model = get_model(config)
            set_peft_model_state_dict(model, arrays.to_torch_state_dict())
            model.save_pretrained(f"{save_path}/peft_{server_round}")
        return MetricRecord()

    return evaluate
