"""Learning To Invert for text: training data, loss, decoding, and that it learns."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Sentences, Wave
from fedgauge.attacks.engine import simulator
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.attacks.grading.baselines import random_words
from fedgauge.attacks.learned.shadow_updates import ShadowTrainer, UpdateFeatures, flat
from fedgauge.attacks.modality.text_metrics import token_accuracy
from fedgauge.attacks.text import learning_to_invert_text as module
from fedgauge.attacks.text.learning_to_invert_text import (
    TextInverterTraining,
    learning_to_invert_text,
    likeliest,
    matched_nll,
    pseudo_sentences,
)
from fedgauge.client.chain import Chain, chain
from fedgauge.client.data.corpora import Text, phrases
from fedgauge.client.data.images import batch_of
from fedgauge.client.models.language import LanguageModel, tiny_bert, transformer3
from fedgauge.client.models.losses import IGNORED, next_token
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign

pytest.importorskip("transformers", reason="the extra [text] is not installed")

SGD = chain(local_sgd(1.0))
SMALL = learning_to_invert_text(hidden=64, width=32, buckets=256, rate=3e-3, patience=100)


@pytest.fixture(scope="module")
def said() -> Text:
    return phrases(length=8, vocabulary=400)


@pytest.fixture(scope="module")
def running() -> Text:
    return phrases(length=6, vocabulary=400, task="next_token")


@pytest.fixture(scope="module")
def reader(said: Text) -> LanguageModel:
    return model_of(known_of(said))


def known_of(data: Text, auxiliary: int = 300, links: Chain = SGD, batch_size: int = 1) -> Knowledge:
    """A threat model whose attacker has a corpus's last sentences."""
    torch.manual_seed(0)
    if data.task == "next_token":
        model = transformer3(data.shape, data.tokenizer, data.task, layers=1, width=16, heads=2, hidden=16)
    else:
        model = tiny_bert(data.shape, data.tokenizer, data.task, 2, layers=1, width=16, heads=2)
    public = batch_of(data.x, data.y, torch.arange(len(data.x) - auxiliary, len(data.x)))
    loss = next_token() if data.task == "next_token" else F.cross_entropy
    return Knowledge(
        model, links, data.shape, data.classes, batch_size, (), (), auxiliary=public, loss=loss, text=Sentences()
    )


def seen_of(known: Knowledge, data: Text, clients: int = 2) -> tuple[Wave, list[Batch]]:
    """Test sentences' updates, and the sentences."""
    params, size = detached_params(known.model), known.batch_size
    client = known.chain(gradient(known.model, known.loss))
    truth = [batch_of(data.x_test, data.y_test, torch.arange(k * size, (k + 1) * size)) for k in range(clients)]
    updates = [client(params, batch, generator("client", k)) for k, batch in enumerate(truth)]
    seen = [Observation(1, k, params, {n: t.detach() for n, t in u.items()}) for k, u in enumerate(updates)]
    return Wave.stack(seen), truth


def run(attack: Any, wave: Wave, known: Knowledge, iterations: int, **budget: Any) -> list[Reconstruction]:
    streams = [partial(generator, "learning", client) for client in wave.clients]
    found: list[Reconstruction] = attack.reconstruct(wave, known, Budget(iterations, **budget), streams)
    return found


def model_of(known: Knowledge) -> LanguageModel:
    assert isinstance(known.model, LanguageModel)
    return known.model


# -------------------------------------------------------------------------------------------------- training data


