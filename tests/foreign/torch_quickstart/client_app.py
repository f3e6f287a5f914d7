"""torch_quickstart: the ClientApp."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch_quickstart.task import Net, load_data
from torch_quickstart.task import test as test_fn
from torch_quickstart.task import train as train_fn

app = ClientApp()
DEVICE = torch.device("cpu")


@app.train()
def train(msg: Message, context: Context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    node, config = context.node_config, context.run_config
    trainloader, _ = load_data(node["partition-id"], node["num-partitions"], config["batch-size"], config["examples"])
    train_loss = train_fn(model, trainloader, config["local-epochs"], msg.content["config"]["lr"], DEVICE)
    metrics = MetricRecord({"train_loss": train_loss, "num-examples": len(trainloader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    node, config = context.node_config, context.run_config
    _, valloader = load_data(node["partition-id"], node["num-partitions"], config["batch-size"], config["examples"])
    eval_loss, eval_acc = test_fn(model, valloader, DEVICE)
    metrics = MetricRecord({"eval_loss": eval_loss, "eval_acc": eval_acc, "num-examples": len(valloader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
