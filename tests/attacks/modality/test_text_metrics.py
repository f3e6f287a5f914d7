"""Claims about the metrics of sentences, on numbers that can be had on paper or from the authors' own code."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgauge.attacks.modality.text_metrics import exact, match_sentences, rouge, text_metrics, token_accuracy
from fedgauge.client.models.tokenizer import Tokenizer, framed, wordpiece

pytest.importorskip("rouge_score", reason="the extra [text] is not installed")
LINES = ("the cat sat on the mat", "a dog barks at night")
LENGTH = 10


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return wordpiece(LINES, 100)


def ids(words: Tokenizer, *sentences: str) -> Tensor:
    assert words.cls is not None and words.sep is not None
    return framed([words.encode(s) for s in sentences], LENGTH, words.pad, (words.cls,), (words.sep,))


def scores(words: Tokenizer, truth: str, guess: str) -> dict[str, float]:
    return {m.name: float(m(ids(words, truth), ids(words, guess))) for m in text_metrics(words)}


def test_rouge_counts_words_pairs_and_the_longest_common_subsequence() -> None:
    # truth: 6 words, 5 pairs; guess: 5 words, 4 pairs; common: the, cat, on, the, mat; (the cat), (on the), (the mat)
    found = rouge("the cat sat on the mat", "the cat on the mat")
    assert found["rouge1"] == pytest.approx(100 * 2 * 5 / (6 + 5))
    assert found["rouge2"] == pytest.approx(100 * 2 * 3 / (5 + 4))
    assert found["rougeL"] == pytest.approx(100 * 2 * 5 / (6 + 5))
    backwards = rouge("one two three", "three two one")
    assert (backwards["rouge1"], backwards["rouge2"]) == (100, 0)
    assert backwards["rougeL"] == pytest.approx(100 / 3)


def test_the_right_sentence_scores_all_and_no_word_of_it_nothing(words: Tokenizer) -> None:
    right = scores(words, LINES[0], LINES[0])
    assert set(right.values()) == {100.0}
    wrong = scores(words, "the cat sat", "a dog barks")
    frame = {name: v for name, v in wrong.items() if name.endswith("_special")}
    assert all(v == 0 for name, v in wrong.items() if name not in frame)
    # [CLS] and [SEP] of five tokens each come back of themselves, the first always in its place
    assert frame == pytest.approx({"rouge1_special": 40.0, "rouge2_special": 0.0, "rougeL_special": 40.0})


def test_padding_counts_in_no_form(words: Tokenizer) -> None:
    assert words.cls is not None and words.sep is not None
    for name, value in scores(words, "the cat sat", "the cat").items():
        rows = [[words.cls, *words.encode(s), words.sep] for s in ("the cat sat", "the cat")]
        metric = next(m for m in text_metrics(words) if m.name == name)
        longer = [torch.tensor([row + [words.pad] * (20 - len(row))]) for row in rows]
        assert float(metric(*longer)) == value, name


def test_words_in_their_places_and_exact_sentences(words: Tokenizer) -> None:
    truth = ids(words, "the cat sat on", "a dog barks at")
    guess = ids(words, "the cat on sat", "a dog barks at")
    assert token_accuracy(truth, guess, words).tolist() == [50.0, 100.0]
    assert exact(truth, guess).tolist() == [0.0, 100.0]
    longer = ids(words, "the cat sat on the", "a dog barks at")
    assert token_accuracy(truth, longer, words).tolist() == [100.0, 100.0]
    assert exact(truth, longer).tolist() == [0.0, 100.0]


def test_a_batch_is_paired_one_to_one_by_what_the_sentences_share(words: Tokenizer) -> None:
    truth = ids(words, "the cat sat on the mat", "a dog barks at night", "on the night")
    order = torch.tensor([2, 0, 1])
    found = match_sentences(truth, truth[order], words)
    assert torch.equal(truth[order][found], truth)
    # both guesses are nearest to the first sentence, and only one may be it
    guess = ids(words, "the cat sat on the mat", "the cat sat on a mat")
    assert sorted(match_sentences(truth[:2], guess, words).tolist()) == [0, 1]


@settings(max_examples=40)
@given(st.data())
def test_scores_lie_between_0_and_100_and_only_the_truth_is_exact(words: Tokenizer, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, words.size - 1), min_size=LENGTH, max_size=LENGTH)
    truth, guess = (torch.tensor([data.draw(row)]) for _ in range(2))
    for metric in text_metrics(words):
        (value,) = metric(truth, guess).tolist()
        assert 0 <= value <= 100 + 1e-9
        if metric.name == "exact":
            assert (value == 100) == torch.equal(truth, guess)
