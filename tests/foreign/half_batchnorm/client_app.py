"""half_batchnorm: the ClientApp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from half_batchnorm.task import ConvNet, examples_of, fit, to_half

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    net = ConvNet()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())  # copies half into single precision
    config, node = context.run_config, context.node_config
    x, y = examples_of(node["partition-id"], node["num-partitions"], config["examples"])
    loss = fit(net, x, y, config["learning-rate"], config["batch-size"])
    metrics = MetricRecord({"loss": loss, "num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(to_half(net.state_dict())), "metrics": metrics}), reply_to=msg)
