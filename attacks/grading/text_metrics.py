"""Metrics of a reconstructed sentence: how many of its words came back, in order or not, in percent.

ROUGE (Lin, 2004) as F measure of decoded text, once without and once with the tokens that frame every sentence: those come
back of themselves, and with them words drawn at random score well. Padding never counts.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fedgauge.attacks.grading.image_metrics import Metric
from fedgauge.client.models.tokenizer import Tokenizer

ROUGE = ("rouge1", "rouge2", "rougeL")
SPECIAL = "_special"  # ends the name of a metric in which the tokens that frame a sentence count
PERCENT = 100.0


def text_metrics(words: Tokenizer) -> list[Metric]:
    """Every metric of sentences (B, L) of token ids; the first is the one by which attacks are compared."""
    rouge = [
        Metric(kind + ending, "%", partial(_rouge, words=words, kind=kind, special=bool(ending)))
        for ending in ("", SPECIAL)
        for kind in ROUGE
    ]
    own: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "token_accuracy": partial(token_accuracy, words=words),
        "exact": exact,
    }
    return [*rouge, *(Metric(name, "%", compute) for name, compute in own.items())]


def match_sentences(truth: Tensor, guess: Tensor, words: Tokenizer) -> Tensor:
    """Order (B,) that pairs guess[order[i]] with truth[i], one to one, at the largest total of ROUGE-1 and ROUGE-2."""
    from scipy.optimize import linear_sum_assignment

    written = [_written(row, words, False) for row in truth], [_written(row, words, False) for row in guess]
    gain = torch.tensor([[sum(rouge(t, g)[kind] for kind in ROUGE[:2]) for g in written[1]] for t in written[0]])
    return torch.from_numpy(linear_sum_assignment(gain.double().numpy(), maximize=True)[1])


def rouge(truth: str, guess: str) -> Mapping[str, float]:
    """F measures of two texts by name, in percent; of two empty ones 0."""
    scores = _scorer().score(truth, guess)
    return {kind: PERCENT * scores[kind].fmeasure for kind in ROUGE}


def token_accuracy(truth: Tensor, guess: Tensor, words: Tokenizer) -> Tensor:
    """The part of a sentence's words that stand in their places."""
    counted = ~torch.isin(truth, torch.tensor(sorted(words.special)))
    return PERCENT * ((truth == guess) & counted).double().sum(1) / counted.sum(1).clamp(min=1)


def exact(truth: Tensor, guess: Tensor) -> Tensor:
    """100 where every token is right, and the length with them, else 0."""
    return PERCENT * (truth == guess).all(1).double()


def _rouge(truth: Tensor, guess: Tensor, words: Tokenizer, kind: str, special: bool) -> Tensor:
    pairs = zip(truth, guess, strict=True)
    values = [rouge(_written(t, words, special), _written(g, words, special))[kind] for t, g in pairs]
    return torch.tensor(values, dtype=torch.float64)


def _written(row: Tensor, words: Tokenizer, special: bool) -> str:
    """A sentence as text."""
    ids: list[int] = row.tolist()
    framing = {i: f" {name} " for i, name in ((words.cls, "cls"), (words.sep, "sep")) if i is not None and special}
    inner = words.decode(ids)
    if not framing:
        return inner
    # where they stand: ROUGE-2 and ROUGE-L read the order
    pieces, run = [], list[int]()
    for i in ids:
        if i in framing:
            pieces += [words.decode(run), framing[i]]
            run = []
        else:
            run.append(i)
    return "".join([*pieces, words.decode(run)])


@lru_cache(maxsize=1)
def _scorer() -> Any:
    try:
        scorers: Any = importlib.import_module("rouge_score.rouge_scorer")
    except ImportError as error:
        raise ValueError("sentences are graded by the package rouge-score: pip install 'fedgauge[text]'") from error
    return scorers.RougeScorer(list(ROUGE))
