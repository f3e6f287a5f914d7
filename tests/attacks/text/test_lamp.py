"""Claims about matching sentences: moves, what the update reveals, what is found, what is refused."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedgauge.attacks.base import Budget, Knowledge, Wave
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.grading.baselines import random_words
from fedgauge.attacks.label_restoration import restore
from fedgauge.attacks.modality.text_metrics import rouge
from fedgauge.attacks.text.lamp import _BatchDescent, dlg_text, lamp, tag
from fedgauge.attacks.text.sentence_layout import lengths_of, propose, shuffles
from fedgauge.client.data.corpora import Text, phrases
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import cross_entropy
from fedgauge.client.rng import generator
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch, Transform
from fedgauge.defenses.clip import clip
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign
from tests.attacks.text.small_text import bert, gpt2, refused, seen

LENGTH = 10
DATA: dict[str, Text] = {task: phrases(LENGTH, task=task) for task in ("classification", "next_token")}  # type: ignore[arg-type]
SMALL = partial(lamp, lm_steps=20, draws=4, orders=4, period=3, candidates=6)


def make(
    links: tuple[Transform, ...] = (local_sgd(1.0),),
    batch_size: int = 1,
    clients: int = 2,
    task: str = "classification",
    **settings: Any,
) -> tuple[Wave, Knowledge, list[Batch]]:
    """Updates of some clients, sorted by label as a threat model gives them."""
    data, built = DATA[task], bert if task == "classification" else gpt2
    batches = [Batch(*both) for both in zip(data.x.split(batch_size), data.y.split(batch_size), strict=True)][:clients]
    if task == "classification":
        batches = [Batch(x[y.argsort(stable=True)], y.sort().values) for x, y in batches]
    public = Batch(data.x[-200:], data.y[-200:])
    return *seen(built(data, **{"width": 32, **settings}), batches, links, auxiliary=public), batches


def test_labels_of_sentences_are_restored_under_a_weighted_loss() -> None:
    wave, known, batches = make(clients=4)  # of one example, whose weighted mean is its loss
    restored = restore(wave, replace(known, loss=cross_entropy(weight=[1.0, 3.0])))
    assert restored.tolist() == [batch.y.tolist() for batch in batches]


def streams(count: int) -> list[Any]:
    return [partial(generator, "lamp", k) for k in range(count)]


def lengths(batches: list[Batch], pad: int = 0) -> Tensor:
    return torch.stack([(b.x != pad).sum(1) for b in batches])


def words_found(truth: Tensor, guess: Tensor) -> float:
    decode = DATA["classification"].tokenizer.decode
    scores = [rouge(decode(a), decode(b))["rouge1"] for a, b in zip(truth.tolist(), guess.tolist(), strict=True)]
    return sum(scores) / len(scores)


# ---------------------------------------------------------------------------------------------------------------- moves


@given(st.integers(0, 14), st.integers(1, 60), st.integers(0, 2**31))
def test_moves_are_different_permutations_that_begin_with_none(n: int, count: int, seed: int) -> None:
    for draw in (propose, shuffles):
        orders = draw(n, count, torch.Generator().manual_seed(seed))
        assert orders[0].tolist() == list(range(n))
        assert 1 <= len(orders) <= count
        assert all(row.sort().values.tolist() == list(range(n)) for row in orders)
        assert len({tuple(row) for row in orders.tolist()}) == len(orders)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_special_tokens_stay_in_place(batch_size: int) -> None:
    wave, known, batches = make(batch_size=batch_size)
    known = replace(known, lengths=lengths(batches))
    tokens = torch.stack([f.x for f in SMALL().reconstruct(wave, known, Budget(7), streams(2)) if f.x is not None])
    truth = torch.stack([b.x for b in batches])
    special = torch.isin(truth, torch.tensor([0, 2, 3]))
    assert torch.equal(tokens[special], truth[special])
    assert not torch.isin(tokens[~special], torch.tensor([0, 1, 2, 3, 4])).any()


# ----------------------------------------------------------------------------------------------- what the update reveals


@pytest.mark.parametrize("task", ["classification", "next_token"])
def test_lengths_are_the_rows_of_the_position_embeddings_gradient(task: str) -> None:
    wave, known, batches = make(task=task, clients=4)
    assert torch.equal(lengths_of(wave, known), lengths(batches))
    assert len(lengths(batches).unique()) > 1
    wave, known, batches = make(task=task, batch_size=3)
    assert torch.equal(lengths_of(wave, known), lengths(batches).amax(1, keepdim=True).expand(-1, 3))


def test_lengths_that_a_defense_hides_are_all_positions_unless_given() -> None:
    links: list[Transform] = [gaussian(0.1), prune(0.1), sign()]
    for link in links:
        wave, known, batches = make(links=(link, local_sgd(1.0)))
        assert (lengths_of(wave, known) == LENGTH).all()
        given_lengths = replace(known, lengths=lengths(batches))
        assert torch.equal(lengths_of(wave, given_lengths), lengths(batches))
    wave, known, _ = make(freeze=["words", "positions"])
    assert (lengths_of(wave, known) == LENGTH).all()


def test_known_tokens_are_those_with_a_gradient() -> None:
    wave, known, batches = make()
    layout = dlg_text(known_tokens=True).layout(wave, known, 2)
    assert layout.allowed is not None
    for k, batch in enumerate(batches):
        inside = layout.words[layout.allowed[2 * k]].tolist()
        assert sorted(inside) == sorted(set(batch.x.flatten().tolist()) - known.model.special)  # type: ignore[operator]
    results = dlg_text(known_tokens=True).reconstruct(wave, known, Budget(3), streams(2))
    for batch, found in zip(batches, results, strict=True):
        assert found.x is not None
        assert set(found.x.flatten().tolist()) <= set(batch.x.flatten().tolist())


# ------------------------------------------------------------------------------------------------------- what is found


def test_lamp_finds_sentences_in_seconds_where_random_words_find_none() -> None:
    wave, known, batches = make(freeze=["words"])
    attack = lamp(lm_steps=50, draws=10, orders=10, candidates=20, period=40, rate=0.03, decay=0.7)
    guesses = attack.reconstruct(wave, known, Budget(120), streams(2))
    floor = random_words().reconstruct(wave, known, Budget(1), streams(2))
    truth = torch.cat([b.x for b in batches])
    scores = []
    for results in (guesses, floor):
        assert all(r.x is not None for r in results)
        scores.append(words_found(truth, torch.cat([r.x for r in results if r.x is not None])))
    assert [r.status for r in guesses] == ["converged"] * 2
    assert scores[0] > 60 and scores[0] > scores[1] + 40
    assert [r.y.tolist() for r in guesses if r.y is not None] == [b.y.tolist() for b in batches], "labels are restored"


def test_moves_put_words_in_order() -> None:
    """From the true words in a wrong order, moves that the distance alone judges lead back."""
    wave, known, batches = make(clients=4)
    own = next(k for k, b in enumerate(batches) if len(b.x.unique()) == LENGTH)
    wave = wave.of([own])
    attack = lamp(lm_weight=0, draws=1, orders=1, discrete="end", period=1, candidates=200, rate=1e-9)
    layout = attack.layout(wave, known, 1)
    truth = batches[own].x[0]
    search = _BatchDescent(attack, layout, None, streams(1), Budget(4), Deadline())
    wrong = torch.cat([truth[:1], truth[1:-1].flip(0), truth[-1:]])
    search.variables[0].copy_(layout.table[wrong])
    with torch.no_grad():
        search.run()
    tokens = layout.tokens(search.variables[0])
    assert tokens[0, 0].tolist() == truth.tolist()


def test_moves_at_the_end_alone_count_in_what_is_answered_as_published_too() -> None:
    wave, known, _ = make(clients=1, freeze=["words"])
    attack = partial(SMALL, lm_weight=1e3, published=True, draws=1, orders=1, candidates=60, rate=1e-9)
    still = attack(discrete="none").reconstruct(wave, known, Budget(9), streams(1))[0]
    moved = attack(discrete="end").reconstruct(wave, known, Budget(9), streams(1))[0]
    assert still.x is not None and moved.x is not None
    assert sorted(still.x.flatten().tolist()) == sorted(moved.x.flatten().tolist())
    assert not torch.equal(still.x, moved.x), "the language model has its way"


@pytest.mark.usefixtures("double")
def test_the_restart_of_the_lowest_objective_is_returned() -> None:
    """In float64: distances of 5e-6 come from products near 1, so float32 keeps two digits of them, which vary with the batch."""
    wave, known, _ = make()

    def only(restart: int) -> list[Any]:
        """Streams that begin with another restart."""
        return [lambda purpose, _, k=k: generator("lamp", k, purpose, restart) for k in range(2)]

    alone = [dlg_text().reconstruct(wave, known, Budget(4), only(r)) for r in range(3)]
    together = dlg_text().reconstruct(wave, known, Budget(4, restarts=3), streams(2))
    for result, *each in zip(together, *alone, strict=True):
        lowest, *others = sorted(each, key=lambda r: r.objective)
        assert others[0].objective > 1.01 * lowest.objective, "they differ by more than rounding"
        assert lowest is not each[0], "the first restart is not the best"
        assert result.objective == pytest.approx(lowest.objective, rel=1e-8)
        assert result.x is not None and lowest.x is not None and torch.equal(result.x, lowest.x)


CHAINS: dict[str, tuple[tuple[Transform, ...], int]] = {
    "batch of four": ((local_sgd(1.0),), 4),
    "local steps": ((local_sgd(0.1, steps=4),), 2),
    "slices": ((local_sgd(0.1, steps=2, batch_size=1),), 2),
    "noise": ((gaussian(0.01), local_sgd(1.0)), 1),
    "prune": ((prune(0.1), local_sgd(1.0)), 1),
    "mask": ((local_sgd(1.0), mask(0.5, seed=1)), 1),
    "sign": ((sign(), local_sgd(1.0)), 2),
    "each clip": ((per_example(clip(0.1)), gaussian(0.01), local_sgd(1.0)), 2),
}


@pytest.mark.product
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("attack", [dlg_text(), tag(), SMALL(lm_weight=0)], ids=["dlg", "tag", "lamp"])
def test_every_kind_of_client_is_met(name: str, attack: lamp) -> None:
    links, batch_size = CHAINS[name]
    wave, known, _ = make(links=links, batch_size=batch_size, width=16, heads=2)
    for found in attack.reconstruct(wave, known, Budget(3), streams(2)):
        assert found.status == "converged" and found.reason == ""
        assert found.x is not None and found.x.shape == (batch_size, LENGTH) and found.x.dtype == torch.int64
        assert found.y is not None and found.y.shape == (batch_size,)
        assert math.isfinite(found.objective) and found.iterations == 3


def test_next_words_of_a_decoder_come_back() -> None:
    wave, known, batches = make(task="next_token", tied=False)
    attack = lamp(lm_weight=0, draws=1, orders=1, rate=0.05, discrete="none")
    results = attack.reconstruct(wave, known, Budget(80), streams(2))
    guesses = torch.cat([r.x for r in results if r.x is not None])
    assert words_found(torch.cat([b.x for b in batches]), guesses) > 50


# ------------------------------------------------------------------------------------------------------ what is refused


def declined(attack: lamp, wave: Wave, known: Knowledge, word: str) -> bool:
    return refused(attack.reconstruct(wave, known, Budget(2), streams(len(wave))), word)


def test_a_missing_language_model_is_reported() -> None:
    wave, known, _ = make()
    bare = replace(known, auxiliary=None)
    assert declined(SMALL(), wave, bare, "auxiliary")
    assert declined(SMALL(lm="gpt2-that-is-not-there"), wave, known, "cannot be loaded")
    for attack in (SMALL(lm_weight=0), SMALL(discrete="none"), dlg_text()):
        assert attack.reconstruct(wave, bare, Budget(1), streams(2))[0].status == "converged", "none is asked"


def test_known_tokens_are_refused_where_nothing_tells_them() -> None:
    wave, known, _ = make(freeze=["words"])
    assert declined(SMALL(known_tokens=True), wave, known, "known_tokens")
    wave, known, _ = make(links=(gaussian(0.1), local_sgd(1.0)))
    assert declined(tag(known_tokens=True), wave, known, "known_tokens")
    wave, known, _ = make(task="next_token")
    assert declined(dlg_text(known_tokens=True), wave, known, "known_tokens")


def test_it_ends_when_its_seconds_are_over() -> None:
    wave, known, _ = make()
    for found in lamp(lm_weight=0).reconstruct(wave, known, Budget(10**9, seconds=0.05), streams(2)):
        assert found.status == "out_of_budget" and found.reason
        assert found.x is not None


# ----------------------------------------------------------------------------------------------------------- the recipes


def test_recipes_have_the_papers_weights() -> None:
    cosine, squares = lamp(), lamp("l2_l1")
    assert (cosine.weights, squares.weights) == ((1.0, 0.2), (25.0, 60.0))
    assert (cosine.rate, cosine.decay, cosine.stride) == (0.01, 0.89, 50)
    for recipe in (tag(), dlg_text()):
        assert recipe.discrete == "none" and recipe.weights == (0, 0)
        assert (recipe.rate, recipe.decay) == (0.1, 1.0)


def test_as_published_and_put_right_are_apart() -> None:
    wave, known, _ = make()
    ours, theirs = SMALL().layout(wave, known, 1), SMALL(published=True).layout(wave, known, 1)
    assert isinstance(known.model, LanguageModel)
    assert set(theirs.matcher.names) - set(ours.matcher.names) == known.model.parts.key_biases
    assert set(theirs.words.tolist()) - set(ours.words.tolist()) == known.model.special
