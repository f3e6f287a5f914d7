"""Claims about matching sentences: moves, what the update reveals, what is found, what is refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Observation, Sentences, Wave
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.baselines import random_words
from fedgauge.attacks.modality.text_metrics import rouge
from fedgauge.attacks.plan import ATTACK, PlannedAttack
from fedgauge.attacks.text.lamp import dlg_text, lamp, tag
from fedgauge.attacks.text.sentence_layout import lengths_of
from fedgauge.attacks.text.text_matching import (
    TextMatching,
    _BatchDescent,
    _DescentState,
    staircase,
)
from fedgauge.client.chain import Chain
from fedgauge.client.data.corpora import Text, phrases
from fedgauge.client.models.language import LanguageModel, tiny_bert, tiny_gpt2
from fedgauge.client.models.losses import next_token
from fedgauge.client.models.vision import detached_params, lenet
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch, Loss, Transform
from fedgauge.defenses.clip import clip
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign

pytest.importorskip("transformers", reason="the extra [text] is not installed")

LENGTH = 10
SMALL = partial(lamp, lm_steps=20, draws=4, orders=4, period=3, candidates=6)
Seen = tuple[Wave, Knowledge, list[Batch]]


@pytest.fixture(scope="module")
def data() -> Text:
    return phrases(LENGTH)


@pytest.fixture(scope="module")
def make(data: Text) -> Callable[..., Seen]:
    """Updates of some clients, sorted by label as a threat model gives them."""

    def made(
        links: tuple[Transform, ...] = (local_sgd(1.0),),
        batch_size: int = 1,
        clients: int = 2,
        task: str = "classification",
        **settings: Any,
    ) -> Seen:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if task == "classification":
                model = tiny_bert((LENGTH,), data.tokenizer, "classification", 2, **{"width": 32, **settings})
            else:
                model = tiny_gpt2((LENGTH,), data.tokenizer, "next_token", **{"width": 32, **settings})
        loss: Loss = F.cross_entropy if task == "classification" else next_token()
        params, client = detached_params(model), Chain(links)(gradient(model, loss))
        seen, batches = [], []
        for k in range(clients):
            rows = torch.arange(k * batch_size, (k + 1) * batch_size)
            x, y = data.x[rows], data.y[rows]
            if task == "next_token":
                x = torch.cat([x[:, 1:], x[:, :1]], 1)  # without what frames a sentence that is classified
                x = torch.where(torch.isin(x, torch.tensor(sorted(model.special))), model.pad, x)
                y = x.masked_fill(x == model.pad, -100)
            else:
                order = y.argsort(stable=True)
                x, y = x[order], y[order]
            batches.append(Batch(x, y))
            update = client(params, batches[-1], generator("lamp", k))
            seen.append(Observation(1, k, params, {n: t.detach() for n, t in update.items()}))
        known = Knowledge(
            model, Chain(links), (LENGTH,), 2, batch_size, (), (), loss=loss, text=Sentences(),
            auxiliary=Batch(data.x[-200:], data.y[-200:]),
        )  # fmt: skip
        return Wave.stack(seen), known, batches

    return made


def streams(count: int) -> list[Any]:
    return [partial(generator, "lamp", k) for k in range(count)]


def lengths(batches: list[Batch], pad: int = 0) -> Tensor:
    return torch.stack([(b.x != pad).sum(1) for b in batches])


def words_found(data: Text, truth: Tensor, guess: Tensor) -> float:
    pairs = zip(truth.tolist(), guess.tolist(), strict=True)
    scores = [rouge(data.tokenizer.decode(a), data.tokenizer.decode(b))["rouge1"] for a, b in pairs]
    return sum(scores) / len(scores)


# ---------------------------------------------------------------------------------------------------------------- moves


def test_adams_moments_go_with_the_words() -> None:
    x = torch.arange(12.0).view(1, 2, 6, 1)
    for moments in (True, False):
        state = _DescentState(x.clone(), None, [(x + 100, x + 200)])
        order = torch.tensor([0, 3, 2, 1, 4, 5])
        state.permuted(0, 1, order, moments)
        assert state.x.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 8, 7, 10, 11]
        first, second = state.moments[0]
        assert torch.equal(first, state.x + 100) == torch.equal(second, state.x + 200) == moments


@pytest.mark.parametrize("batch_size", [1, 2])
def test_what_frames_a_sentence_stays_in_its_place(make: Callable[..., Seen], batch_size: int) -> None:
    wave, known, batches = make(batch_size=batch_size)
    known = replace(known, text=Sentences(lengths(batches)))
    tokens = torch.stack([f.x for f in SMALL().reconstruct(wave, known, Budget(7), streams(2)) if f.x is not None])
    truth = torch.stack([b.x for b in batches])
    special = torch.isin(truth, torch.tensor([0, 2, 3]))
    assert torch.equal(tokens[special], truth[special])
    assert not torch.isin(tokens[~special], torch.tensor([0, 1, 2, 3, 4])).any()


# ----------------------------------------------------------------------------------------------- what the update reveals


@pytest.mark.parametrize("task", ["classification", "next_token"])
def test_lengths_are_the_rows_of_the_position_embeddings_gradient(make: Callable[..., Seen], task: str) -> None:
    wave, known, batches = make(task=task, clients=4)
    assert torch.equal(lengths_of(wave, known), lengths(batches))
    assert len(lengths(batches).unique()) > 1
    wave, known, batches = make(task=task, batch_size=3)
    assert torch.equal(lengths_of(wave, known), lengths(batches).amax(1, keepdim=True).expand(-1, 3))


def test_lengths_that_a_defense_hides_are_all_positions_unless_given(make: Callable[..., Seen]) -> None:
    links: list[Transform] = [gaussian(0.1), prune(0.1), sign()]
    for link in links:
        wave, known, batches = make(links=(link, local_sgd(1.0)))
        assert (lengths_of(wave, known) == LENGTH).all()
        given_lengths = replace(known, text=Sentences(lengths(batches)))
        assert torch.equal(lengths_of(wave, given_lengths), lengths(batches))
    wave, known, _ = make(freeze=["words", "positions"])
    assert (lengths_of(wave, known) == LENGTH).all()


def test_known_tokens_are_those_with_a_gradient(make: Callable[..., Seen]) -> None:
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


def test_lamp_finds_sentences_in_seconds_where_random_words_find_none(make: Callable[..., Seen], data: Text) -> None:
    wave, known, batches = make(freeze=["words"])
    attack = lamp(lm_steps=50, draws=10, orders=10, candidates=20, period=40, rate=0.03, decay=0.7)
    guesses = attack.reconstruct(wave, known, Budget(120), streams(2))
    floor = random_words().reconstruct(wave, known, Budget(1), streams(2))
    truth = torch.cat([b.x for b in batches])
    scores = []
    for results in (guesses, floor):
        assert all(r.x is not None for r in results)
        scores.append(words_found(data, truth, torch.cat([r.x for r in results if r.x is not None])))
    assert [r.status for r in guesses] == ["converged"] * 2
    assert scores[0] > 60 and scores[0] > scores[1] + 40
    assert [r.y.tolist() for r in guesses if r.y is not None] == [b.y.tolist() for b in batches], "labels are restored"


def test_moves_put_words_in_order(make: Callable[..., Seen]) -> None:
    """From the true words in a wrong order, moves that the distance alone judges lead back."""
    wave, known, batches = make(clients=4)
    own = next(k for k, b in enumerate(batches) if len(b.x.unique()) == LENGTH)
    wave = wave.of([own])
    attack = lamp(lm_weight=0, draws=1, orders=1, discrete="end", period=1, candidates=200, rate=1e-9)
    layout = attack.layout(wave, known, 1)
    truth = batches[own].x[0]
    search = _BatchDescent(attack, layout, None, streams(1), Budget(4), Deadline(0.0, None))
    wrong = torch.cat([truth[:1], truth[1:-1].flip(0), truth[-1:]])
    search.state.x.copy_(layout.table[wrong])
    with torch.no_grad():
        search.run()
    tokens = layout.tokens(search.state.x, None)
    assert tokens[0, 0].tolist() == truth.tolist()


def test_moves_at_the_end_alone_count_in_what_is_answered_as_published_too(make: Callable[..., Seen]) -> None:
    wave, known, _ = make(clients=1, freeze=["words"])
    attack = partial(SMALL, lm_weight=1e3, published=True, draws=1, orders=1, candidates=60, rate=1e-9)
    still = attack(discrete="none").reconstruct(wave, known, Budget(9), streams(1))[0]
    moved = attack(discrete="end").reconstruct(wave, known, Budget(9), streams(1))[0]
    assert still.x is not None and moved.x is not None
    assert sorted(still.x.flatten().tolist()) == sorted(moved.x.flatten().tolist())
    assert not torch.equal(still.x, moved.x), "the language model has its way"


def test_equal_streams_give_equal_words(make: Callable[..., Seen]) -> None:
    wave, known, _ = make()
    once, again = (dlg_text().reconstruct(wave, known, Budget(4, restarts=3), streams(2)) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        assert a.x is not None and b.x is not None and torch.equal(a.x, b.x)
        assert a.objective == b.objective


@pytest.mark.usefixtures("double")
def test_the_restart_of_the_lowest_objective_is_returned(make: Callable[..., Seen]) -> None:
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
def test_every_kind_of_client_is_met(name: str, attack: TextMatching, make: Callable[..., Seen]) -> None:
    links, batch_size = CHAINS[name]
    wave, known, _ = make(links=links, batch_size=batch_size, width=16, heads=2)
    for found in attack.reconstruct(wave, known, Budget(3), streams(2)):
        assert found.status == "converged" and found.reason == ""
        assert found.x is not None and found.x.shape == (batch_size, LENGTH) and found.x.dtype == torch.int64
        assert found.y is not None and found.y.shape == (batch_size,)
        assert math.isfinite(found.objective) and found.iterations == 3


@pytest.mark.parametrize("attack", [dlg_text(), tag(), SMALL()], ids=["dlg", "tag", "lamp"])
def test_next_words_are_found_beside_the_embeddings(attack: TextMatching, make: Callable[..., Seen]) -> None:
    wave, known, _ = make(task="next_token", batch_size=2)
    for found in attack.reconstruct(wave, known, Budget(4), streams(2)):
        assert found.status == "converged" and found.y is None
        assert found.x is not None and found.x.shape == (2, LENGTH)


def test_next_words_of_a_decoder_come_back(make: Callable[..., Seen], data: Text) -> None:
    wave, known, batches = make(task="next_token", tied=False)
    attack = lamp(lm_weight=0, draws=1, orders=1, rate=0.05, discrete="none")
    results = attack.reconstruct(wave, known, Budget(150), streams(2))
    guesses = torch.cat([r.x for r in results if r.x is not None])
    assert words_found(data, torch.cat([b.x for b in batches]), guesses) > 50


# ------------------------------------------------------------------------------------------------------ what is refused


def reason_of(attack: TextMatching, wave: Wave, known: Knowledge) -> str:
    results = attack.reconstruct(wave, known, Budget(2), streams(len(wave)))
    assert {r.status for r in results} == {"not_applicable"} and all(r.x is None for r in results)
    return results[0].reason


def test_a_missing_language_model_is_reported_with_what_to_do(make: Callable[..., Seen]) -> None:
    wave, known, _ = make()
    bare = replace(known, auxiliary=None)
    assert "trained on auxiliary text, and there is none" in reason_of(SMALL(), wave, bare)
    assert "cannot be loaded" in reason_of(SMALL(lm="gpt2-that-is-not-there"), wave, known)
    for attack in (SMALL(lm_weight=0), SMALL(discrete="none"), dlg_text()):
        assert attack.reconstruct(wave, bare, Budget(1), streams(2))[0].status == "converged", "none is asked"


def test_known_tokens_are_refused_where_nothing_tells_them(make: Callable[..., Seen]) -> None:
    wave, known, _ = make(freeze=["words"])
    assert "is not shared" in reason_of(SMALL(known_tokens=True), wave, known)
    wave, known, _ = make(links=(gaussian(0.1), local_sgd(1.0)))
    assert "a defense hides which" in reason_of(tag(known_tokens=True), wave, known)
    wave, known, _ = make(task="next_token")
    assert "needs untied rows" in reason_of(dlg_text(known_tokens=True), wave, known)


def test_what_keeps_a_model_from_being_matched_is_reported(make: Callable[..., Seen]) -> None:
    wave, known, _ = make()
    assert isinstance(known.model, LanguageModel)
    too_long = replace(known, shape=(known.model.positions + 1,))
    assert "sentences of 129 tokens, and the model has 128 positions" in reason_of(dlg_text(), wave, too_long)
    known.model.net.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    assert "no second derivative" in reason_of(dlg_text(), wave, known)
    known.model.net.config._attn_implementation = "eager"  # type: ignore[union-attr]
    next(m for m in known.model.modules() if isinstance(m, torch.nn.Dropout)).p = 0.1
    known.model.train()
    assert "dropout is on (" in reason_of(dlg_text(), wave, known)
    images = replace(known, model=lenet((1, 28, 28), 10), text=None)
    assert "reads images" in reason_of(dlg_text(), wave, images)


@pytest.mark.parametrize("spoil", [torch.zeros_like, lambda t: t * torch.nan, lambda t: t * 1e30, lambda t: t * 1e-30])
def test_garbage_gives_a_status(spoil: Callable[[Tensor], Tensor], make: Callable[..., Seen]) -> None:
    wave, known, _ = make(batch_size=2)
    spoilt = replace(wave, update={k: spoil(t) for k, t in wave.update.items()})
    for attack in (dlg_text(), tag(), SMALL(lm_weight=0)):
        for found in attack.reconstruct(spoilt, known, Budget(4), streams(2)):
            assert found.status in {"converged", "diverged", "not_applicable"}
            assert (found.x is None) == (found.status != "converged")


def test_it_ends_when_its_seconds_are_over(make: Callable[..., Seen]) -> None:
    wave, known, _ = make()
    for found in lamp(lm_weight=0).reconstruct(wave, known, Budget(10**9, seconds=0.05), streams(2)):
        assert found.status == "out_of_budget" and "of 1000000000 iterations in 0.05 s" in found.reason
        assert found.x is not None


def test_the_model_and_the_global_generator_are_left_alone(make: Callable[..., Seen]) -> None:
    wave, known, _ = make()
    everything = [*wave.params.values(), *wave.update.values(), *known.model.state_dict().values()]
    kept, state = [t.clone() for t in everything], torch.get_rng_state()
    SMALL().reconstruct(wave, known, Budget(4), streams(2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(everything, kept, strict=True))


# ----------------------------------------------------------------------------------------------------------- the recipes


def test_recipes_are_found_and_carry_the_papers_weights() -> None:
    assert {"dlg_text", "tag", "lamp"} <= set(ATTACK.names())
    cosine, squares = lamp(), lamp("l2_l1")
    assert (cosine.kind, cosine.length, cosine.lm_weight) == ("cosine", 1.0, 0.2)
    assert (squares.kind, squares.length, squares.lm_weight, squares.l1) == ("l2_l1", 25.0, 60.0, 0.01)
    assert (cosine.draws, cosine.orders, cosine.period, cosine.candidates) == (500, 500, 75, 200)
    assert cosine.optimizer.rate_at(49, 2000) == 0.01
    assert cosine.optimizer.rate_at(1999, 2000) == pytest.approx(0.01 * 0.89**39)
    assert (tag().kind, tag().l1, dlg_text().kind) == ("l2_l1", 0.01, "squared")
    for recipe in (tag(), dlg_text()):
        assert recipe.optimizer == staircase(0.1) and recipe.discrete == "none" and recipe.length == 0
        assert recipe.optimizer.rate_at(2499, 2500) == 0.1


def test_as_published_and_put_right_are_apart(make: Callable[..., Seen]) -> None:
    wave, known, _ = make()
    ours, theirs = SMALL().layout(wave, known, 1), SMALL(published=True).layout(wave, known, 1)
    assert isinstance(known.model, LanguageModel)
    assert set(theirs.matcher.names) - set(ours.matcher.names) == known.model.parts.key_biases
    assert set(theirs.words.tolist()) - set(ours.words.tolist()) == known.model.special


def test_the_way_is_reported(make: Callable[..., Seen]) -> None:
    wave, known, _ = make()
    assert (lamp().matcher(wave, known).way, tag().matcher(wave, known).way) == ("products", "streamed")
    wave, known, _ = make(links=(local_sgd(0.1, steps=2),))
    assert lamp().matcher(wave, known).way == "chain"


@pytest.mark.parametrize("settings", [{"draws": 0}, {"period": 0}, {"length": -1.0}, {"lm_weight": math.nan}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must"):
        lamp(**settings)


def test_a_scenario_names_it_and_an_audit_grades_it(make_federation: Callable[..., Any], observe: Any) -> None:
    fed = make_federation(
        data={"use": "phrases", "length": LENGTH, "batch_size": 2, "auxiliary": 100},
        model={"use": "tiny_bert", "width": 16, "heads": 2, "freeze": ["words"]},
    )
    small = {"lm_steps": 5, "draws": 2, "orders": 2, "period": 2, "candidates": 4}
    for own in ({"use": "lamp", "loss": "l2_l1", **small}, {"use": "tag"}):
        planned = PlannedAttack.from_table({**own, "lengths": "given", "iterations": 4}, "[[attack]]")
        (audited,) = Auditor(fed).audit(planned, observe(fed))
        assert audited.reconstruction.status == "converged"
        graded = {row.metric: row.value for row in audited.rows}
        assert {"rouge1", "rouge2", "rougeL", "rouge2_special", "exact", "label_accuracy"} <= set(graded)
        assert all(value is not None for value in graded.values())


def test_a_trace_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="it has no trace"):
        lamp().traced(3)
