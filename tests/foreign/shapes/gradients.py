"""Clients that send gradients."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import nn

client = ClientApp()
server = ServerApp()


def examples(partition):
    digits = load_digits()
    mine = range(partition, 400, 10)[:8]
    return torch.tensor(digits.images[mine, None], dtype=torch.float32) / 16, torch.tensor(digits.target[mine])


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(width * 64, 10)

    def forward(self, x):
        return self.head(self.body(x))


@client.train()
def train(message, context):
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = examples(context.node_config["partition-id"])
    nn.functional.cross_entropy(net(x), y).backward()
    gradients = ArrayRecord({name: p.grad for name, p in net.named_parameters()})
    records = {"arrays": gradients, "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(records), reply_to=message)


@server.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(Net().state_dict()), num_rounds=rounds)
