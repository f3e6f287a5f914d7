"""Language models as priors: how likely a guess's words are in their order, by a causal model.

Either a small GPT-2 over the victim's vocabulary, trained on auxiliary text and cached on disk, or a public model, which gets
the guess's text in its own tokens.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgauge.attacks.engine.cache import TensorCache, digest
from fedgauge.attacks.engine.devices import CPU
from fedgauge.attacks.learned.trainer import Trainer
from fedgauge.client.models.language import LanguageModel, import_transformers
from fedgauge.client.models.tokenizer import Tokenizer, load_tokenizer, model_place
from fedgauge.client.rng import generator, seed_of

AUXILIARY = "auxiliary"
CACHED = 2**16  # sentences whose scores are kept
TOGETHER = 256  # sentences scored in one pass
HELD_OUT = 10  # one in so many auxiliary sentences is held out and decides when to stop
CHECK_EVERY = 50  # steps between two checks of the held-out sentences
LEAST = 2  # occurrences in the auxiliary text from which on a word has its own embedding
VERSION = 1  # of the training procedure: cached weights of another version are not used


class LanguagePrior(ABC):
    """Mean negative log-likelihood of a sentence's words given the words before: the logarithm of its perplexity."""

    def __init__(self) -> None:
        self._scores: dict[tuple[int, ...], float] = {}

    def __call__(self, sentences: Sequence[Sequence[int]]) -> Tensor:
        """(N,) float64 nats per word, for sentences of the victim's token ids; known sentences are not scored again."""
        keys = [tuple(sentence) for sentence in sentences]
        new = [key for key in dict.fromkeys(keys) if key not in self._scores]
        if len(self._scores) + len(new) > CACHED:
            self._scores = {key: self._scores[key] for key in keys if key in self._scores}
        for first in range(0, len(new), TOGETHER):
            part = new[first : first + TOGETHER]
            self._scores.update(zip(part, self.score(part).double().tolist(), strict=True))
        return torch.tensor([self._scores[key] for key in keys], dtype=torch.float64)

    @abstractmethod
    def score(self, sentences: Sequence[tuple[int, ...]]) -> Tensor:
        """Nats per word (N,) of sentences in one batch; 0 for a sentence with no word after another."""


