"""Threat models whose attacker trains on auxiliary sentences."""

from typing import Any

import torch

from fedgauge.attacks.base import Knowledge, Reconstruction, Wave
from fedgauge.attacks.modality.text_metrics import token_accuracy
from fedgauge.client.chain import Chain, chain
from fedgauge.client.data.corpora import Text, phrases
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.language import LanguageModel, tiny_bert, transformer3
from fedgauge.client.update import Batch
from tests.attacks.text.small_text import seen

SGD = chain(local_sgd(1.0))
CLASSIFIED = phrases(length=8, vocabulary=400)
SPOKEN = phrases(length=6, vocabulary=400, task="next_token")


def model_for(data: Text, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    if data.task == "next_token":
        return transformer3(data.shape, data.tokenizer, data.task, layers=1, width=16, heads=2, hidden=16, **options)
    return tiny_bert(data.shape, data.tokenizer, data.task, 2, layers=1, width=16, heads=2, **options)


def threat(
    data: Text, auxiliary: int = 300, links: Chain = SGD, size: int = 1, clients: int = 2, **options: Any
) -> tuple[Wave, Knowledge, list[Batch]]:
    """The updates of clients that hold test sentences, what an attacker with a corpus's last sentences knows, and the sentences."""
    rows = torch.arange(clients * size).view(clients, size)
    truth = [Batch(data.x_test[own], data.y_test[own]) for own in rows]
    public = Batch(data.x[-auxiliary:], data.y[-auxiliary:])
    return *seen(model_for(data, **options), truth, links.links, auxiliary=public), truth


def accuracy(found: list[Reconstruction], truth: list[Batch], data: Text) -> float:
    """Words in their places, in percent."""
    pairs = [(t.x, r.x) for t, r in zip(truth, found, strict=True) if r.x is not None]
    assert len(pairs) == len(truth)
    return float(torch.cat([token_accuracy(t, x, data.tokenizer) for t, x in pairs]).mean())
