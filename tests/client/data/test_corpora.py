"""Claims about text data: what a sentence becomes, that it becomes so everywhere, and what is refused."""

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from csv import writer
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fedgauge.client.data.batches import split
from fedgauge.client.data.corpora import Text, csv, phrases, rotten_tomatoes, sst2, wikitext2
from fedgauge.client.data.corpora import cola as read_cola
from fedgauge.client.data.grammar import sentences
from fedgauge.client.data_folder import may_download
from fedgauge.client.deployment.deployed_client import DeployedClient
from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.client.deployment.server_terms import ServerTerms
from fedgauge.client.federation import Federation
from fedgauge.client.models.tokenizer import SPECIAL, Tokenizer, framed, wordpiece
from fedgauge.client.protocol import Protocol
from tests.client.data.refusals import refused

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


@pytest.mark.full
@pytest.mark.slow
def test_every_process_makes_the_same_phrases_and_the_same_ids(tmp_path: Path) -> None:
    code = (
        "from fedgauge.client.data.corpora import phrases; d = phrases(); "
        "print(d.x.sum().item(), (d.x * d.x.roll(1)).sum().item())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    here = phrases()
    assert list(map(int, done.stdout.split())) == [int(here.x.sum()), int((here.x * here.x.roll(1)).sum())]


# ---------------------------------------------------------------------------------------------------------- tokenizers


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
    data.check()


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


def test_text_is_dealt_out_as_images_are() -> None:
    data = phrases()
    shards = split(data, 3, 0, "dirichlet", alpha=0.3, batch_size=2, auxiliary=100)
    together = torch.cat([*shards.indices, shards.auxiliary])
    assert torch.equal(together.sort().values, torch.arange(len(data.x)))
    rows = split(phrases(task="next_token"), 3, 0, auxiliary=100)
    assert sum(map(len, rows.indices)) == 3100


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"length": 1}, "length"),
        ({"length": 2}, "length"),
        ({"length": 1, "task": "next_token"}, "length"),
        ({"length": 4, "longer": "drop"}, "length"),
        ({"vocabulary": 10}, "vocabulary"),
        ({"tokenizer_folder": "missing"}, "missing"),
    ],
)
def test_unprintable_text_is_refused(arguments: dict[str, Any], name: str) -> None:
    refused(name, use="phrases", **arguments)


@pytest.mark.parametrize("change", ["x of floats", "too few y", "other y", "other words", "shorter x_test"])
def test_text_is_checked(change: str) -> None:
    data = phrases()
    changed = {
        "x of floats": {"x": data.x.float()},
        "too few y": {"y": data.y[:-1]},
        "other y": {"y": data.y + 2},
        "other words": {"x_test": data.x_test + 9999},
        "shorter x_test": {"x_test": data.x_test[:, :5]},
    }[change]
    with pytest.raises(ValueError, match="x|tokens"):
        replace(data, **changed).check()


# ---------------------------------------------------------------------------------------------------------- local files


