"""ragged_adam: the ClientApp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from ragged_adam.task import accuracy, build_model, digits, train_one_epoch
from torch.utils.data import TensorDataset

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    model, config = build_model(), context.run_config
    model.load_state_dict(msg.content["model"].to_torch_state_dict())
    first = context.node_config["partition-id"] * config["examples"]
    mine = TensorDataset(*digits()[first : first + config["examples"]])
    train_one_epoch(model, mine, config["batch-size"])
    metrics = MetricRecord({"train_acc": accuracy(model, mine), "samples": len(mine)})
    return Message(RecordDict({"model": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)
