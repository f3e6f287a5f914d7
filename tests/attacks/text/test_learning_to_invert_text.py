"""Learning To Invert for text: training data, loss, decoding, and that it learns."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Reconstruction
from fedgauge.attacks.engine import simulator
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.attacks.grading.baselines import random_words
from fedgauge.attacks.learned.shadow_updates import ShadowTrainer, UpdateFeatures
from fedgauge.attacks.text.learning_to_invert_text import (
    SentenceNetwork,
    learning_to_invert_text,
    likeliest,
    matched_nll,
    pseudo_sentences,
)
from fedgauge.client.chain import Chain, chain
from fedgauge.client.data.corpora import Text
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.losses import IGNORED
from fedgauge.client.models.vision import mlp
from fedgauge.client.rng import generator
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign
from tests.attacks.text.shadow_text import CLASSIFIED, SGD, SPOKEN, accuracy, model_for, threat
from tests.attacks.text.small_text import read, refused

SMALL = learning_to_invert_text(hidden=64, width=32, buckets=256, rate=3e-3, patience=100)
each_task = pytest.mark.parametrize("data", [CLASSIFIED, SPOKEN], ids=["classification", "next_token"])


@each_task
@pytest.mark.parametrize("links", [SGD, chain(local_sgd(0.1, 2)), chain(prune(0.1), local_sgd(1.0))], ids=repr)
def test_simulated_updates_are_those_of_clients_that_hold_the_sentences(
    data: Text, links: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    wave, known, _ = threat(data, 20, links, 2)
    x, y = (t[:6].view(3, 2, *t.shape[1:]) for t in (data.x, data.y))
    (whole,) = Simulator(known, wave.params).updates(x, y, generator(0))
    for k in range(3):
        own = links(gradient(known.model, known.loss))(wave.params, Batch(x[k], y[k]), None)
        for name, t in own.items():
            torch.testing.assert_close(whole[name][k], t.detach(), rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(simulator, "NUMBERS", 1)  # of a large model one client at once
    parts = list(Simulator(known, wave.params).updates(x, y, generator(0)))
    assert [len(next(iter(part.values()))) for part in parts] == [1, 1, 1]
    for name, t in whole.items():
        torch.testing.assert_close(torch.cat([p[name] for p in parts]), t, rtol=1e-4, atol=1e-6)


@each_task
def test_batches_of_classified_sentences_stand_by_their_labels_and_running_text_as_it_comes(data: Text) -> None:
    wave, known, _ = threat(data, 60, size=3)
    shadow = ShadowTrainer(known, wave.params, UpdateFeatures(False, 64))
    groups = shadow.groups(False)
    assert groups.shape == (18, 3) and len(groups.unique()) == 54
    if data is CLASSIFIED:
        assert bool((shadow.auxiliary.y[groups].diff(dim=1) >= 0).all())


@each_task
def test_made_up_sentences_have_the_texts_lengths_frames_and_frequencies(data: Text) -> None:
    model, text = model_for(data), Batch(data.x[-200:], data.y[-200:])
    made, again = (pseudo_sentences(text, 5000, 2, model) for _ in range(2))
    assert torch.equal(made.x, again.x) and torch.equal(made.y, again.y)
    special = torch.tensor(sorted(model.special))
    frames = {tuple(row) for row in torch.where(torch.isin(text.x, special), text.x, -1).tolist()}
    assert {tuple(row) for row in torch.where(torch.isin(made.x, special), made.x, -1).tolist()} <= frames
    words = [x[~torch.isin(x, special)] for x in (text.x, made.x)]
    theirs, ours = (torch.bincount(w, minlength=model.vocabulary) / len(w) for w in words)
    # 20,000 draws: a share's deviation is at most 0.5 / 141
    assert float((theirs - ours).abs().max()) < 4 * 0.5 / 141
    assert not bool(((theirs == 0) & (ours > 0)).any())
    if data is SPOKEN:
        assert torch.equal(made.y, torch.where(made.x == model.pad, IGNORED, made.x))
    else:
        assert 0.45 < float(made.y.double().mean()) < 0.55


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_loss_is_the_best_pairings(sentences: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, sentences, 5, 7, generator=rng, dtype=torch.float64)
    truth = torch.randint(7, (3, sentences, 5), generator=rng)
    best = [
        min(
            sum(float(F.cross_entropy(logits[n, o], truth[n, i])) for i, o in enumerate(order)) / sentences
            for order in permutations(range(sentences))
        )
        for n in range(3)
    ]
    assert float(matched_nll(logits, truth)) == pytest.approx(sum(best) / 3)


def test_rows_are_standardised_with_the_noise_that_is_drawn_anew() -> None:
    """Each bucket sums its entries' noise: as many variances as it has entries."""
    sigma = 0.05
    wave, known, _ = threat(CLASSIFIED, 60, chain(gaussian(sigma), local_sgd(1.0)))
    shadow = ShadowTrainer(known, wave.params, UpdateFeatures(False, 64, True))
    rows, network = shadow.shadow_data(False, quiet=True).rows, SentenceNetwork([64], (1, 8, 4), 5)
    noise = sigma * shadow.view.noise(shadow.entries)
    assert float(noise.square().sum()) == pytest.approx(sigma**2 * shadow.entries)
    network.standardise(rows, noise)
    torch.testing.assert_close(network.mean, rows.mean(0))
    torch.testing.assert_close(network.deviation.square(), rows.var(0, correction=0) + noise.square())


