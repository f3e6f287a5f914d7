"""Private text: sentences as token ids, from public corpora, a user's own table, or a small grammar without a file.

A data set comes with its tokenizer, and a model that was trained with another tokenizer refuses it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.data.grammar import sentences
from fedgauge.client.data.images import Dataset
from fedgauge.client.data.table_files import check_columns, read_csv
from fedgauge.client.files import MOST_TABLE, read_file
from fedgauge.client.local_data import cached, data_folder
from fedgauge.client.models.losses import IGNORED
from fedgauge.client.models.tokenizer import WORDPIECE, Task, Tokenizer, framed, load_tokenizer, offline, wordpiece
from fedgauge.client.rng import generator

Longer = Literal["cut", "drop"]
MOST_TESTED = 2000  # pieces; every round evaluates them all
MOST_CLASSES = 100_000  # of a table: each is a row of a model's last layer
LEAST_WORDS = 200  # of a vocabulary, which has every letter twice


@dataclass(frozen=True, eq=False)
class Text(Dataset):
    """Sentences x (N, L) int64, padded on the right.

    Labels y are (N,) int64, or (N, L) for next_token: the words themselves, -100 on padding; the loss shifts them by one.
    """

    tokenizer: Tokenizer
    task: Task

    @property
    def offered(self) -> dict[str, Any]:
        return {**super().offered, "tokenizer": self.tokenizer, "task": self.task}

    @property
    def labels(self) -> Tensor:
        return self.y if self.labelled else torch.zeros(len(self.y), dtype=torch.int64)

    @property
    def fault(self) -> str:
        for name, x, y in (("x", self.x, self.y), ("x_test", self.x_test, self.y_test)):
            labels = x.shape if self.task == "next_token" else x.shape[:1]
            if x.dtype != torch.int64 or x.dim() != 2 or not len(x) or x.shape[1:] != self.x.shape[1:]:
                return f"{name} is {x.dtype} of shape {tuple(x.shape)}, expected int64 (N, L), one sentence at least"
            if not 0 <= int(x.min()) <= int(x.max()) < self.tokenizer.size:
                return f"{name} has tokens {int(x.min())}..{int(x.max())}, and the tokenizer's are 0..{self.tokenizer.size - 1}"
            if fault := self.label_fault(name, y, labels):
                return fault
        return ""


# ------------------------------------------------------------------------------------------------------------- corpora

Row = tuple[str, int]


class Corpus(NamedTuple):
    """Sentences with their classes, for training and for test."""

    train: Sequence[Row]
    test: Sequence[Row]


def phrases(
    length: int = 16,
    tokenizer: str = WORDPIECE,
    tokenizer_folder: Path | None = None,
    vocabulary: int = 1500,
    task: Task = "classification",
    longer: Longer = "cut",
) -> Text:
    """4,000 short sentences of a small grammar, of private life (class 0) or of work (1); 3,200 for training; no file needed.

    Args:
        length: tokens of every sentence, with its first and last special token; shorter ones are padded on the right.
        tokenizer: wordpiece (built from the training sentences), minilm, or a model on Hugging Face's hub.
        tokenizer_folder: folder of a model, instead of a name.
        vocabulary: the most words of a wordpiece tokenizer.
        task: what is learnt: the class of a sentence, or each word from those before it.
        longer: whether sentences that do not fit are cut before their last special token, or dropped.
    """
    found = sentences()
    cut = len(found) // 5
    corpus = Corpus(found[cut:], found[:cut])
    found_text = _text("phrases", corpus, 2, length, tokenizer, tokenizer_folder, vocabulary, task, longer)
    return replace(found_text, names=("private life", "work") if task == "classification" else ())


def csv(
    path: Path,
    text: str = "text",
    label: str = "label",
    classes: Sequence[str] | None = None,
    test: float = 0.2,
    length: int = 32,
    tokenizer: str = WORDPIECE,
    tokenizer_folder: Path | None = None,
    vocabulary: int = 2000,
    task: Task = "classification",
    longer: Longer = "cut",
) -> Text:
    """A user's own table: a CSV file in UTF-8 whose first line names its columns.

    Args:
        text, label: its columns of sentences and of classes (numbers from 0, or names); next_token reads no label.
        classes: the names of all classes in order, if a file may lack some; default: those that occur, in alphabetical
            order.
        test: the share of the sentences that no client trains on, above 0 and below 1.
        length, tokenizer, tokenizer_folder, vocabulary, task, longer: as for phrases. If several parties have their own
            tables, as deployed clients do, all of them need the same tokenizer: a name or a folder.
    """
    sentences_, *written = _columns(path, [text] if task == "next_token" else [text, label])
    labels, count = [0] * len(sentences_), 2
    names: tuple[str, ...] = ()
    if task == "classification":
        labels, count, names = _classes(path, label, written[0], classes)
    if task == "classification" and classes is None and len(sentences_) > 1 and len(set(labels)) < 2:
        raise ValueError(f"{path} has sentences of one class only: there is nothing to learn")
    tested = held_out(len(labels), test, path).tolist()
    rows = list(zip(sentences_, labels, strict=True))
    corpus = Corpus(*([row for row, t in zip(rows, tested, strict=True) if t == part] for part in (False, True)))
    found = _text(path.stem, corpus, count, length, tokenizer, tokenizer_folder, vocabulary, task, longer)
    computed = {
        "classes": task == "classification" and classes is None,
        "tokenizer": tokenizer == WORDPIECE and tokenizer_folder is None,
    }
    return replace(found, names=names, fitted=tuple(key for key, own in computed.items() if own))


def _columns(path: Path, names: Sequence[str]) -> list[list[str]]:
    """The columns of a table with these names, stripped; rows without text are left out."""
    table = read_csv(path, names)
    check_columns(table, names, path)
    columns = [[cell.strip() for cell in table[name].to_pylist()] for name in names]
    rows = [row for row in zip(*columns, strict=True) if row[0]]
    return [[row[k] for row in rows] for k in range(len(names))]


def _classes(
    path: Path, column: str, written: Sequence[str], names: Sequence[str] | None
) -> tuple[list[int], int, tuple[str, ...]]:
    """The labels as numbers, the number of classes, and their names if they have names."""
    if names is None and all(v.isascii() and v.isdigit() and len(v) < 10 for v in written):
        found = [int(v) for v in written]
        if (most := max(found, default=0)) >= MOST_CLASSES:
            raise ValueError(
                f"{path}: column {column!r} has the label {most}; labels count from 0, to {MOST_CLASSES - 1} at most"
            )
        return found, most + 1, ()
    known = list(names) if names is not None else sorted(set(written))
    return numbers(written, known, f"{path}: column {column!r}"), len(known), tuple(known)


def numbers(written: Sequence[str], classes: Sequence[str], where: str) -> list[int]:
    """The place of each name among those of the classes; ValueError if it is none of them."""
    place = {name: k for k, name in enumerate(classes)}
    if len(place) < len(classes):
        raise ValueError("classes has a name twice")
    if strange := [v for v in written if v not in place]:
        raise ValueError(f"{where} has {strange[0]!r}, which is none of classes ({', '.join(classes)})")
    return [place[v] for v in written]


def held_out(count: int, share: float, path: Path) -> Tensor:
    """Which examples become the test part, by place alone: no example's label or content moves another. Never all or none."""
    if not 0 < share < 1:
        raise ValueError(f"test must be above 0 and below 1, got {share:g}")
    if count < 2:
        raise ValueError(f"{path} has {count} examples; with test = {share:g} it needs two at least")
    order = torch.randperm(count, generator=generator("test part", count))
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[order[: min(max(1, round(share * count)), count - 1)]] = True
    return chosen


