"""The Trainer of transformers, with its own optimizer, schedule and padding."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

client = ClientApp()
server = ServerApp()
TEXTS = "the cat sleeps|a dog runs home|the bird sings|a fish swims in the lake|the horse eats|a cow drinks water"
VOCABULARY = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *sorted(set(TEXTS.replace("|", " ").split()))])}


def load_tokenizer():
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def network():
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    drop = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(BertConfig(vocab_size=len(VOCABULARY), num_labels=2, **sizes, **drop))


@client.train()
def train(message, context):
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    tokenizer = load_tokenizer()
    texts, mine = TEXTS.split("|"), context.node_config["partition-id"]
    rows = [dict(tokenizer(texts[(mine + k) % 6], return_token_type_ids=False), labels=k % 2) for k in range(2)]
    settings = TrainingArguments(
        output_dir="out", report_to=[], use_cpu=True, num_train_epochs=2, per_device_train_batch_size=1,
        save_strategy="no", learning_rate=1e-3, disable_tqdm=True,
    )  # fmt: skip
    Trainer(net, settings, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer)).train()
    records = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(rows)})}
    return Message(RecordDict(records), reply_to=message)


@server.main()
def main(grid, context):
    torch.manual_seed(0)
    rounds = context.run_config["num-server-rounds"]
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)
