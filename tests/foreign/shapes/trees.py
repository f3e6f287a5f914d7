"""Trees, whose bytes travel."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

client = ClientApp()
server = ServerApp()


def examples(partition):
    digits = load_digits()
    mine = range(partition, 400, 10)[:8]
    return torch.tensor(digits.images[mine, None], dtype=torch.float32) / 16, torch.tensor(digits.target[mine])


@client.train()
def train(message, context):
    records = {
        "arrays": ArrayRecord([np.frombuffer(b"a booster of trees", np.uint8)]),
        "metrics": MetricRecord({"num-examples": 8}),
    }
    return Message(RecordDict(records), reply_to=message)


@server.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    FedAvg(fraction_evaluate=0.0).start(
        grid, ArrayRecord([np.frombuffer(b"a booster of trees", np.uint8)]), num_rounds=rounds
    )
