"""A tiny Llama with LoRA by peft: only the factors travel."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig

client = ClientApp()
server = ServerApp()
WORDS = 60


def network():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_config(config)
    return get_peft_model(base, LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM"))


@client.train()
def train(message, context):
    net = network()
    set_peft_model_state_dict(net, message.content["arrays"].to_torch_state_dict())
    rng = torch.Generator().manual_seed(context.node_config["partition-id"])
    ids = torch.randint(2, WORDS, (1, 8), generator=rng)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    net(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    arrays = ArrayRecord(get_peft_model_state_dict(net))
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)


@server.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    arrays = ArrayRecord(get_peft_model_state_dict(network()))
    FedAvg(fraction_evaluate=0.0).start(grid, arrays, num_rounds=rounds)
