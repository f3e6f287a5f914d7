"""Private text: sentences as token ids, from public corpora, a user's own table, or a small grammar without a file.

A data set comes with its tokenizer, and a model that was trained with another tokenizer refuses it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedgauge.client.components import Part, Range
from fedgauge.client.data.dataset import Dataset, Parts
from fedgauge.client.data.grammar import sentences
from fedgauge.client.data.table_files import read_table
from fedgauge.client.data_folder import data_folder
from fedgauge.client.files import reading
from fedgauge.client.models.losses import IGNORED
from fedgauge.client.models.tokenizer import WORDPIECE, Task, Tokenizer, framed, load_tokenizer, offline, wordpiece
from fedgauge.client.rng import generator

Longer = Literal["cut", "drop"]
MOST_TESTED = 2000  # pieces; every round evaluates them all
Length = Annotated[int, Range("from 2 to 1048576", lambda n: 2 <= n <= 1 << 20)]
Vocabulary = Annotated[int, Range("at least 200", lambda n: n >= 200)]  # it has every letter twice


@dataclass(frozen=True, eq=False)
class Text(Dataset):
    """Sentences x (N, L) int64, padded on the right.

    Labels y are (N,) int64, or (N, L) for next_token: the words themselves, -100 on padding; the loss shifts them by one.
    """

    dtype: ClassVar[torch.dtype] = torch.int64
    dimensions: ClassVar[int] = 2

    further: ClassVar[tuple[str, ...]] = ("tokenizer", "task")

    tokenizer: Tokenizer
    task: Task

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        every = torch.cat([self.x, self.x_test])
        if not 0 <= int(every.min()) <= int(every.max()) < self.tokenizer.size:
            yield f"tokens must be those of the tokenizer, 0..{self.tokenizer.size - 1}"


# ------------------------------------------------------------------------------------------------------------- corpora

Row = tuple[str, int]


class Corpus(NamedTuple):
    """Sentences with their classes, for training and for test."""

    train: Sequence[Row]
    test: Sequence[Row]


def csv(
    path: Path,
    text: str = "text",
    label: str = "label",
    classes: Sequence[str] | None = None,
    test: Part = 0.2,
    length: Length = 32,
    tokenizer: str = WORDPIECE,
    tokenizer_folder: Path | None = None,
    vocabulary: Vocabulary = 2000,
    task: Task = "classification",
    longer: Longer = "cut",
) -> Text:
    """Sentences in a CSV file in UTF-8 with the columns' names in its first line.

    Args:
        text, label: its columns of sentences and of classes (numbers from 0, or names); next_token reads no label.
        classes: the names of all classes in order, if a file may lack some; default: those that occur, in alphabetical
            order.
        test: the share of the sentences that no client trains on, above 0 and below 1.
        length: tokens of every sentence, with its first and last special token; shorter ones are padded on the right.
        tokenizer: wordpiece (built from the training sentences), minilm, or a model on Hugging Face's hub. Parties with tables of
            their own, as deployed clients, need the same tokenizer: a name or a folder.
        tokenizer_folder: folder of a model, instead of a name.
        vocabulary: the most words of a wordpiece tokenizer.
        task: what is learnt: the class of a sentence, or each word from those before it.
        longer: whether sentences that do not fit are cut before their last special token, or dropped.

    Raises:
        ValueError: the file cannot be read, or holds a single class.
    """
    columns = [text] if task == "next_token" else [text, label]
    table = read_table(path, columns, needed=columns)
    cells = [["" if c is None else str(c).strip() for c in table[name].to_pylist()] for name in columns]
    kept = [row for row in zip(*cells, strict=True) if row[0]]
    labels, count, names = [0] * len(kept), 2, tuple[str, ...]()
    if task == "classification":
        written = [row[1] for row in kept]
        if not all(written):
            raise ValueError(f"{path}: some sentences have no label in column {label!r}: leave such rows out")
        if classes is None and all(v.isascii() and v.isdigit() and len(v) < 6 for v in written):
            labels = [int(v) for v in written]
            count = max(labels, default=0) + 1
        else:
            names = tuple(sorted(set(written))) if classes is None else tuple(classes)
            labels, count = numbers(written, names, f"{path}: column {label!r}"), len(names)
    rows = [(row[0], y) for row, y in zip(kept, labels, strict=True)]
    corpus = _corpus(rows, held_out(len(rows), test, path).tolist())
    words = _tokenizer(corpus, tokenizer, tokenizer_folder, vocabulary)
    found = _text(path.stem, corpus, count, words, length, task, longer)
    fitted = ("classes",) if task == "classification" and classes is None else ()
    own = ("tokenizer",) if tokenizer == WORDPIECE and tokenizer_folder is None else ()
    return replace(found, names=names, fitted=(*fitted, *own))


def _corpus(rows: Sequence[Row], tested: Sequence[bool]) -> Corpus:
    return Corpus(*([row for row, t in zip(rows, tested, strict=True) if t == part] for part in (False, True)))


def numbers(written: Sequence[str], classes: Sequence[str], where: str) -> list[int]:
    """The place of each name among those of the classes.

    Raises:
        ValueError: it is none of them.
    """
    place = {name: k for k, name in enumerate(classes)}
    if strange := [v for v in written if v not in place]:
        raise ValueError(f"{where} has {strange[0]!r}, which is none of classes ({', '.join(classes)})")
    return [place[v] for v in written]


def held_out(count: int, share: float, path: Path) -> Tensor:
    """Choose the test part by position only, so that no example's content moves another. Never all or none."""
    if count < 2:
        raise ValueError(f"{path} needs at least two examples, one of them for test, and has {count}")
    order = torch.randperm(count, generator=generator("test part", count))
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[order[: min(max(1, round(share * count)), count - 1)]] = True
    return chosen


