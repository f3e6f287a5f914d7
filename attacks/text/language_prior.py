"""Language models as priors: how likely the words of a guess are in their order, by a causal model.

Either a small GPT-2 on the victim's own words, trained on auxiliary text and kept on disk, or a public one, which reads what
the guess says in its own words.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgauge.attacks.learned.cache import TensorCache, digest
from fedgauge.client.models.language import LanguageModel, import_transformers
from fedgauge.client.models.tokenizer import Tokenizer, load_tokenizer, model_place
from fedgauge.client.rng import generator, seed_of

AUXILIARY = "auxiliary"
REMEMBERED = 2**16  # sentences
TOGETHER = 256  # sentences scored in one pass
HELD_OUT = 10  # one in so many auxiliary sentences says when to stop
CHECK_EVERY = 50  # steps between two looks at them
LEAST = 2  # times that a word occurs in the auxiliary text to have an embedding of its own
VERSION = 1  # of how the own model is trained: others' weights are not taken for its


class LanguagePrior(ABC):
    """Mean negative log-likelihood of sentences' words, each after those before it: the logarithm of their perplexity."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, ...], float] = {}

    def __call__(self, sentences: Sequence[Sequence[int]]) -> Tensor:
        """(N,) float64 nats a word, of sentences of the victim's token ids; those scored before are not scored again."""
        keys = [tuple(sentence) for sentence in sentences]
        new = [key for key in dict.fromkeys(keys) if key not in self._told]
        if len(self._told) + len(new) > REMEMBERED:
            self._told = {key: self._told[key] for key in keys if key in self._told}
        for first in range(0, len(new), TOGETHER):
            part = new[first : first + TOGETHER]
            self._told.update(zip(part, self.score(part).double().tolist(), strict=True))
        return torch.tensor([self._told[key] for key in keys], dtype=torch.float64)

    @abstractmethod
    def score(self, sentences: Sequence[tuple[int, ...]]) -> Tensor:
        """(N,) of sentences in one batch; 0 where a sentence has no word after another."""


