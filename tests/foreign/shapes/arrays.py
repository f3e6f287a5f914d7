"""Logistic regression by scikit-learn."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

client = ClientApp()
server = ServerApp()


def examples(partition):
    digits = load_digits()
    mine = range(partition, 400, 10)[:40]
    return torch.tensor(digits.images[mine, None], dtype=torch.float32) / 16, torch.tensor(digits.target[mine])


@client.train()
def train(message, context):
    x, y = examples(context.node_config["partition-id"])
    fitted = LogisticRegression(max_iter=20).fit(x.flatten(1).numpy(), y.numpy())
    arrays = ArrayRecord([np.resize(fitted.coef_, (10, 64)), np.resize(fitted.intercept_, 10)])
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(y)})}), reply_to=message)


@server.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros((10, 64)), np.zeros(10)]), num_rounds=rounds)