def _labelled(
    name: str, description: str, classes: tuple[str, str], read: Callable[[Path], Corpus], *hub: Any
) -> Callable[..., Text]:
    """A corpus of two classes as a data set; read reads its local folder, hub are the arguments of _hub."""

    def dataset(
        length: int = 32,
        tokenizer: str = WORDPIECE,
        tokenizer_folder: Path | None = None,
        vocabulary: int = 2000,
        task: Task = "classification",
        longer: Longer = "cut",
    ) -> Text:
        corpus = _local_or_hub(name, read, lambda: _hub(*hub))
        found = _text(name, corpus, 2, length, tokenizer, tokenizer_folder, vocabulary, task, longer)
        return replace(found, names=classes if task == "classification" else ())

    dataset.__name__ = dataset.__qualname__ = name  # its name in scenarios
    files = f"local files under text/{name}, else downloaded on first use"
    dataset.__doc__ = f"{description}: {files}.\n\n    Args: as for phrases.\n    "
    return dataset


def _cola(folder: Path) -> Corpus:
    return Corpus(
        *(
            _table(folder / f"in_domain_{part}.tsv", ("source", "label", "mark", "sentence"))
            for part in ("train", "dev")
        )
    )


def _sst2(folder: Path) -> Corpus:
    return Corpus(*(_table(folder / f"{part}.tsv", ("sentence", "label")) for part in ("train", "dev")))


