"""Language models as priors: how likely a guess's words are in their order, by a causal model.

Either a small GPT-2 over the victim's vocabulary, trained on auxiliary text and cached on disk, or a public model, which gets
the guess's text in its own tokens.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedgauge.attacks.engine.cache import TensorCache, digest
from fedgauge.attacks.engine.devices import CPU
from fedgauge.attacks.learned.trainer import load, seeded, train
from fedgauge.client.models.language import import_transformers
from fedgauge.client.models.tokenizer import Tokenizer, load_files, load_tokenizer
from fedgauge.client.rng import generator

AUXILIARY = "auxiliary"
TOGETHER = 256  # sentences scored in one pass
HELD_OUT = 10  # one in so many auxiliary sentences is held out and decides when to stop
CHECK_EVERY = 50  # steps between two checks of the held-out sentences
LEAST = 2  # occurrences in the auxiliary text from which on a word has its own embedding
LAYERS, WIDTH, HEADS = 2, 128, 4  # of the small GPT-2
BATCH, RATE, PATIENCE = 32, 2e-3, 3  # of Adam, and checks without an improvement before the training ends
VERSION = 2  # of the training procedure: cached weights of another version are not used


class LanguagePrior(ABC):
    """Mean negative log-likelihood of a sentence's words given the words before: the logarithm of its perplexity.

    Args:
        net: a causal model of the package transformers.
    """

    def __init__(self, net: Any, longest: int) -> None:
        self._net, self._longest = net, longest
        self._scores: dict[tuple[int, ...], float] = {}

    def __call__(self, sentences: Sequence[Sequence[int]]) -> Tensor:
        """(N,) float64 nats per word, for sentences of the victim's token ids; known sentences are not scored again."""
        keys = [tuple(sentence) for sentence in sentences]
        new = [key for key in dict.fromkeys(keys) if key not in self._scores]
        for first in range(0, len(new), TOGETHER):
            part = new[first : first + TOGETHER]
            self._scores.update(zip(part, self.score(part).double().tolist(), strict=True))
        return torch.tensor([self._scores[key] for key in keys], dtype=torch.float64)

    @torch.no_grad()
    def score(self, sentences: Sequence[tuple[int, ...]]) -> Tensor:
        """Nats per word (N,) of sentences in one batch; 0 for a sentence with no word after another."""
        own = [torch.tensor(self.ids(s)[: self._longest], dtype=torch.int64) for s in sentences]
        ids, lengths = pad_sequence([*own, torch.zeros(2, dtype=torch.int64)], True)[:-1], [len(s) for s in own]
        return self.nll(ids, torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None])

    def nll(self, ids: Tensor, seen: Tensor) -> Tensor:
        """Nats per word (N,) of this model's ids (N, L); the mask marks the real ones."""
        ids, seen = ids.to(self._net.device), seen.to(self._net.device)
        return nll(self._net(input_ids=ids, attention_mask=seen.long()).logits.log_softmax(-1), ids, seen)

    @abstractmethod
    def ids(self, sentence: tuple[int, ...]) -> list[int]:
        """A sentence of the victim's token ids in this model's."""


