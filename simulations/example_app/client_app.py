"""The ClientApp: weights in, weights out, without a thought of who reads them."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedgauge.simulations.example_app.task import Net, private_digits
from fedgauge.simulations.example_app.task import train as train_on

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's own digits, and reply with the weights."""
    config, client = context.run_config, int(context.node_config["partition-id"])
    model = Net()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    x, y = private_digits(client, int(config["batch-size"]))
    loss = train_on(model, x, y, float(config["learning-rate"]))
    records = RecordDict({"arrays": ArrayRecord(model.state_dict())})
    records["metrics"] = MetricRecord({"num-examples": len(y), "loss": loss})
    return Message(records, reply_to=message)
