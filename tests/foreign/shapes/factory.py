"""A factory of the app with a setting builds the network; the input is normalised."""

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


def get_model(width: int) -> nn.Module:
    return Net(width)


@client.train()
def train(message, context):
    net = get_model(3)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = examples(context.node_config["partition-id"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    nn.functional.cross_entropy(net((x - 0.3) / 0.2), y).backward()
    optimizer.step()
    records = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(records), reply_to=message)


@server.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(get_model(3).state_dict()), num_rounds=rounds)