def nll(log: Tensor, ids: Tensor, seen: Tensor) -> Tensor:
    """Mean over each sentence's words but the first of -log p: log p (N, L, V), ids (N, L), seen (N, L) bool."""
    rows = -log[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    kept = seen[:, 1:].to(rows.dtype)
    found: Tensor = (rows * kept).sum(1) / kept.sum(1).clamp(min=1)
    return found


# -------------------------------------------------------------------------------------------------------- the victim's words


@dataclass(frozen=True)
class LanguageModelTraining:
    """The small GPT-2, and what its training may cost.

    Args:
        layers, width, heads: of the network.
        steps: at most; it ends before where held-out sentences are predicted no better.
        batch, rate: of Adam.
        patience: looks at them without a gain.
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
            raise ValueError(f"width {self.width} of the language model does not divide among {self.heads} heads")


class TrainedPrior(LanguagePrior):
    """A small GPT-2 on the victim's words, trained on auxiliary text.

    Words that the text has only once stand for all that it does not have: they share one embedding, and what that is given is
    divided among them.

    Args:
        text: auxiliary sentences (N, L) as the data has them, with what frames them.
        pad: fills them up.
        vocabulary: of the victim.

    Attributes:
        told: mean surprise of held-out sentences before the training and after it.
    """

    def __init__(
        self, text: Tensor, pad: int, vocabulary: int, training: LanguageModelTraining, cache: TensorCache | None = None
    ) -> None:
        super().__init__()
        if int((text[:, 1:] != pad).sum()) == 0:
            raise ValueError("the auxiliary text has no word after another to learn a language from")
        counts = torch.bincount(text[text != pad].flatten(), minlength=vocabulary)
        known = (counts >= LEAST).nonzero().flatten()
        self._place = torch.zeros(vocabulary, dtype=torch.int64)  # 0: any other word
        self._place[known] = torch.arange(1, len(known) + 1)
        self._others = max(vocabulary - len(known), 1)
        self._longest = text.shape[1]
        self._net = _gpt2(training, len(known) + 1, self._longest)
        name = digest("language model", VERSION, text.cpu(), pad, vocabulary, training)
        kept = (cache or TensorCache.own()).get(name, lambda: self._train(text.cpu(), pad, training))
        self._net.load_state_dict({k: t for k, t in kept.items() if k != "told"})
        before, after = kept["told"].tolist()
        self.held_out_nll: tuple[float, float] = (before, after)

    def score(self, sentences: Sequence[tuple[int, ...]]) -> Tensor:
        ids, seen = _padded([self._place[list(s)].tolist() for s in sentences])
        return self._nll(ids[:, : self._longest], seen[:, : self._longest])

    @torch.no_grad()
    def _nll(self, ids: Tensor, seen: Tensor) -> Tensor:
        shared = torch.zeros(self._net.config.vocab_size).index_fill(0, torch.tensor([0]), -math.log(self._others))
        # log p of one of the other words is that of all of them less the logarithm of their number
        return nll(_log(self._net, ids, seen) + shared, ids, seen)

    def _train(self, text: Tensor, pad: int, training: LanguageModelTraining) -> dict[str, Tensor]:
        """Adam on next words, the best weights by held-out sentences."""
        ids, seen = self._place[text], text != pad
        rng = generator("language model")
        order = torch.randperm(len(ids), generator=rng)
        held, own = order[: len(order) // HELD_OUT], order[len(order) // HELD_OUT :]
        held = held if len(held) else own  # of a handful of sentences
        net = self._net.train()  # it has no dropout
        optimizer = torch.optim.Adam(net.parameters(), training.rate, betas=(0.9, 0.98))
        best = first = self._held_out(ids[held], seen[held])
        weights, looks = _copied(net), 0
        with torch.enable_grad():
            for step in range(1, training.steps + 1):
                for group in optimizer.param_groups:
                    group["lr"] = training.rate * min(1.0, step / CHECK_EVERY, 1.1 - step / training.steps)
                rows = own[torch.randint(len(own), (training.batch,), generator=rng)]
                part, there = ids[rows], seen[rows]
                longest = max(int(there.sum(1).max()), 2)
                part, there = part[:, :longest], there[:, :longest]
                value = nll(_log(net, part, there), part, there).mean()
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                if step % CHECK_EVERY and step < training.steps:
                    continue
                now = self._held_out(ids[held], seen[held])
                looks = 0 if now < best else looks + 1
                if now < best:
                    best, weights = now, _copied(net)
                if looks >= training.patience:
                    break
        return {**weights, "told": torch.tensor([first, best], dtype=torch.float64)}

    def _held_out(self, ids: Tensor, seen: Tensor) -> float:
        parts = zip(ids.split(TOGETHER), seen.split(TOGETHER), strict=True)
        return float(torch.cat([self._nll(a, b) for a, b in parts]).mean())


def _log(net: Any, ids: Tensor, seen: Tensor) -> Tensor:
    """Log-probabilities (N, L, V) of what follows each word."""
    found: Tensor = net(input_ids=ids, attention_mask=seen.long()).logits.log_softmax(-1)
    return found


def _copied(net: Any) -> dict[str, Tensor]:
    """What a network learns, each tensor once by all of its names."""
    return {k: t.detach().clone() for k, t in net.state_dict().items()}


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
    """Ids (N, L), filled up on the right, and which of them are there (N, L)."""
    longest = max(2, *(len(s) for s in sentences))
    ids = torch.tensor([[*s, *[pad] * (longest - len(s))] for s in sentences], dtype=torch.int64)
    lengths = torch.tensor([len(s) for s in sentences])
    return ids, torch.arange(longest) < lengths[:, None]


# ------------------------------------------------------------------------------------------------------------- public ones


class PretrainedPrior(LanguagePrior):
    """A pre-trained causal model, by name on Hugging Face's hub or by folder.

    Where its words are not the victim's, a guess is written out and read anew. Of a folder, or offline, no hub is asked.

    Args:
        words: of the victim.
    """

    def __init__(self, source: str | Path, words: Tokenizer) -> None:
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
        self._net = net.eval().requires_grad_(False)
        start = net.config.bos_token_id
        self._start = [] if start is None else [int(start)]
        self._longest = int(getattr(net.config, "max_position_embeddings", 1024))

    @torch.no_grad()
    def score(self, sentences: Sequence[tuple[int, ...]]) -> Tensor:
        ids, seen = _padded([self._start + self._read(s) for s in sentences], self._own.pad)
        ids, seen = ids[:, : self._longest], seen[:, : self._longest]
        return nll(_log(self._net, ids, seen), ids, seen)

    def _read(self, sentence: tuple[int, ...]) -> list[int]:
        inner = [i for i in sentence if i not in self._words.special]
        return inner if self._shared else self._own.encode(self._words.decode(inner))


def load_prior(
    name: str, folder: Path | None, model: LanguageModel, text: Tensor | None, training: LanguageModelTraining
) -> LanguagePrior:
    """The prior that an attack names.

    Args:
        name: auxiliary (a small GPT-2 on the victim's words, trained on auxiliary text), or one on Hugging Face's hub.
        folder: of a model, in the place of the name.
        text: auxiliary sentences (N, L); None: there are none.

    Raises:
        ValueError: there is no such model, or no text to train one on.
    """
    if folder is not None:
        return PretrainedPrior(folder, model.tokenizer)
    if name != AUXILIARY:
        return PretrainedPrior(name, model.tokenizer)
    if text is None or not len(text):
        raise ValueError(
            "the language model is trained on auxiliary text, and there is none: set [data] auxiliary, name a public model "
            '(lm = "gpt2", or lm_folder), or go without it (lm_weight = 0)'
        )
    return TrainedPrior(text, model.pad, model.vocabulary, training)
