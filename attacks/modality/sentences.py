"""Sentences as private data."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgauge.attacks.modality.base import PERCENT, MainMetric, Mark, Measured, Modality
from fedgauge.attacks.modality.image_metrics import Metric
from fedgauge.attacks.modality.text_metrics import match_sentences, text_metrics
from fedgauge.client.components import Table
from fedgauge.client.data.corpora import Text

TEXT_ATTACKS = "fedgauge.text_attacks"  # a group of the registry


@dataclass(frozen=True, eq=False)
class SentenceModality(Modality):
    """Sentences (L,) of token ids, paired by ROUGE-1 and ROUGE-2 and compared by ROUGE-1."""

    dataset: Text

    main = MainMetric(
        "ROUGE-1 (%)", **PERCENT, metric="rouge1", name="ROUGE-1", private="sentence",
        margin=50.0, beyond="whole, or with a score at least 50 points above every baseline's",
        whole_as="with every word, in any order",
    )  # fmt: skip
    measured: ClassVar = {
        "rouge1": main,
        "rouge2": Measured("ROUGE-2 (%)", **PERCENT),
        "rougeL": Measured("ROUGE-L (%)", **PERCENT),
        "token_accuracy": Measured("words in their places (%)", **PERCENT),
        "exact": Measured("exact sentences (%)", **PERCENT),
        "rouge1_special": Measured("ROUGE-1 with special tokens (%)", **PERCENT),
        "rouge2_special": Measured("ROUGE-2 with special tokens (%)", **PERCENT),
        "rougeL_special": Measured("ROUGE-L with special tokens (%)", **PERCENT),
    }
    baselines: ClassVar = {"random_words": "random_words"}
    attacks = (TEXT_ATTACKS,)
    shown_as = "text"
    gives_lengths = True
    parts = "tokens"
    condition = "lengths {}"

    @classmethod
    def holds(cls, x: Tensor) -> bool:
        return x.dim() == 2 and x.dtype == torch.int64

    def metrics(self, gallery: Tensor) -> list[Metric]:
        return text_metrics(self.dataset.tokenizer)

    def pairing(self, truth: Tensor, guess: Tensor) -> Tensor:
        return match_sentences(truth, guess, self.dataset.tokenizer)

    def small_model(self) -> Table:
        return {"use": "tiny_bert" if self.dataset.task == "classification" else "tiny_gpt2"}

    def words(self, x: Tensor) -> list[str]:
        tokenizer = self.dataset.tokenizer
        return tokenizer.tokens(x[x != tokenizer.pad].tolist())

    def marked(self, guess: Tensor, truth: Tensor | None) -> tuple[tuple[str, Mark], ...]:
        """A guess's tokens, each right in its place, misplaced (the truth has it elsewhere) or wrong."""
        tokenizer, pad = self.dataset.tokenizer, self.dataset.tokenizer.pad
        ids: list[int] = guess.tolist()
        true: list[int] = [] if truth is None else truth.tolist()
        here = [i < len(true) and true[i] == token for i, token in enumerate(ids)]
        spare = Counter(token for i, token in enumerate(true) if not (i < len(here) and here[i]))
        marks: list[tuple[str, Mark]] = []
        for token, right in zip(ids, here, strict=True):
            if token == pad:
                continue
            mark: Mark = "right" if right else "misplaced" if spare[token] > 0 else "wrong"
            spare[token] -= mark == "misplaced"
            marks.append((tokenizer.tokens([token])[0], mark))
        return tuple(marks)
