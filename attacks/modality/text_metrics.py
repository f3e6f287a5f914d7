"""Metrics of a reconstructed sentence: how many of its words were recovered, in order or not, in percent.

ROUGE (Lin, 2004) as F measure of decoded text, once without and once with the special tokens that frame every sentence. Those
are always known, and with them even random words score well. Padding never counts.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fedgauge.attacks.modality.image_metrics import Metric
from fedgauge.client.models.libraries import import_library
from fedgauge.client.models.tokenizer import Tokenizer
from fedgauge.client.psnr import assigned

ROUGE = ("rouge1", "rouge2", "rougeL")
SPECIAL = "_special"  # suffix of metrics in which the special tokens around a sentence count
PERCENT = 100.0


def text_metrics(tokenizer: Tokenizer) -> list[Metric]:
    """All metrics of sentences (B, L) of token ids; attacks are compared by the first."""
    rouge = [
        Metric(kind + ending, partial(_rouge, tokenizer=tokenizer, kind=kind, special=bool(ending)))
        for ending in ("", SPECIAL)
        for kind in ROUGE
    ]
    accuracy = Metric("token_accuracy", partial(token_accuracy, tokenizer=tokenizer))
    return [*rouge, accuracy, Metric("exact", exact)]


def match_sentences(truth: Tensor, guess: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Order (B,) that pairs guess[order[i]] with truth[i], one to one, at the largest total of ROUGE-1 and ROUGE-2."""
    texts = [_as_text(row, tokenizer, False) for row in truth], [_as_text(row, tokenizer, False) for row in guess]
    return assigned(torch.tensor([[-sum(rouge(t, g)[kind] for kind in ROUGE[:2]) for g in texts[1]] for t in texts[0]]))


def rouge(truth: str, guess: str) -> Mapping[str, float]:
    """F measures of two texts by name, in percent; 0 for two empty texts."""
    scores = _scorer().score(truth, guess)
    return {kind: PERCENT * scores[kind].fmeasure for kind in ROUGE}


def token_accuracy(truth: Tensor, guess: Tensor, tokenizer: Tokenizer) -> Tensor:
    """The share of a sentence's words that are in their positions."""
    counted = ~torch.isin(truth, torch.tensor(sorted(tokenizer.special)))
    return PERCENT * ((truth == guess) & counted).double().sum(1) / counted.sum(1).clamp(min=1)


def exact(truth: Tensor, guess: Tensor) -> Tensor:
    """100 where every token and the length are right, else 0."""
    return PERCENT * (truth == guess).all(1).double()


def _rouge(truth: Tensor, guess: Tensor, tokenizer: Tokenizer, kind: str, special: bool) -> Tensor:
    pairs = zip(truth, guess, strict=True)
    values = [rouge(_as_text(t, tokenizer, special), _as_text(g, tokenizer, special))[kind] for t, g in pairs]
    return torch.tensor(values, dtype=torch.float64)


def _as_text(row: Tensor, tokenizer: Tokenizer, special: bool) -> str:
    """A sentence as text, with its special tokens as words where they count."""
    ids: list[int] = row.tolist()
    framing = {
        i: f" {name} " for i, name in ((tokenizer.cls, "cls"), (tokenizer.sep, "sep")) if i is not None and special
    }
    # at their positions, since ROUGE-2 and ROUGE-L depend on the order
    runs = ((i, list(run)) for i, run in groupby(ids, lambda i: i if i in framing else None))
    return "".join(tokenizer.decode(run) if i is None else framing[i] * len(run) for i, run in runs)


@lru_cache(maxsize=1)
def _scorer() -> Any:
    return import_library("rouge_score.rouge_scorer", "text").RougeScorer(list(ROUGE))