def parted(x: Tensor, y: Tensor, share: float, path: Path) -> Parts:
    tested = held_out(len(x), share, path)
    return x[~tested], y[~tested], x[tested], y[tested]


def _labelled(
    name: str,
    description: str,
    classes: tuple[str, str],
    read: Callable[[], Corpus],
    tokens: int = 32,
    words: int = 2000,
) -> Callable[..., Text]:
    """A corpus of two classes as a data set; tokens and words: its defaults for length and vocabulary."""

    def dataset(
        length: Length = tokens,
        tokenizer: str = WORDPIECE,
        tokenizer_folder: Path | None = None,
        vocabulary: Vocabulary = words,
        task: Task = "classification",
        longer: Longer = "cut",
    ) -> Text:
        corpus = read()
        own = _tokenizer(corpus, tokenizer, tokenizer_folder, vocabulary)
        found = _text(name, corpus, 2, own, length, task, longer)
        return replace(found, names=classes if task == "classification" else ())

    dataset.__name__ = dataset.__qualname__ = name  # its name in scenarios
    dataset.__doc__ = f"{description}.\n\n    Args: as for csv.\n    "
    return dataset


def _made_up() -> Corpus:
    found = sentences()
    cut = len(found) // 5
    return Corpus(found[cut:], found[:cut])


def _glue(name: str, columns: Sequence[str], folder: Path) -> Corpus:
    return Corpus(*(_table(folder / name.format(part), columns) for part in ("train", "dev")))


def _rotten_tomatoes(folder: Path) -> Corpus:
    """The local files have no test part: every tenth review is taken for test."""
    lines = [_lines(folder / f"rt-polarity.{kind}") for kind in ("neg", "pos")]
    both = [(line.strip(), label) for pair in zip(*lines, strict=True) for label, line in enumerate(pair)]
    return _corpus(both, [i % 20 < 2 for i in range(len(both))])


_GLUE, _PARTS = "nyu-mll/glue", ("train", "validation")
_OPINIONS, _JUDGED = ("negative", "positive"), ("unacceptable", "acceptable")
_PHRASES = "4,000 sentences of a small grammar, about private life (class 0) or work (1); no file needed"
# each federation of a process reads the same sentences
phrases = cache(_labelled("phrases", _PHRASES, ("private life", "work"), _made_up, 16, 1500))
_COLA = "CoLA, whether 8,551 sentences of linguists are acceptable"
_read_cola = partial(_glue, "in_domain_{}.tsv", ("source", "label", "mark", "sentence"))
cola = _labelled("cola", _COLA, _JUDGED, lambda: _local_or_hub("cola", _read_cola, _GLUE, "cola", "sentence", _PARTS))
_SST2 = "SST-2, film reviews for or against"
_read_sst2 = partial(_glue, "{}.tsv", ("sentence", "label"))
sst2 = _labelled("sst2", _SST2, _OPINIONS, lambda: _local_or_hub("sst2", _read_sst2, _GLUE, "sst2", "sentence", _PARTS))
_REVIEWS = ("cornell-movie-review-data/rotten_tomatoes", None, "text", ("train", "test"))
rotten_tomatoes = _labelled(
    "rotten_tomatoes",
    "Rotten Tomatoes, 10,662 film reviews",
    _OPINIONS,
    lambda: _local_or_hub("rotten_tomatoes", _rotten_tomatoes, *_REVIEWS),
)