def nll(log: Tensor, ids: Tensor, seen: Tensor) -> Tensor:
    """Mean of -log p over each sentence's words but the first: log p (N, L, V), ids (N, L), mask seen (N, L) bool."""
    rows = -log[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    kept = seen[:, 1:].to(rows.dtype)
    mean: Tensor = (rows * kept).sum(1) / kept.sum(1).clamp(min=1)
    return mean


# -------------------------------------------------------------------------------------------------------- the victim's words


@dataclass(frozen=True)
class LanguageModelTraining:
    """The small GPT-2 and its training budget.

    Args:
        layers, width, heads: of the network.
        steps: at most; training ends early when held-out sentences no longer improve.
        batch, rate: of Adam.
        patience: checks without an improvement before it ends.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    steps: int = 600
    batch: int = 32
    rate: float = 2e-3
    patience: int = 3

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of the language model must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} of the language model must be a multiple of its {self.heads} heads")


class TrainedPrior(LanguagePrior):
    """A small GPT-2 over the victim's vocabulary, trained on auxiliary text.

    Words that occur once stand for all that do not occur: they share one embedding, and its probability is divided among them.

    Args:
        text: auxiliary sentences (N, L) in the data's form, with special tokens.
        pad: the padding token's id.
        vocabulary: size of the victim's vocabulary.

    Attributes:
        held_out_nll: mean nats per word of held-out sentences before and after training.
    """

    def __init__(
        self,
        text: Tensor,
        pad: int,
        vocabulary: int,
        training: LanguageModelTraining,
        cache: TensorCache | None = None,
        device: torch.device = CPU,
    ) -> None:
        super().__init__()
        text = text.cpu()
        if int((text[:, 1:] != pad).sum()) == 0:
            raise ValueError("the auxiliary text has no sentence of two words to train a language model on")
        counts = torch.bincount(text[text != pad].flatten(), minlength=vocabulary)
        known = (counts >= LEAST).nonzero().flatten()
        self._place = torch.zeros(vocabulary, dtype=torch.int64)  # 0: any other word
        self._place[known] = torch.arange(1, len(known) + 1)
        self._others = max(vocabulary - len(known), 1)
        self._longest = text.shape[1]
        self._net = _gpt2(training, len(known) + 1, self._longest).to(device)
        name = digest("language model", VERSION, text, pad, vocabulary, training)
        kept = (cache or TensorCache.own()).get(name, lambda: self._train(text, pad, training))
        self._net.load_state_dict({k: t for k, t in kept.items() if k != "told"})
        before, after = kept["told"].tolist()
        self.held_out_nll: tuple[float, float] = (before, after)

    def score(self, sentences: Sequence[tuple[int, ...]]) -> Tensor:
        ids, seen = _padded([self._place[list(s)].tolist() for s in sentences])
        return self._nll(ids[:, : self._longest], seen[:, : self._longest])

    @torch.no_grad()
    def _nll(self, ids: Tensor, seen: Tensor) -> Tensor:
        ids, seen = ids.to(self._net.device), seen.to(self._net.device)
        shared = torch.zeros(self._net.config.vocab_size, device=ids.device)
        shared[0] = -math.log(self._others)
        # log p of one of the other words is that of all of them minus the logarithm of their number
        return nll(_log(self._net, ids, seen) + shared, ids, seen)

    def _train(self, text: Tensor, pad: int, training: LanguageModelTraining) -> dict[str, Tensor]:
        """Train on next words with Adam; returns the best weights by held-out sentences."""
        ids, seen = self._place[text], text != pad
        rng = generator("language model")
        order = torch.randperm(len(ids), generator=rng)
        held, own = order[: len(order) // HELD_OUT], order[len(order) // HELD_OUT :]
        held = held if len(held) else own  # too few sentences to hold any out
        net = self._net.train()  # it has no dropout

        def loss(ids: Tensor, seen: Tensor) -> Tensor:
            return nll(_log(net, ids, seen), ids, seen).mean()

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                rows = own[torch.randint(len(own), (training.batch,), generator=rng)]
                longest = max(int(seen[rows].sum(1).max()), 2)
                yield ids[rows, :longest], seen[rows, :longest]

        trainer = Trainer(
            net,
            training.rate,
            training.patience,
            training.steps,
            loss,
            lambda step: min(1.0, (step + 1) / CHECK_EVERY, 1.1 - (step + 1) / training.steps),
            betas=(0.9, 0.98),
            fused=None,
        )
        trainer.train(batches(), CHECK_EVERY, lambda: self._held_out(ids[held], seen[held]))
        told = torch.tensor([trainer.first, trainer.lowest], dtype=torch.float64)
        return {**{k.removeprefix("w "): t for k, t in trainer.best.items()}, "told": told}

    def _held_out(self, ids: Tensor, seen: Tensor) -> float:
        parts = zip(ids.split(TOGETHER), seen.split(TOGETHER), strict=True)
        return float(torch.cat([self._nll(a, b) for a, b in parts]).mean())


def _log(net: Any, ids: Tensor, seen: Tensor) -> Tensor:
    """Log-probabilities (N, L, V) of the word after each word."""
    log: Tensor = net(input_ids=ids, attention_mask=seen.long()).logits.log_softmax(-1)
    return log


def _gpt2(training: LanguageModelTraining, vocabulary: int, positions: int) -> Any:
    transformers = import_transformers()
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_embd=training.width,
        n_layer=training.layers,
        n_head=training.heads,
        n_positions=max(positions, 2),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.use_cache = False
    with torch.random.fork_rng(devices=[]):  # transformers draws weights from the global generator
        torch.manual_seed(seed_of("language model"))
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def _padded(sentences: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Ids (N, L), padded on the right, and the mask (N, L) of real ones."""
    longest = max(2, *(len(s) for s in sentences))
    ids = torch.tensor([[*s, *[pad] * (longest - len(s))] for s in sentences], dtype=torch.int64)
    lengths = torch.tensor([len(s) for s in sentences])
    return ids, torch.arange(longest) < lengths[:, None]


# ------------------------------------------------------------------------------------------------------------- public ones


class PretrainedPrior(LanguagePrior):
    """A pre-trained causal model, by name on Hugging Face's hub or by folder.

    Where its vocabulary is not the victim's, a guess is decoded and tokenised again. With a folder, or offline, no hub is used.

    Args:
        words: the victim's tokenizer.
    """

    def __init__(self, source: str | Path, words: Tokenizer, device: torch.device = CPU) -> None:
        super().__init__()
        place = model_place(source)
        transformers = import_transformers()
        self._own = load_tokenizer(source)
        self._words = words
        self._shared = self._own.backend.get_vocab() == words.backend.get_vocab()
        try:
            net = transformers.AutoModelForCausalLM.from_pretrained(
                **place, attn_implementation="eager", dtype=torch.float32, use_safetensors=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"the language model {source} cannot be loaded: {error}") from error
        self._net = net.eval().requires_grad_(False).to(device)
        start = net.config.bos_token_id
        self._start = [] if start is None else [int(start)]
        self._longest = int(getattr(net.config, "max_position_embeddings", 1024))

    @torch.no_grad()
    def score(self, sentences: Sequence[tuple[int, ...]]) -> Tensor:
        ids, seen = _padded([self._start + self._read(s) for s in sentences], self._own.pad)
        ids, seen = (t[:, : self._longest].to(self._net.device) for t in (ids, seen))
        return nll(_log(self._net, ids, seen), ids, seen)

    def _read(self, sentence: tuple[int, ...]) -> list[int]:
        inner = [i for i in sentence if i not in self._words.special]
        return inner if self._shared else self._own.encode(self._words.decode(inner))


def load_prior(
    name: str,
    folder: Path | None,
    model: LanguageModel,
    text: Tensor | None,
    training: LanguageModelTraining,
    device: torch.device = CPU,
) -> LanguagePrior:
    """The prior that an attack names.

    Args:
        name: auxiliary (a small GPT-2 over the victim's vocabulary, trained on auxiliary text), or a model on Hugging Face's hub.
        folder: of a model; replaces the name.
        text: auxiliary sentences (N, L), if any.

    Raises:
        ValueError: there is no such model, or no text to train on.
    """
    if folder is not None:
        return PretrainedPrior(folder, model.tokenizer, device)
    if name != AUXILIARY:
        return PretrainedPrior(name, model.tokenizer, device)
    if text is None or not len(text):
        raise ValueError(
            "the language model is trained on auxiliary text, and there is none: set [data] auxiliary, name a public model "
            '(lm = "gpt2", or lm_folder), or use none (lm_weight = 0)'
        )
    return TrainedPrior(text, model.pad, model.vocabulary, training, device=device)