@pytest.mark.parametrize("task", ["said", "running"])
@pytest.mark.parametrize("links", [SGD, chain(local_sgd(0.1, 2)), chain(prune(0.1), local_sgd(1.0))], ids=repr)
def test_simulated_updates_are_those_of_clients_that_hold_the_sentences(
    task: str, links: Chain, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = request.getfixturevalue(task)
    known = known_of(data, 20, links, 2)
    params = detached_params(known.model)
    x, y = (t[:6].view(3, 2, *t.shape[1:]) for t in (data.x, data.y))
    found = list(Simulator(known, params).updates(x, y, generator(0)))
    whole = {name: torch.cat([part[name] for part in found]) for name in params}
    for k in range(3):
        own = links(gradient(known.model, known.loss))(params, Batch(x[k], y[k]), None)
        for name in params:
            torch.testing.assert_close(whole[name][k], own[name].detach(), rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(simulator, "NUMBERS", 1)  # of a large model one client at once
    parts = list(Simulator(known, params).updates(x, y, generator(0)))
    assert [len(next(iter(part.values()))) for part in parts] == [1, 1, 1]
    for name in params:
        torch.testing.assert_close(torch.cat([p[name] for p in parts]), whole[name], rtol=1e-4, atol=1e-6)


def test_shadow_data_are_updates_in_buckets_as_numbers_not_as_words(said: Text) -> None:
    known = known_of(said, 40)
    shadow = ShadowTrainer(known, detached_params(known.model), UpdateFeatures(False, 64, True))
    shadow_data = shadow.shadow_data(True)
    assert shadow_data.rows.dtype == torch.float32 and shadow_data.rows.shape == (4, 64)
    x, y = (t[shadow_data.groups] for t in shadow.auxiliary)
    updates = Simulator(known, shadow.params).updates(x, y, generator(0))
    torch.testing.assert_close(shadow_data.rows, torch.cat([shadow.view.hashed(flat(u)) for u in updates]))


def test_batches_of_classified_sentences_stand_by_their_labels_and_running_text_as_it_comes(
    said: Text, running: Text
) -> None:
    for data in (said, running):
        known = known_of(data, 60, batch_size=3)
        groups = ShadowTrainer(known, detached_params(known.model), UpdateFeatures(False, 64)).groups(False)
        assert groups.shape == (18, 3) and len(groups.unique()) == 54
        if data is said:
            labels = known.auxiliary.y[groups] if known.auxiliary is not None else groups
            assert bool((labels[:, 1:] >= labels[:, :-1]).all())


def test_made_up_sentences_have_the_texts_lengths_frames_and_frequencies(said: Text, running: Text) -> None:
    for data in (said, running):
        known = known_of(data, 200)
        text, model = known.auxiliary, model_of(known)
        assert text is not None
        made = pseudo_sentences(text, 5000, 2, model)
        special = torch.tensor(sorted(model.special))
        frames = {tuple(row) for row in torch.where(torch.isin(text.x, special), text.x, -1).tolist()}
        assert {tuple(row) for row in torch.where(torch.isin(made.x, special), made.x, -1).tolist()} <= frames
        shares = []
        for x in (text.x, made.x):
            words = x[~torch.isin(x, special)]
            shares.append(torch.bincount(words, minlength=model.vocabulary) / len(words))
        # 20,000 draws: a share's deviation is at most 0.5 / 141
        assert float((shares[0] - shares[1]).abs().max()) < 4 * 0.5 / 141
        assert not bool(((shares[0] == 0) & (shares[1] > 0)).any())
        again = pseudo_sentences(text, 5000, 2, model)
        assert torch.equal(made.x, again.x) and torch.equal(made.y, again.y)
        if data is running:
            assert torch.equal(made.y, torch.where(made.x == model.pad, IGNORED, made.x))
        else:
            assert set(made.y.tolist()) == {0, 1} and 0.45 < float(made.y.double().mean()) < 0.55


# ----------------------------------------------------------------------------------------------------- what it minimises


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


def test_rows_are_standardised_with_the_noise_that_is_drawn_anew(said: Text) -> None:
    """Each bucket sums its entries' noise: as many variances as it has entries."""
    sigma = 0.05
    known = known_of(said, 60, chain(gaussian(sigma), local_sgd(1.0)))
    shadow = ShadowTrainer(known, detached_params(known.model), UpdateFeatures(False, 64, True))
    training, shadow_data = TextInverterTraining(SMALL, shadow, Budget(1)), shadow.shadow_data(False, quiet=True)
    (mean, plain), (same, noisy) = (training._statistics(shadow_data, s) for s in (0.0, sigma))
    entries = shadow.view.noise(shadow.entries).square()
    assert float(entries.sum()) == pytest.approx(shadow.entries)
    torch.testing.assert_close(mean, shadow_data.rows.mean(0))
    assert torch.equal(mean, same)
    torch.testing.assert_close(plain.square(), shadow_data.rows.var(0, correction=0))
    torch.testing.assert_close(noisy.square(), plain.square() + sigma**2 * entries)


# -------------------------------------------------------------------------------------------------------- how it answers


def certain(x: Tensor, vocabulary: int) -> Tensor:
    """Log-probabilities that name sentences (B, L) beyond doubt."""
    return torch.full((*x.shape, vocabulary), -20.0).scatter_(2, x[..., None], 0.0)


def test_what_is_certain_is_read_whatever_is_known_of_lengths(said: Text, running: Text) -> None:
    for data in (said, running):
        model = model_of(known_of(data))
        x = data.x[:4]
        log = certain(x, model.vocabulary)
        assert torch.equal(likeliest(log, model, None), x)
        lengths = (x != model.pad).sum(1)
        assert torch.equal(likeliest(log, model, lengths), x)
        order = torch.tensor([2, 0, 3, 1])
        turned = likeliest(log[order], model, lengths)
        assert torch.equal((turned != model.pad).sum(1), lengths), "each stands where its length does"
        assert sorted(map(tuple, turned.tolist())) == sorted(map(tuple, x.tolist()))


@given(seed=st.integers(0, 2**32 - 1), given_lengths=st.booleans())
def test_any_answer_is_framed_and_padded_on_the_right_alone(
    reader: LanguageModel, seed: int, given_lengths: bool
) -> None:
    model = reader
    rng = torch.Generator().manual_seed(seed)
    log = (3 * torch.randn(2, 8, model.vocabulary, generator=rng)).log_softmax(-1)
    lengths = torch.randint(3, 9, (2,), generator=rng)
    found = likeliest(log, model, lengths if given_lengths else None)
    there = found != model.pad
    assert bool((there[:, 1:] <= there[:, :-1]).all())
    assert not given_lengths or torch.equal(there.sum(1), lengths)
    for row in found:
        words = row[row != model.pad].tolist()
        assert (words[0], words[-1]) == (model.start[0], model.end[0]) and len(words) >= 3
        assert not set(words[1:-1]) & model.special


def test_words_that_the_text_does_not_have_are_never_answered(said: Text) -> None:
    known = known_of(said, 20)
    assert known.auxiliary is not None
    wave, _ = seen_of(known, said, 6)
    answers = torch.cat([r.x for r in run(SMALL, wave, known, 3) if r.x is not None])
    model = model_of(known)
    assert set(answers.unique().tolist()) <= set(known.auxiliary.x.unique().tolist()) | {model.pad}


# ------------------------------------------------------------------------------------------------------------- it learns


def accuracy(found: list[Reconstruction], truth: list[Batch], data: Text) -> float:
    pairs = [(t.x, r.x) for t, r in zip(truth, found, strict=True) if r.x is not None]
    assert len(pairs) == len(truth)
    return float(torch.cat([token_accuracy(t, x, data.tokenizer) for t, x in pairs]).mean())


@pytest.mark.parametrize(
    ("links", "least"),
    [(SGD, 40.0), (chain(per_example(sign()), local_sgd(1.0)), 40.0), (chain(gaussian(0.01), local_sgd(1.0)), 25.0)],
    ids=["none", "sign", "noise"],
)
def test_it_reads_sentences_that_it_never_met(running: Text, links: Chain, least: float) -> None:
    known = known_of(running, 1200, links)
    wave, truth = seen_of(known, running, 30)
    found = run(SMALL, wave, known, 400)
    floor = accuracy(run(random_words(), wave, known, 1), truth, running)
    assert accuracy(found, truth, running) > least > 3 * floor
    assert {r.status for r in found} == {"converged"} and {r.iterations for r in found} == {400}


def test_several_sentences_are_read_in_whatever_order(running: Text) -> None:
    known = known_of(running, 1200, batch_size=2)
    wave, truth = seen_of(known, running, 15)
    lengths = torch.stack([(t.x != 0).sum(1).sort().values for t in truth])
    found = run(replace(SMALL, passes=2), wave, replace(known, text=Sentences(lengths)), 400)
    for r, length in zip(found, lengths, strict=True):
        assert r.x is not None and torch.equal((r.x != 0).sum(1), length)

    def shared(answers: list[Reconstruction]) -> int:
        pairs = [(t.x, r.x) for t, r in zip(truth, answers, strict=True) if r.x is not None]
        return sum(len({*t.flatten().tolist()} & {*x.flatten().tolist()}) for t, x in pairs)

    assert shared(found) > 1.3 * shared(found[1:] + found[:1]), "an answer has more of its own update's words"


def test_frequencies_alone_teach_it_too(running: Text) -> None:
    known = known_of(running, 300)
    wave, truth = seen_of(known, running, 30)
    found = run(replace(SMALL, pseudo=1200, alone=True), wave, known, 400)
    floor = accuracy(run(random_words(), wave, known, 1), truth, running)
    assert accuracy(found, truth, running) > 3 * floor


def test_packing_changes_nothing_and_what_is_trained_is_kept(said: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_of(said, 40)
    wave, _ = seen_of(known, said, 3)
    first = run(SMALL, wave, known, 5)

    def refuse(*_: object) -> None:
        raise AssertionError("it is trained already")

    monkeypatch.setattr(TextInverterTraining, "_train", refuse)
    alone = [run(SMALL, wave.of([k]), known, 5)[0] for k in (2, 1, 0)]
    for a, b in zip(first, reversed(alone), strict=True):
        assert a.x is not None and b.x is not None and torch.equal(a.x, b.x)


def test_when_its_seconds_are_over_it_answers_and_says_so(said: Text) -> None:
    known = known_of(said, 41)
    wave, _ = seen_of(known, said)
    for found in run(SMALL, wave, known, 10**6, seconds=1e-3):
        assert found.status == "out_of_budget" and found.x is not None
        assert "of 1000000 steps when the seconds were over" in found.reason


def test_training_ends_where_held_out_sentences_become_no_likelier(said: Text) -> None:
    known = known_of(said, 42)
    wave, _ = seen_of(known, said, 1)
    (found,) = run(replace(SMALL, patience=2, rate=1.0), wave, known, 5000)
    assert found.status == "converged" and found.iterations < 500


# ------------------------------------------------------------------------------------------------------ what it cannot do


@pytest.mark.parametrize(
    ("change", "attack", "reason"),
    [
        (lambda k: replace(k, text=None), SMALL, "needs a language model"),
        (lambda k: replace(k, model=mlp((1, 2, 2), 2)), SMALL, "needs a language model"),
        (lambda k: replace(k, auxiliary=None), SMALL, "the attacker has none"),
        (lambda k: replace(k, batch_size=100), SMALL, "at least 400 auxiliary"),
        (lambda k: k, replace(SMALL, buckets=10**9), "buckets must lie in 1.."),
    ],
)
def test_what_it_needs_and_does_not_have_is_reported(
    change: Callable[[Knowledge], Knowledge], attack: learning_to_invert_text, reason: str, said: Text
) -> None:
    known = known_of(said, 40)
    wave, _ = seen_of(known, said)
    for found in run(attack, wave, change(known), 2):
        assert found.status == "not_applicable" and found.x is None
        assert reason in found.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"buckets": -1}, "buckets must not be negative, got -1"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"alone": True}, "pseudo = 0 makes none"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module.learning_to_invert_text(**arguments)