def _rotten_tomatoes(folder: Path) -> Corpus:
    """The local files have no test part: every tenth review is taken for test."""
    lines = [_lines(folder / f"rt-polarity.{kind}") for kind in ("neg", "pos")]
    both = [(line.strip(), label) for pair in zip(*lines, strict=True) for label, line in enumerate(pair)]
    tested = [i % 20 < 2 for i in range(len(both))]
    return Corpus(*([row for row, t in zip(both, tested, strict=True) if t == part] for part in (False, True)))


_GLUE, _PARTS = "nyu-mll/glue", ("train", "validation")
_OPINIONS = ("negative", "positive")
cola = _labelled(
    "cola",
    "CoLA, whether 8,551 sentences of linguists are acceptable",
    ("unacceptable", "acceptable"),
    _cola,
    _GLUE,
    "cola",
    "sentence",
    _PARTS,
)
sst2 = _labelled("sst2", "SST-2, film reviews for or against", _OPINIONS, _sst2, _GLUE, "sst2", "sentence", _PARTS)
rotten_tomatoes = _labelled(
    "rotten_tomatoes",
    "Rotten Tomatoes, 10,662 film reviews",
    _OPINIONS,
    _rotten_tomatoes,
    "cornell-movie-review-data/rotten_tomatoes",
    None,
    "text",
    ("train", "test"),
)


def wikitext2(
    length: int = 16,
    tokenizer: str = WORDPIECE,
    tokenizer_folder: Path | None = None,
    vocabulary: int = 2000,
) -> Text:
    """WikiText-2 in pieces of exactly length tokens, for next_token: local files under text/wikitext2, else downloaded.

    Headings are left out. Without train.txt, training uses the validation part. The test part is cut to its first pieces.

    Args: as for phrases.
    """

    def read(folder: Path) -> Corpus:
        first = "train" if (folder / "train.txt").exists() else "valid"
        return Corpus(*([(line, 0) for line in _lines(folder / f"{part}.txt")] for part in (first, "test")))

    def fetch() -> Corpus:
        return _hub("Salesforce/wikitext", "wikitext-2-v1", "text", ("train", "test"))

    _at_least_two(length)
    corpus = Corpus(*(_prose(part) for part in _local_or_hub("wikitext2", read, fetch)))
    words = _tokenizer(corpus, tokenizer, tokenizer_folder, vocabulary)
    x, x_test = (_pieces([line for line, _ in part], words, length) for part in corpus)
    x_test = x_test[:MOST_TESTED]
    return Text("wikitext2", x, x, x_test, x_test, words.size, (), (), words, "next_token")


