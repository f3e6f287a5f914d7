"""Two groups of rates, as fastai makes them."""

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
    groups = [{"params": net.body.parameters(), "lr": 0.01}, {"params": net.head.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    records = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(records), reply_to=message)


@server.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(Net().state_dict()), num_rounds=rounds)
