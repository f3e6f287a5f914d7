"""A client and a server of Flower's older interfaces: NumPyClient, client_fn and server_fn."""

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        return self.layers(x)


NET = Net()


def get_parameters():
    return [value.numpy() for value in NET.state_dict().values()]


class Client(NumPyClient):
    def __init__(self, partition):
        digits = load_digits()
        mine = range(partition, 400, 10)[:8]
        self.x = torch.tensor(digits.images[mine, None], dtype=torch.float32) / 16
        self.y = torch.tensor(digits.target[mine])

    def fit(self, parameters, config):
        NET.load_state_dict({k: torch.tensor(v) for k, v in zip(NET.state_dict(), parameters, strict=True)})
        optimizer = torch.optim.SGD(NET.parameters(), lr=config["rate"])
        nn.functional.cross_entropy(NET(self.x), self.y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return get_parameters(), len(self.x), {}


def client_fn(context):
    return Client(context.node_config["partition-id"]).to_client()


def server_fn(context):
    strategy = FedAvg(fraction_evaluate=0.0, on_fit_config_fn=lambda _: {"rate": 0.1})
    return ServerAppComponents(strategy=strategy, config=ServerConfig(context.run_config["num-server-rounds"]))


client = ClientApp(client_fn=client_fn)
server = ServerApp(server_fn=server_fn)