def _text(
    name: str,
    corpus: Corpus,
    classes: int,
    length: int,
    tokenizer: str,
    folder: Path | None,
    vocabulary: int,
    task: Task,
    longer: Longer,
) -> Text:
    """The sentences as token ids, each sentence once and none empty."""
    _at_least_two(length)
    words = _tokenizer(corpus, tokenizer, folder, vocabulary)
    start, end = words.frame(task)
    room = length - len(start) - len(end)
    if room < 1:
        raise ValueError(
            f"length = {length} leaves no room for words beside the {len(start) + len(end)} special tokens of a sentence"
        )

    def numbered() -> dict[str, np.ndarray]:
        made: dict[str, np.ndarray] = {}
        for kind, part in zip(("", "_test"), corpus, strict=True):
            ids = words.encode_all([sentence for sentence, _ in part])
            kept = [
                (i, label) for i, (_, label) in zip(ids, part, strict=True) if i and (longer == "cut" or len(i) <= room)
            ]
            if not kept:
                raise ValueError(
                    f'{name} has no sentence of {room} tokens or fewer: raise length, or set longer = "cut"'
                )
            made[f"x{kind}"] = framed([i for i, _ in kept], length, words.pad, start, end).numpy()
            made[f"y{kind}"] = np.array([label for _, label in kept], dtype=np.int64)
        return made

    key = repr((corpus, words.backend.to_str(), words.pad, start, end, length, longer))
    kept = cached(f"text-{hashlib.sha256(key.encode()).hexdigest()[:24]}", numbered)
    x, y, x_test, y_test = (torch.from_numpy(kept[k]) for k in ("x", "y", "x_test", "y_test"))
    if task == "next_token":
        y, y_test, classes = targets(x, words.pad), targets(x_test, words.pad), words.size
    return Text(name, x, y, x_test, y_test, classes, (), (), words, task)


def targets(x: Tensor, pad: int) -> Tensor:
    """The labels of next_token: the words themselves (N, L), -100 on padding."""
    return torch.where(x == pad, IGNORED, x)


def _tokenizer(corpus: Corpus, name: str, folder: Path | None, vocabulary: int) -> Tokenizer:
    if folder is not None:
        return load_tokenizer(folder)
    if name != WORDPIECE:
        return load_tokenizer(name)
    if vocabulary < LEAST_WORDS:
        raise ValueError(f"vocabulary must be at least {LEAST_WORDS}, got {vocabulary}")
    return wordpiece([sentence for sentence, _ in corpus.train], vocabulary)


def _at_least_two(length: int) -> None:
    if length < 2:
        raise ValueError(f"length must be at least 2, got {length}")


def _pieces(lines: Sequence[str], words: Tokenizer, length: int) -> Tensor:
    """Running text cut into pieces (N, length); a shorter last piece is dropped."""
    ids = torch.tensor([i for line in words.encode_all(lines) for i in line], dtype=torch.int64)
    if len(ids) < length:
        raise ValueError(f"length = {length} is more than the whole text of {len(ids)} tokens")
    return ids[: len(ids) // length * length].view(-1, length)


def _prose(part: Sequence[Row]) -> list[Row]:
    return [(line.strip(), label) for line, label in part if line.strip() and not line.strip().startswith("= ")]


def _local_or_hub(name: str, read: Callable[[Path], Corpus], fetch: Callable[[], Corpus]) -> Corpus:
    folder = data_folder()
    local = folder / "text" / name if folder else None
    if local is not None and local.is_dir():
        return read(local)
    try:
        return fetch()
    except Exception as error:  # the hub's client raises its own, requests', and OSError
        raise FileNotFoundError(
            f"{name} is neither in a local folder (FEDGAUGE_DATA) nor to be downloaded ({error}); phrases needs no network"
        ) from error


def _hub(path: str, subset: str | None, column: str, parts: Sequence[str]) -> Corpus:
    """Rows of a dataset on Hugging Face's hub."""
    if offline():
        raise OSError("downloads are off")
    import datasets

    stored = datasets.load_dataset(path, subset)
    rows = [[(row[column], int(row.get("label", 0))) for row in stored[part]] for part in parts]
    return Corpus(*rows)


_OWN_FILES = "; put the published file there, or unset FEDGAUGE_DATA to download it"


def _lines(path: Path) -> list[str]:
    try:
        return read_file(path, MOST_TABLE).decode().splitlines()
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} is not text in UTF-8 that can be read: {error}{_OWN_FILES}") from error


def _table(path: Path, names: Sequence[str]) -> list[Row]:
    """The columns sentence and label of a file without header, with tabs between."""
    try:
        table = read_csv(path, names, names, "\t", quote=False)
    except ValueError as error:
        raise ValueError(f"{error}{_OWN_FILES}") from error
    rows = list(zip(table["sentence"].to_pylist(), table["label"].to_pylist(), strict=True))
    for number, (_, label) in enumerate(rows, 1):
        if label not in ("0", "1"):
            raise ValueError(f"{path}, line {number}: expected a label 0 or 1, got {label!r}")
    return [(sentence.strip(), int(label)) for sentence, label in rows]
