"""Learned rows: the features of a word, the training data, and positions found under every known chain."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Sentences, Wave
from fedgauge.attacks.grading.baselines import random_words
from fedgauge.attacks.learned.shadow_updates import ShadowTrainer, UpdateFeatures
from fedgauge.attacks.modality.text_metrics import token_accuracy
from fedgauge.attacks.text.learned_rows import _PositionTraining, _RowFeatures, learned_rows
from fedgauge.client.chain import Chain, chain
from fedgauge.client.data.corpora import Text, phrases
from fedgauge.client.data.images import batch_of
from fedgauge.client.models.language import LanguageModel, tiny_bert, transformer3
from fedgauge.client.models.losses import next_token
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign

pytest.importorskip("transformers", reason="the extra [text] is not installed")

SGD = chain(local_sgd(1.0))


def threat(
    task: str = "next_token", links: Chain = SGD, size: int = 1, freeze: tuple[str, ...] = ()
) -> tuple[Knowledge, Text]:
    torch.manual_seed(0)
    if task == "next_token":
        data = phrases(length=6, vocabulary=400, task="next_token")
        model: LanguageModel = transformer3(
            data.shape,
            data.tokenizer,
            "next_token",
            layers=1,
            width=16,
            heads=2,
            hidden=16,
            freeze=freeze,  # type: ignore[arg-type]
        )
    else:
        data = phrases(length=8, vocabulary=400)
        model = tiny_bert(data.shape, data.tokenizer, data.task, 2, layers=1, width=16, heads=2, freeze=freeze)  # type: ignore[arg-type]
    public = batch_of(data.x, data.y, torch.arange(len(data.x) - 400, len(data.x)))
    loss = next_token() if task == "next_token" else F.cross_entropy
    known = Knowledge(
        model, links, data.shape, data.classes, size, (), (), auxiliary=public, loss=loss, text=Sentences()
    )
    return known, data


def met(known: Knowledge, data: Text, clients: int = 20) -> tuple[Wave, torch.Tensor]:
    params, client = detached_params(known.model), known.chain(gradient(known.model, known.loss))
    truth = batch_of(data.x_test, data.y_test, torch.arange(clients * known.batch_size))
    seen = []
    for k in range(clients):
        own = batch_of(data.x_test, data.y_test, torch.arange(k * known.batch_size, (k + 1) * known.batch_size))
        update = client(params, own, generator("client", k))
        seen.append(Observation(1, k, params, {n: t.detach() for n, t in update.items()}))
    return Wave.stack(seen), truth.x


def run(
    known: Knowledge, wave: Wave, iterations: int, attack: learned_rows | random_words | None = None
) -> list[Reconstruction]:
    streams = [partial(generator, "rows", client) for client in wave.clients]
    return (attack or learned_rows(hidden=64)).reconstruct(wave, known, Budget(iterations), streams)


def accuracy(found: list[Reconstruction], truth: torch.Tensor, data: Text) -> float:
    x = torch.cat([r.x for r in found if r.x is not None])
    assert x.shape == truth.shape
    return float(token_accuracy(truth, x, data.tokenizer).mean())


@pytest.mark.parametrize(
    ("task", "links", "least"),
    [
        ("next_token", SGD, 80),
        ("next_token", chain(prune(0.1), local_sgd(1.0)), 70),
        ("next_token", chain(gaussian(0.005), local_sgd(1.0)), 70),
        ("next_token", chain(sign(), local_sgd(1.0)), 60),
        ("classification", SGD, 25),
    ],
    ids=["none", "prune", "noise", "sign", "classification"],
)
def test_positions_are_read_from_rows_behind_every_chain_that_is_known(task: str, links: Chain, least: float) -> None:
    known, data = threat(task, links)
    wave, truth = met(known, data)
    found = run(known, wave, 400)
    assert {r.status for r in found} == {"converged"}
    assert accuracy(found, truth, data) > least
    assert accuracy(found, truth, data) > 2 * accuracy(run(known, wave, 1, random_words()), truth, data)


def test_a_row_is_described_by_its_direction_and_by_its_size_beside_the_largest() -> None:
    known, _ = threat()
    model = known.model
    assert isinstance(model, LanguageModel)
    reader = _RowFeatures(("table", "bias"))
    updates = {"table": torch.tensor([[[3.0, 4.0], [0.0, 0.0], [0.0, -0.5]]]), "bias": torch.tensor([[0.2, -2.0, 0.0]])}
    rows = reader.rows(updates)
    assert rows.shape == (1, 3, 6)
    torch.testing.assert_close(
        rows[0],
        torch.tensor(
            [[0.6, 0.8, 0.0, 1.0, -1.0, 0.0], [0.0, 0.0, -6.0, -1.0, 0.0, 0.0], [0.0, -1.0, -1.0, 0.0, -6.0, 0.0]]
        ),
        rtol=1e-4,
        atol=1e-5,
    )
    assert torch.equal(reader.loudness(updates), torch.tensor([[5.0, 0.0, 0.5]]))


def test_each_position_of_shadow_data_has_its_word_as_candidate_and_copies_are_masked() -> None:
    known, data = threat()
    params = detached_params(known.model)
    model = known.model
    assert isinstance(model, LanguageModel)
    shadow = ShadowTrainer(known, params, UpdateFeatures(False))
    training = _PositionTraining(learned_rows(), shadow, _RowFeatures.of(model, params), Budget(1))
    rows, truth = training._shadow_data(True)
    x = shadow.auxiliary.x[shadow.groups(True)[:, 0]]
    assert truth.shape == x.shape
    for k in range(len(x)):
        for i, word in enumerate(x[k].tolist()):  # the first place where the word stands
            assert truth[k, i] == x[k].tolist().index(word)
    nobody = rows[..., -1] == 1
    assert bool(nobody.any()) and not bool(nobody.gather(1, truth).any())


def test_equal_training_data_give_equal_networks() -> None:
    known, data = threat()
    wave, _ = met(known, data, 3)
    first, again = (run(known, wave, 30) for _ in range(2))
    assert all(torch.equal(a.x, b.x) for a, b in zip(first, again, strict=True) if a.x is not None and b.x is not None)
    (alone,) = run(known, wave.of([1]), 30)
    assert alone.x is not None and first[1].x is not None
    assert torch.equal(alone.x, first[1].x)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batch_size": 2}, "in a batch of 2"),
        ({"auxiliary": None}, "needs auxiliary"),
        ({"text": None}, "needs a language model"),
        ({"model": mlp((1, 4, 4), 2)}, "needs a language model"),
    ],
)
def test_what_it_cannot_read_is_refused_in_words(changes: dict[str, object], reason: str) -> None:
    known, data = threat()
    wave, _ = met(known, data, 1)
    (found,) = run(replace(known, **changes), wave, 1)  # type: ignore[arg-type]
    assert (found.status, found.x) == ("not_applicable", None)
    assert reason in found.reason


def test_without_a_row_for_every_word_there_is_nothing_to_read() -> None:
    known, data = threat("classification", freeze=("words",))
    wave, _ = met(known, data, 1)
    (found,) = run(known, wave, 1)
    assert "neither the word embeddings nor a head over words share a gradient" in found.reason


@pytest.mark.parametrize("wrong", [{"hidden": 0}, {"batch": 0}, {"patience": 0}, {"every": 0}, {"rate": 0.0}])
def test_a_value_without_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        learned_rows(**wrong)  # type: ignore[arg-type]
