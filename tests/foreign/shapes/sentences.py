"""A BERT that classifies sentences, built from a configuration and trained in a loop of the app's own."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from transformers import AutoModelForSequenceClassification, BertConfig

client = ClientApp()
server = ServerApp()
WORDS = 60


def network():
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    drop = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=16, num_labels=2, **sizes, **drop)
    return AutoModelForSequenceClassification.from_config(config)


def examples(partition):
    rng = torch.Generator().manual_seed(partition)
    return torch.randint(5, WORDS, (1, 8), generator=rng), torch.tensor([partition % 2])


@client.train()
def train(message, context):
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    net.train()
    ids, labels = examples(context.node_config["partition-id"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss.backward()
    optimizer.step()
    records = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    return Message(RecordDict(records), reply_to=message)


@server.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)
