"""Claims about text data: what a sentence becomes, that it becomes so everywhere, and what is refused."""

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from client.corpora import Text, phrases, rotten_tomatoes, sst2, wikitext2
from client.corpora import cola as read_cola
from client.data import batch_of, may_download, split
from client.datasets import wrong
from client.phrases import sentences
from client.tokenizer import SPECIAL, Tokenizer, framed, wordpiece

LINES = ("The cat, sat on the mat!", "a dog barks; it BARKS", "unbelievably éclair")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return wordpiece(LINES, 100)


# ------------------------------------------------------------------------------------------------------------- phrases


def test_phrases_are_short_distinct_and_of_two_classes_in_equal_parts() -> None:
    found = sentences()
    assert len(dict(found)) == len(found) == 4000
    assert Counter(label for _, label in found) == {0: 2000, 1: 2000}
    assert {len(s.split()) for s, _ in found} <= set(range(4, 13))
    assert len({w for s, _ in found for w in s.split()}) >= 300


def test_phrases_can_be_told_apart_by_their_words() -> None:
    # naive Bayes on word counts, from 3,200 sentences, on the 800 others
    found = sentences()
    tested, trained = found[:800], found[800:]
    counts = [Counter(w for s, label in trained if label == k for w in s.split()) for k in (0, 1)]
    totals = [sum(c.values()) + 500 for c in counts]
    right = 0
    for sentence, label in tested:
        odds = sum(
            torch.tensor((counts[1][w] + 1) / totals[1]).log() - torch.tensor((counts[0][w] + 1) / totals[0]).log()
            for w in sentence.split()
        )
        right += int((float(odds) > 0) == (label == 1))
    assert right > 760


@pytest.mark.slow
def test_every_process_makes_the_same_phrases_and_the_same_ids(tmp_path: Path) -> None:
    code = (
        "from client.corpora import phrases; d = phrases(); print(d.x.sum().item(), (d.x * d.x.roll(1)).sum().item())"
    )
    told = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "XDG_CACHE_HOME": str(tmp_path / seed)}
        told.add(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)
    assert len(told) == 1


# ---------------------------------------------------------------------------------------------------------- tokenizers


def test_a_word_piece_tokenizer_writes_what_it_has_read(words: Tokenizer) -> None:
    assert words.decode(words.encode("the dog sat on a mat")) == "the dog sat on a mat"
    assert words.tokens(words.encode("The CAT")) == ["the", "cat"]
    assert words.tokens(range(5)) == list(SPECIAL)
    assert words.decode([words.cls, *words.encode("a dog"), words.sep, words.pad]) == "a dog"  # type: ignore[list-item]


def test_unknown_words_are_spelt_in_pieces_of_known_ones(words: Tokenizer) -> None:
    assert "".join(t.removeprefix("##") for t in words.tokens(words.encode("dots"))) == "dots"
    assert words.tokens(words.encode("Ω")) == ["[UNK]"]


def test_the_vocabulary_keeps_to_its_size_with_the_commonest_words_first() -> None:
    text = ["alpha alpha alpha beta beta gamma"]
    letters = len(set("alphabetagamma"))
    room = len(SPECIAL) + 2 * letters
    assert wordpiece(text, room).size == room
    small = wordpiece(text, room + 2)
    assert small.size == room + 2
    assert small.tokens(small.encode("alpha")) == ["alpha"]


@settings(max_examples=30)
@given(st.lists(st.text(alphabet="abc .,!", min_size=1, max_size=20), min_size=1, max_size=5))
def test_nothing_of_the_corpus_is_unknown(lines: list[str]) -> None:
    own = wordpiece(lines, 60)
    assert all(SPECIAL.index("[UNK]") not in own.encode(line) for line in lines)


def test_a_sentence_is_cut_before_what_frames_its_end() -> None:
    found = framed([[7, 8, 9, 10], [7]], 5, 0, (2,), (3,))
    assert found.tolist() == [[2, 7, 8, 9, 3], [2, 7, 3, 0, 0]]


# ------------------------------------------------------------------------------------------------------------ data sets


def test_a_classified_sentence_is_framed_and_padded() -> None:
    data = phrases(length=16)
    assert (data.x.shape, data.x_test.shape, data.classes, data.shape) == ((3200, 16), (800, 16), 2, (16,))
    words = data.tokenizer
    assert (data.x[:, 0] == words.cls).all()
    assert ((data.x == words.sep).sum(1) == 1).all()
    ended = (data.x == words.sep).cumsum(1) - (data.x == words.sep).long()
    assert (data.x[ended.bool()] == words.pad).all()
    read = {words.decode(row) for row in data.x.tolist()}
    assert read <= {s for s, _ in sentences()}
    assert wrong(data) == ""