@each_task
def test_certain_words_are_read_with_and_without_known_lengths(data: Text) -> None:
    model, x = model_for(data), data.x[:4]
    log = torch.full((*x.shape, model.vocabulary), -20.0).scatter_(2, x[..., None], 0.0)
    lengths = (x != model.pad).sum(1)
    for told in (None, lengths):
        assert torch.equal(likeliest(log, model, told), x)
    turned = likeliest(log[[2, 0, 3, 1]], model, lengths)
    assert torch.equal((turned != model.pad).sum(1), lengths), "each stands where its length does"
    assert sorted(map(tuple, turned.tolist())) == sorted(map(tuple, x.tolist()))


@given(seed=st.integers(0, 2**32 - 1), given_lengths=st.booleans())
def test_any_answer_is_framed_and_padded_on_the_right_alone(seed: int, given_lengths: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    log = (3 * torch.randn(2, 8, READER.vocabulary, generator=rng)).log_softmax(-1)
    lengths = torch.randint(3, 9, (2,), generator=rng)
    found = likeliest(log, READER, lengths if given_lengths else None)
    there = found != READER.pad
    assert bool((there[:, 1:] <= there[:, :-1]).all())
    assert not given_lengths or torch.equal(there.sum(1), lengths)
    for row in found:
        words = row[row != READER.pad].tolist()
        assert (words[0], words[-1]) == (READER.start[0], READER.end[0]) and len(words) >= 3
        assert not set(words[1:-1]) & READER.special


READER = model_for(CLASSIFIED)


def test_words_that_the_text_does_not_have_are_never_answered() -> None:
    wave, known, _ = threat(CLASSIFIED, 20, clients=6)
    answers = torch.cat([r.x for r in read(SMALL, wave, known, Budget(3)) if r.x is not None])
    assert set(answers.unique().tolist()) <= set(CLASSIFIED.x[-20:].unique().tolist()) | {READER.pad}


@pytest.mark.parametrize(
    ("links", "attack", "least"),
    [
        (chain(per_example(sign()), local_sgd(1.0)), SMALL, 40.0),
        (chain(gaussian(0.01), local_sgd(1.0)), SMALL, 25.0),
        (SGD, replace(SMALL, pseudo=1200, alone=True), 0.0),
    ],
    ids=["sign", "noise", "frequencies alone"],
)
def test_it_reads_unseen_sentences(links: Chain, attack: learning_to_invert_text, least: float) -> None:
    wave, known, truth = threat(SPOKEN, 1200, links, clients=30)
    found = read(attack, wave, known, Budget(400))
    floor = accuracy(read(random_words(), wave, known), truth, SPOKEN)
    assert accuracy(found, truth, SPOKEN) > max(least, 3 * floor)
    assert {r.status for r in found} == {"converged"} and {r.iterations for r in found} == {400}


@pytest.mark.full
def test_several_sentences_are_read_in_whatever_order() -> None:
    wave, known, truth = threat(SPOKEN, 1200, size=2, clients=15)
    lengths = torch.stack([(t.x != 0).sum(1).sort().values for t in truth])
    found = read(replace(SMALL, passes=2), wave, replace(known, lengths=lengths), Budget(400))
    for r, length in zip(found, lengths, strict=True):
        assert r.x is not None and torch.equal((r.x != 0).sum(1), length)

    def shared(answers: list[Reconstruction]) -> int:
        pairs = [(t.x, r.x) for t, r in zip(truth, answers, strict=True) if r.x is not None]
        return sum(len({*t.flatten().tolist()} & {*x.flatten().tolist()}) for t, x in pairs)

    assert shared(found) > 1.3 * shared(found[1:] + found[:1]), "an answer has more of its own update's words"


def test_packing_changes_nothing_and_what_is_trained_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    wave, known, _ = threat(CLASSIFIED, 40, clients=3)
    first = read(SMALL, wave, known, Budget(5))

    def refuse(*_: object) -> None:
        raise AssertionError("it is trained already")

    monkeypatch.setattr("fedgauge.attacks.text.learning_to_invert_text.train_inverter", refuse)
    for k, together in enumerate(first):
        (alone,) = read(SMALL, wave.of([k]), known, Budget(5))
        assert alone.x is not None and together.x is not None and torch.equal(alone.x, together.x)


def test_training_ends_with_its_seconds_or_where_held_out_sentences_become_no_likelier() -> None:
    wave, known, _ = threat(CLASSIFIED, 41, clients=1)
    (late,) = read(SMALL, wave, known, Budget(10**6, seconds=1e-3))
    assert late.status == "out_of_budget" and late.x is not None and late.reason
    (early,) = read(replace(SMALL, patience=2, rate=1.0), wave, known, Budget(5000))
    assert early.status == "converged" and early.iterations < 500


@pytest.mark.parametrize(
    ("change", "attack", "word"),
    [
        (lambda k: replace(k, model=mlp((1, 2, 2), 2)), SMALL, "language model"),
        (lambda k: replace(k, auxiliary=None), SMALL, "auxiliary"),
        (lambda k: replace(k, batch_size=100), SMALL, "400 auxiliary"),
        (lambda k: k, replace(SMALL, buckets=10**9), "buckets"),
    ],
)
def test_missing_requirements_are_reported(
    change: Callable[[Knowledge], Knowledge], attack: learning_to_invert_text, word: str
) -> None:
    wave, known, _ = threat(CLASSIFIED, 40)
    assert refused(read(attack, wave, change(known), Budget(2)), word)