def test_public_corpora_are_read_from_their_local_files(local_file: Callable[[str], Path]) -> None:
    local_file("text/*")
    found = read_cola()
    assert (len(found.x), len(found.x_test)) == (8551, 527)
    assert found.tokenizer.decode(found.x_test[0].tolist()) == "the sailors rode the breeze clear of the rocks."
    assert found.y_test[:5].tolist() == [1, 1, 1, 1, 0]
    assert [found.names[y] for y in found.y_test[3:5].tolist()] == ["acceptable", "unacceptable"]
    films = sst2(longer="drop")
    assert films.y[:3].unique().tolist() == [0, 1]
    tomatoes = rotten_tomatoes()
    assert films.names == tomatoes.names == ("negative", "positive")
    assert len(tomatoes.x) + len(tomatoes.x_test) == 10662
    assert torch.bincount(tomatoes.y).tolist() == [len(tomatoes.x) // 2] * 2
    wiki = wikitext2()
    assert wiki.x.shape[1] == 16 and not (wiki.x == wiki.tokenizer.pad).any()
    for data in (found, films, tomatoes, wiki):
        data.check()


@pytest.mark.usefixtures("no_local_data")
def test_without_files_and_offline_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", refuse_network)
    allowed = may_download.set(False)
    try:
        with pytest.raises(FileNotFoundError):
            read_cola()
    finally:
        may_download.reset(allowed)


def refuse_network(*args: object) -> None:
    raise AssertionError("the network was asked")


@pytest.mark.parametrize("line", ["gj04\tx\t\tSentence", "one\t1", None])
def test_a_damaged_or_missing_file_is_named(no_local_data: Path, line: str | None) -> None:
    folder = no_local_data / "text" / "cola"
    folder.mkdir(parents=True)
    for part in ("train", "dev") if line else ():
        (folder / f"in_domain_{part}.tsv").write_text(f"{line}\n")
    refused("in_domain_train.tsv", use="cola")


# ------------------------------------------------------------------------------------------------- a table of one's own

ROWS = [
    ('I feel, oddly, "fine"', "well"),
    ("my back hurts", "ill"),
    ("two\nlines", "ill"),
    ("é è", "well"),
    ("  ", "ill"),
] * 3


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Written by the standard library: what it writes, with quotes, commas and line breaks, is what CSV is."""
    path = tmp_path / "diary.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        out = writer(file)
        out.writerows([("label", "day", "text"), *((label, i, text) for i, (text, label) in enumerate(ROWS))])
    return path


def wordpiece_folder(folder: Path) -> Path:
    """A published tokenizer, of other sentences than the table's."""
    backend = wordpiece([sentence for sentence, _ in sentences()], 400).backend
    special = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    return folder


def told(data: Text) -> Counter[tuple[str, int]]:
    """Every sentence with its class, training and test together, without what frames it."""
    decode, frame = data.tokenizer.backend.decode, {"[CLS]", "[SEP]"}
    rows = torch.cat([data.x, data.x_test]), torch.cat([data.y, data.y_test])
    return Counter(
        (" ".join(w for w in decode(x[x != data.tokenizer.pad].tolist()).split() if w not in frame), int(y))
        for x, y in zip(*rows, strict=True)
    )


def test_a_table_gives_each_of_its_sentences_once_with_its_class(table: Path) -> None:
    data = csv(table, test=0.25)
    data.check()
    assert (data.name, data.classes) == ("diary", 2)
    assert (len(data.y), len(data.y_test)) == (9, 3), "a quarter of twelve, and empty rows are none"
    found = told(data)
    assert found["my back hurts", 0] == found["two lines", 0] == 3, "classes count in alphabetical order"
    assert sorted(found.values()) == [3, 3, 3, 3] and {y for _, y in found} == {0, 1}
    assert torch.equal(data.x, csv(table, test=0.25).x), "the same every time"


def test_numbers_are_classes_and_names_may_be_given_an_order(table: Path, tmp_path: Path) -> None:
    numbered = tmp_path / "numbered.csv"
    numbered.write_text("text,label\n" + "".join(f"word {i},{2 * (i % 2)}\n" for i in range(8)))
    data = csv(numbered)
    assert (data.classes, sorted(set(data.y.tolist()))) == (3, [0, 2])
    ordered = csv(table, classes=["well", "worse", "ill"])
    assert ordered.classes == 3 and set(ordered.y.tolist()) == {0, 2}
    assert ordered.y.eq(0).sum() == csv(table).y.eq(1).sum()


def test_a_parquet_file_gives_the_same_sentences(table: Path, tmp_path: Path) -> None:
    from pyarrow import csv as lines
    from pyarrow import parquet

    numbered = tmp_path / "numbered.csv"
    numbered.write_text("text,label\n" + "".join(f"{3 * i},{i % 2}\n" for i in range(8)))
    for file in (table, numbered):
        parquet.write_table(lines.read_csv(file), file.with_suffix(".parquet"))
        one, other = csv(file), csv(file.with_suffix(".parquet"))
        assert torch.equal(one.x, other.x) and torch.equal(one.y, other.y) and one.names == other.names


@pytest.mark.parametrize(
    ("content", "arguments", "name"),
    [
        ("", {}, "CSV"),
        ("text;label\na;1\n", {}, "'text'"),
        ("text,text,label\na,b,1\n", {}, "'text'"),
        ("text,label\na,b,c\n", {}, "Row #2"),
        ("text,label\na,0\nb\n", {}, "Row #3"),
        ('text,label\n"a,0\n', {}, "Row #2"),
        ("text,label\na,0\n", {}, "two examples"),
        ("text,label\na,1\nb,1\n", {}, "one class"),
        ("text,label\na,1\nb,\nc,0\n", {}, "no label"),
        ("text,label\na,x\nb,y\n", {"classes": ["x"]}, "classes"),
        ("text,label\na,0\nb,1\na,0\n", {"test": 1.0}, "test"),
        (None, {}, "own.csv"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    tmp_path: Path, content: str | None, arguments: dict[str, Any], name: str
) -> None:
    path = tmp_path / "own.csv"
    path.mkdir() if content is None else path.write_text(content)
    refused(name, use="csv", path=str(path), **arguments)


def test_a_table_says_what_was_fitted_on_its_sentences(table: Path, tmp_path: Path) -> None:
    assert csv(table, length=8).fitted == ("classes", "tokenizer")
    assert csv(table, length=8, classes=["ill", "well"]).fitted == ("tokenizer",)
    assert csv(table, task="next_token", length=8).fitted == ("tokenizer",)
    folder = wordpiece_folder(tmp_path / "words")
    given = csv(table, classes=["ill", "well"], tokenizer_folder=folder, length=8)
    assert given.fitted == () and phrases().fitted == (), "a published corpus's vocabulary is published, too"
    assert len(set(given.y.tolist())) == 2


def test_a_sentence_moves_no_other_between_training_and_test_part(table: Path, tmp_path: Path) -> None:
    folder, lines = wordpiece_folder(tmp_path / "words"), [(f"word {i}", i % 2) for i in range(40)]

    def kept(rows: list[tuple[str, int]]) -> Text:
        (tmp_path / "own.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
        return csv(tmp_path / "own.csv", classes=["0", "1"], tokenizer_folder=folder, length=8)

    before = kept(lines)
    for row in range(40):
        after = kept([("my back", 1 - label) if i == row else (text, label) for i, (text, label) in enumerate(lines)])
        changed = [(a != b).any(1).sum().item() for a, b in ((before.x, after.x), (before.x_test, after.x_test))]
        assert sorted(changed) == [0, 1], row
        assert (before.y != after.y).sum() == changed[0]


@given(st.binary(max_size=80))
@settings(max_examples=60, deadline=None)
def test_any_table_is_read_or_refused_with_its_name(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.mktemp("junk") / "junk.csv"
    path.write_bytes(b"text,label\n" + junk)
    with suppress(ValueError):
        csv(path).check()


def test_a_scenario_and_an_owners_file_train_on_a_table(table: Path) -> None:
    tables: dict[str, Any] = {
        "rounds": 1,
        "clients": 2,
        "data": {"use": "csv", "path": str(table), "length": 8, "batch_size": 2, "auxiliary": 2},
        "model": {"use": "tiny_bert"},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
    }
    protocol = Protocol.from_tables(tables)
    federation = Federation(protocol).check()
    params, buffers = federation.initial()
    simulated = federation.own_update(params, buffers, client=1, round=1)
    path = table.parent / "client.toml"
    data = {"use": "csv", "path": "diary.csv", "length": 8, "batch_size": 2, "auxiliary": 2}
    path.write_text(tomli_w.dumps({"client": 1, "data": data | {"sampling": "agreed"}, "chain": tables["chain"]}))
    own = DeployedClient.of(OwnerConfig.load(path), ServerTerms.parse(protocol.to_json()))
    deployed = own.compute(params, buffers, own.owner.batch(own.draw(1)), {})
    assert simulated.keys() == deployed.keys() and any(t.any() for t in simulated.values())
    assert all(torch.equal(simulated[k], deployed[k]) for k in simulated), "the path starts from the owner's file"
