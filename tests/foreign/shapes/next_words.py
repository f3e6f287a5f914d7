"""A GPT-2 that predicts words, whose state_dict has a tied weight twice."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GPT2Config

client = ClientApp()
server = ServerApp()
WORDS = 60


def network():
    drop = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ends = dict(bos_token_id=None, eos_token_id=None)
    config = GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=64, n_layer=2, n_head=2, **drop, **ends)
    return AutoModelForCausalLM.from_config(config)


@client.train()
def train(message, context):
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rng = torch.Generator().manual_seed(context.node_config["partition-id"])
    ids = torch.randint(0, WORDS - 1, (2, 8), generator=rng)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    logits = net(ids).logits
    cross_entropy(logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1)).backward()
    optimizer.step()
    records = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(ids)})}
    return Message(RecordDict(records), reply_to=message)


@server.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)