def test_the_labels_of_next_token_are_the_words() -> None:
    data = phrases(length=16, task="next_token")
    said = data.x != data.tokenizer.pad
    assert torch.equal(data.y[said], data.x[said])
    assert (data.y[~said] == -100).all()
    assert data.classes == data.tokenizer.size
    assert data.tokenizer.cls not in data.x


def test_longer_sentences_are_cut_or_dropped() -> None:
    cut, dropped = phrases(length=8), phrases(length=8, longer="drop")
    fits = [s for s, _ in sentences() if len(s.split()) <= 6]
    assert len(cut.x) == 3200 and len(dropped.x) + len(dropped.x_test) == len(fits)
    assert {dropped.tokenizer.decode(row) for row in dropped.x.tolist()} <= set(fits)


def test_a_batch_of_words_stays_as_it_is() -> None:
    data = phrases()
    batch = batch_of(data.x, data.y, torch.tensor([3, 1]))
    assert torch.equal(batch.x, data.x[[3, 1]]) and batch.x.dtype == torch.int64
    assert data.normalise(batch.x) is batch.x


def test_text_is_dealt_out_as_images_are() -> None:
    data = phrases()
    shards = split(data, 3, 0, "dirichlet", alpha=0.3, batch_size=2, auxiliary=100)
    together = torch.cat([*shards.indices, shards.auxiliary])
    assert torch.equal(together.sort().values, torch.arange(len(data.x)))
    rows = split(phrases(task="next_token"), 3, 0, auxiliary=100)
    assert sum(map(len, rows.indices)) == 3100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 1}, "length must be at least 2, got 1"),
        ({"length": 2}, "length = 2 leaves no room between the 2 tokens"),
        ({"length": 4, "longer": "drop"}, "phrases has no sentence of 2 tokens or fewer"),
        ({"vocabulary": 10}, "vocabulary must be at least 200, got 10"),
        ({"tokenizer_folder": Path("missing")}, "missing is no folder of a model"),
    ],
)
def test_what_makes_no_text_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        phrases(**arguments)


def test_what_is_wrong_with_text_is_said() -> None:
    data = phrases()
    fields = {
        k: getattr(data, k)
        for k in ("name", "x", "y", "x_test", "y_test", "classes", "mean", "std", "tokenizer", "task")
    }
    for changed, words in (
        ({"x": data.x.float()}, "x is torch.float32"),
        ({"y": data.y[:-1]}, "the labels of x are"),
        ({"x_test": data.x_test + 9999}, "x_test has tokens"),
        ({"y": data.y + 2}, "the labels of x lie in 2..3, expected 0..1"),
        ({"x_test": data.x_test[:, :5]}, "x_test is torch.int64 of shape"),
    ):
        assert words in wrong(Text(**{**fields, **changed}))


# ---------------------------------------------------------------------------------------------------------- local files


def test_public_corpora_are_read_from_their_local_files(local_data: Path) -> None:
    if not (local_data / "text").is_dir():
        pytest.skip("the local data have no text")
    found = read_cola()
    assert (len(found.x), len(found.x_test)) == (8551, 527)
    assert found.tokenizer.decode(found.x_test[0].tolist()) == "the sailors rode the breeze clear of the rocks."
    assert found.y_test[:5].tolist() == [1, 1, 1, 1, 0]
    films = sst2(longer="drop")
    assert films.y[:3].unique().tolist() == [0, 1]
    tomatoes = rotten_tomatoes()
    assert len(tomatoes.x) + len(tomatoes.x_test) == 10662
    assert torch.bincount(tomatoes.y).tolist() == [len(tomatoes.x) // 2] * 2
    wiki = wikitext2()
    assert wiki.x.shape[1] == 16 and not (wiki.x == wiki.tokenizer.pad).any()
    assert all(wrong(d) == "" for d in (found, films, tomatoes, wiki))


@pytest.mark.usefixtures("no_local_data")
def test_without_files_and_offline_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", refuse_network)
    allowed = may_download.set(False)
    try:
        with pytest.raises(FileNotFoundError, match=r"cola is neither in a local folder .* phrases needs no network"):
            read_cola()
    finally:
        may_download.reset(allowed)


def refuse_network(*args: object) -> None:
    raise AssertionError("the network was asked")


@pytest.mark.parametrize(
    ("line", "words"), [("gj04\tx\t\tSentence", "line 1: expected a label 0 or 1"), ("one\t1", "line 1")]
)
def test_a_damaged_table_is_named_with_its_line(no_local_data: Path, line: str, words: str) -> None:
    folder = no_local_data / "text" / "cola"
    folder.mkdir(parents=True)
    for part in ("train", "dev"):
        (folder / f"in_domain_{part}.tsv").write_text(line + "\n")
    with pytest.raises(ValueError, match=words):
        read_cola()


def test_a_missing_file_is_named(no_local_data: Path) -> None:
    (no_local_data / "text" / "cola").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="in_domain_train.tsv is missing"):
        read_cola()