def wikitext2(
    length: Length = 16, tokenizer: str = WORDPIECE, tokenizer_folder: Path | None = None, vocabulary: Vocabulary = 2000
) -> Text:
    """WikiText-2 in pieces of exactly length tokens, for next_token.

    Headings are left out. Without train.txt, training uses the validation part. The test part is cut to its first pieces.

    Args: as for csv.
    """

    def read(folder: Path) -> Corpus:
        first = "train" if (folder / "train.txt").exists() else "valid"
        return Corpus(*([(line, 0) for line in _lines(folder / f"{part}.txt")] for part in (first, "test")))

    hub = ("Salesforce/wikitext", "wikitext-2-v1", "text", ("train", "test"))
    corpus = Corpus(*(_prose(part) for part in _local_or_hub("wikitext2", read, *hub)))
    words = _tokenizer(corpus, tokenizer, tokenizer_folder, vocabulary)
    x, x_test = (_pieces([line for line, _ in part], words, length) for part in corpus)
    x_test = x_test[:MOST_TESTED]
    return Text("wikitext2", x, x, x_test, x_test, words.size, (), (), words, "next_token")


def _text(name: str, corpus: Corpus, classes: int, words: Tokenizer, length: int, task: Task, longer: Longer) -> Text:
    """The sentences as token ids, each sentence once and none empty."""
    start, end = words.frame(task)
    room = length - len(start) - len(end)

    def numbered(part: Sequence[Row]) -> tuple[Tensor, Tensor]:
        pairs = zip(words.encode_all([sentence for sentence, _ in part]), part, strict=True)
        kept = [(i, label) for i, (_, label) in pairs if i and room > 0 and (longer == "cut" or len(i) <= room)]
        if not kept:
            raise ValueError(f'{name} has no sentence of {room} tokens or fewer: raise length, or set longer = "cut"')
        x = framed([i for i, _ in kept], length, words.pad, start, end)
        return x, targets(x, words.pad) if task == "next_token" else torch.tensor([label for _, label in kept])

    parts = (*numbered(corpus.train), *numbered(corpus.test))
    return Text(name, *parts, words.size if task == "next_token" else classes, (), (), words, task)


def targets(x: Tensor, pad: int) -> Tensor:
    """The labels of next_token: the words themselves (N, L), -100 on padding."""
    return torch.where(x == pad, IGNORED, x)


def _tokenizer(corpus: Corpus, name: str, folder: Path | None, vocabulary: int) -> Tokenizer:
    if folder is not None or name != WORDPIECE:
        return load_tokenizer(folder or name)
    return wordpiece([sentence for sentence, _ in corpus.train], vocabulary)


def _pieces(lines: Sequence[str], words: Tokenizer, length: int) -> Tensor:
    """Running text cut into pieces (N, length); a shorter last piece is dropped."""
    ids = torch.tensor([i for line in words.encode_all(lines) for i in line], dtype=torch.int64)
    return ids[: len(ids) // length * length].view(-1, length)


def _prose(part: Sequence[Row]) -> list[Row]:
    return [(line.strip(), label) for line, label in part if line.strip() and not line.strip().startswith("= ")]


def _local_or_hub(
    name: str, read: Callable[[Path], Corpus], path: str, subset: str | None, column: str, parts: Sequence[str]
) -> Corpus:
    """A corpus from its local folder, or else these parts of a dataset on Hugging Face's hub."""
    folder = data_folder()
    local = folder / "text" / name if folder else None
    if local is not None and local.is_dir():
        return read(local)
    try:
        if offline():
            raise OSError("downloads are off")
        import datasets

        stored = datasets.load_dataset(path, subset)
    except Exception as error:  # the hub's client raises its own, requests', and OSError
        raise FileNotFoundError(f"{name} is not in FEDGAUGE_DATA and cannot be downloaded: {error}") from error
    return Corpus(*([(row[column], int(row.get("label", 0))) for row in stored[part]] for part in parts))


def _lines(path: Path) -> list[str]:
    with reading(path, "text in UTF-8"):
        text = path.read_text(encoding="utf-8")
    return text.splitlines()


def _table(path: Path, names: Sequence[str]) -> list[Row]:
    """The columns sentence and label of a file without header, with tabs between."""
    table = read_table(path, names, names, "\t")
    labels = numbers(table["label"].to_pylist(), ("0", "1"), f"{path}: the label")
    return [(sentence.strip(), label) for sentence, label in zip(table["sentence"].to_pylist(), labels, strict=True)]
