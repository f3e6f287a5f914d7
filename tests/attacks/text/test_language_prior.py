"""Claims about language models as priors: what they score, what they learn, what they remember, what they refuse."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from fedgauge.attacks.text.language_prior import PretrainedPrior, TrainedPrior, nll
from fedgauge.client.data.corpora import phrases
from fedgauge.client.models.tokenizer import Tokenizer, wordpiece

SENTENCES = ("the cat sat on the mat", "a dog barks", "the dog sat on a mat", "we sing")
FEW = 30  # steps of a training


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return wordpiece(SENTENCES, 100)


@pytest.fixture(scope="module")
def text() -> Tensor:
    return phrases(12).x[:600]


@pytest.fixture(scope="module")
def learned(text: Tensor) -> TrainedPrior:
    return TrainedPrior(text, 0, 1500, 150)


def test_the_surprise_of_a_model_that_knows_nothing_is_the_logarithm_of_its_words() -> None:
    ids, seen = torch.tensor([[3, 1, 4, 0], [2, 2, 0, 0]]), torch.arange(4) < torch.tensor([[3], [2]])
    assert nll(torch.zeros(2, 4, 7).log_softmax(-1), ids, seen).tolist() == pytest.approx([math.log(7)] * 2)
    sure = 50 * F.one_hot(ids.roll(-1, 1), 7).float()
    assert nll(sure.log_softmax(-1), ids, seen).tolist() == pytest.approx([0, 0], abs=1e-6)


def test_what_follows_a_word_has_probabilities_that_sum_to_one(text: Tensor) -> None:
    size = int(text.max()) + 50  # words that the text never has
    prior = TrainedPrior(text, 0, size, FEW)
    nats = prior([[int(text[0, 1]), w] for w in range(size)])
    assert float((-nats).exp().sum()) == pytest.approx(1.0, abs=1e-4)


def test_it_learns_the_language_of_held_out_sentences(learned: TrainedPrior) -> None:
    """An untrained model's surprise is about the logarithm of its words."""
    assert learned.record.error < math.log(1500) - 1.5


def test_sentences_as_they_are_said_are_less_surprising_than_shuffled(learned: TrainedPrior) -> None:
    others = phrases(12).x[-100:]
    rng = torch.Generator().manual_seed(0)
    said = [row[row != 0].tolist() for row in others]
    shuffled = [[s[0], *(s[1:-1][i] for i in torch.randperm(len(s) - 2, generator=rng).tolist()), s[-1]] for s in said]
    assert float((learned(shuffled) - learned(said)).median()) > 0.3


def test_the_score_of_a_sentence_does_not_depend_on_those_next_to_it(learned: TrainedPrior) -> None:
    said = [(2, 10, 20, 3), (2, 30, 3), (2, 40, 50, 60, 70, 3)]
    together = learned.score(said)
    for sentence, value in zip(said, together, strict=True):
        assert float(learned.score([sentence])[0]) == pytest.approx(float(value), rel=1e-4)
    assert learned.score([(2,)]).tolist() == [0.0]


def test_it_is_trained_once(text: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TrainedPrior(text, 0, 1500, FEW)
    state = torch.get_rng_state()

    def never(*_: object) -> Any:
        raise AssertionError("it was kept")

    monkeypatch.setattr(TrainedPrior, "_train", never)
    again = TrainedPrior(text, 0, 1500, FEW)
    assert torch.equal(first([[2, 10, 11, 3]]), again([[2, 10, 11, 3]]))
    assert first.record == again.record
    assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"
    with pytest.raises(AssertionError):
        TrainedPrior(text[1:], 0, 1500, FEW)


def saved(folder: Path, words: Tokenizer) -> None:
    """A tokenizer as its makers would publish it."""
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words.backend, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)


def public(folder: Path, words: Tokenizer, positions: int = 16) -> Any:
    """A GPT-2 of random weights with these words, as its makers would publish it."""
    saved(folder, words)
    config = transformers.GPT2Config(
        vocab_size=words.size,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=positions,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = transformers.GPT2LMHeadModel(config).eval()
    net.save_pretrained(folder)
    return net


@pytest.mark.parametrize(("own", "positions"), [(False, 16), (True, 16), (False, 3)])
def test_a_public_model_scores_its_own_loss_of_what_is_written(
    own: bool, positions: int, words: Tokenizer, tmp_path: Path
) -> None:
    """By its own tokenizer, as far as it has positions; what frames a sentence is no language."""
    theirs = wordpiece(("the cats are singing on a mat we see",), 80) if own else words
    net = public(tmp_path, theirs, positions)
    values = PretrainedPrior(tmp_path, words)([[2, *words.encode(s), 3] for s in SENTENCES])
    expected = []
    for said in SENTENCES:
        ids = torch.tensor([theirs.encode(words.decode(words.encode(said)))[:positions]])
        expected.append(float(net(input_ids=ids, labels=ids).loss.detach()))
    assert values.tolist() == pytest.approx(expected, rel=1e-4)


def test_a_model_that_is_not_there_is_refused_without_asking_a_hub(
    words: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> Any:
        raise AssertionError("a hub was asked")

    monkeypatch.setattr("socket.create_connection", never)
    monkeypatch.setattr("socket.getaddrinfo", never)
    saved(tmp_path, words)  # without a network
    for source, named in ((tmp_path / "none", "folder"), ("gpt2-that-is-not-there", "loaded"), (tmp_path, "loaded")):
        with pytest.raises(ValueError, match=named):
            PretrainedPrior(source, words)
