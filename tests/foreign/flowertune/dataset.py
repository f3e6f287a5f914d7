"""flowertune: the instructions that a client fine-tunes on, one a line of a text file."""

from datasets import Dataset


def load_data(path: str, partition_id: int, num_partitions: int, examples: int) -> list[str]:
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    return lines[partition_id::num_partitions][:examples]


def tokenized(texts: list[str], tokenizer, seq_length: int) -> Dataset:
    rows = Dataset.from_dict({"text": texts})
    return rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=seq_length), remove_columns="text")