def nll(log: Tensor, ids: Tensor, seen: Tensor) -> Tensor:
    """Mean of -log p over each sentence's words but the first: log p (N, L, V), ids (N, L), mask seen (N, L) bool."""
    rows = -log[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    kept = seen[:, 1:].to(rows.dtype)
    return (rows * kept).sum(1) / kept.sum(1).clamp(min=1)


class TrainedPrior(LanguagePrior):
    """A small GPT-2 over the victim's vocabulary, trained on auxiliary text.

    Words that occur once represent all that do not occur: they share one embedding, and its probability is divided among them.

    Args:
        text: auxiliary sentences (N, L) in the data's form, with special tokens.
        pad: the padding token's id.
        vocabulary: size of the victim's vocabulary.
        steps: of the training, at most; it ends early when held-out sentences no longer improve.

    Attributes:
        record: of its training; the error is the mean of nats per word of held-out sentences.
    """

    def __init__(self, text: Tensor, pad: int, vocabulary: int, steps: int, device: torch.device = CPU) -> None:
        text = text.cpu()
        counts = torch.bincount(text[text != pad].flatten(), minlength=vocabulary)
        known = (counts >= LEAST).nonzero().flatten()
        self._place = torch.zeros(vocabulary, dtype=torch.int64)  # 0: any other word
        self._place[known] = torch.arange(1, len(known) + 1)
        self._others = max(vocabulary - len(known), 1)
        transformers = import_transformers()
        config = transformers.GPT2Config(
            vocab_size=len(known) + 1,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=max(text.shape[1], 2),
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        made = partial(transformers.AutoModelForCausalLM.from_config, config, attn_implementation="eager")
        super().__init__(seeded(made, "language model").eval().to(device), text.shape[1])
        name = digest("language model", VERSION, text, pad, vocabulary, steps)
        self.record = load(self._net, TensorCache.own().get(name, lambda: self._train(text, pad, steps)))

    def ids(self, sentence: tuple[int, ...]) -> list[int]:
        return cast(list[int], self._place[list(sentence)].tolist())

    def nll(self, ids: Tensor, seen: Tensor) -> Tensor:
        # log p of one of the other words is that of all of them minus the logarithm of their number
        others = ((ids[:, 1:] == 0) & seen[:, 1:]).sum(1) / seen[:, 1:].sum(1).clamp(min=1)
        whole = super().nll(ids, seen)
        return whole + math.log(self._others) * others.to(whole)

    def _train(self, text: Tensor, pad: int, steps: int) -> dict[str, Tensor]:
        ids, seen = self._place[text], text != pad
        rng = generator("language model")
        order = torch.randperm(len(ids), generator=rng)
        held, own = order[: len(order) // HELD_OUT], order[len(order) // HELD_OUT :]
        held = held if len(held) else own  # too few sentences to hold any out

        def loss(ids: Tensor, seen: Tensor) -> Tensor:
            return LanguagePrior.nll(self, ids, seen).mean()

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                rows = own[torch.randint(len(own), (BATCH,), generator=rng)]
                longest = max(int(seen[rows].sum(1).max()), 2)
                yield ids[rows, :longest], seen[rows, :longest]

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / CHECK_EVERY, 1.1 - (step + 1) / steps)

        parts = list(zip(ids[held].split(TOGETHER), seen[held].split(TOGETHER), strict=True))
        settings = (CHECK_EVERY, RATE, PATIENCE, steps)
        return train(self._net, loss, batches(), parts, *settings, schedule=rate, betas=(0.9, 0.98), fused=None)


class PretrainedPrior(LanguagePrior):
    """A pre-trained causal model, by name on Hugging Face's hub or by folder.

    Where its vocabulary is not the victim's, a guess is decoded and tokenised again. With a folder, or offline, no hub is used.

    Args:
        words: the victim's tokenizer.
    """

    def __init__(self, source: str | Path, words: Tokenizer, device: torch.device = CPU) -> None:
        self._own, self._words = load_tokenizer(source), words
        self._shared = self._own.backend.get_vocab() == words.backend.get_vocab()
        settings = {"attn_implementation": "eager", "dtype": torch.float32, "use_safetensors": True}
        net = load_files(source, import_transformers().AutoModelForCausalLM, **settings)
        longest = int(getattr(net.config, "max_position_embeddings", 1024))
        super().__init__(net.eval().requires_grad_(False).to(device), longest)
        start = net.config.bos_token_id
        self._start = [] if start is None else [int(start)]

    def ids(self, sentence: tuple[int, ...]) -> list[int]:
        inner = [i for i in sentence if i not in self._words.special]
        return self._start + (inner if self._shared else self._own.encode(self._words.decode(inner)))
