"""Claims about TIGER: what a subspace under noise is, which sentences come back, and that noise stops it later than DAGER."""

import torch

from fedgauge.attacks.base import Attack, Budget, Knowledge, Wave
from fedgauge.attacks.text.dager import dager
from fedgauge.attacks.text.tiger import subspace, tiger
from fedgauge.client.data.corpora import Text
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.defenses.noise import gaussian
from tests.attacks.text.small_text import SGD, batches, bert, certified, gpt2, read, recovered, refused, seen


def shares(attack: Attack, wave: Wave, known: Knowledge, truth: list[Batch]) -> float:
    """The share of the words in their places, over single sentences."""
    found = read(attack, wave, known, Budget(30))
    right = [
        0.0 if f.x is None else float((f.x == t.x)[t.x != 0].float().mean()) for f, t in zip(found, truth, strict=True)
    ]
    return sum(right) / len(right)


def test_weights_are_the_squared_cosines_with_the_true_directions() -> None:
    """Two orthogonal inputs in noise of 0.1: the weights predict how well each is seen, and the drowned third is left out."""
    rng = generator("subspace")
    inputs = torch.linalg.qr(torch.randn(3, 100, generator=rng).mT).Q.mT
    slopes = torch.linalg.qr(torch.randn(3, 300, generator=rng).mT).Q * torch.tensor([12.0, 4.0, 0.2])
    noisy = [slopes @ inputs + 0.1 * torch.randn(300, 100, generator=rng)]
    for noise in (0.1, 0.0):  # told by the chain, or read off the singular values that no input explains
        found = subspace(noisy, 6, noise)
        assert found is not None and len(found.weights) == 2
        cosines = (found.basis * inputs[:2]).sum(1).square()
        torch.testing.assert_close(found.weights, cosines, atol=0.03, rtol=0)
        assert float(found.weights[0]) > 0.98 > float(found.weights[1])
        assert float(found.outside(inputs[2])) > 0.9 and float(found.unexplained(inputs)) < 0.2
        assert float(found.unexplained(inputs[:1])) > 0.3, "one input leaves the other direction unexplained"
    assert subspace(noisy, 6, 2.0) is None


def test_without_noise_a_sentence_comes_back_with_its_proof(classified: Text) -> None:
    truth = batches(classified, 2, 1)
    found = read(tiger(), *seen(bert(classified), truth), Budget(30))
    assert recovered(found, truth) == [True] * 2 and certified(found)


def test_a_decoders_sentence_comes_back_with_its_last_word_and_no_restart_loses_it(spoken: Text) -> None:
    """The last word sends no gradient through the attention: it is found as a target."""
    truth = batches(spoken, 2, 1)
    seen_of = seen(gpt2(spoken), truth)
    for budget in (Budget(30), Budget(10, 2)):
        found = read(tiger(), *seen_of, budget)
        assert recovered(found, truth) == [True] * 2 and certified(found)


def test_the_words_of_two_sentences_are_recovered_at_each_position(classified: Text) -> None:
    """Which of two words in one place belongs to which sentence is not always found."""
    truth = batches(classified, 2, 2)
    for f, t in zip(read(tiger(), *seen(bert(classified), truth), Budget(30)), truth, strict=True):
        assert f.x is not None
        assert torch.equal(f.x.sort(0).values, t.x.sort(0).values)


def test_under_noise_words_come_back_that_dagers_test_refuses(classified: Text) -> None:
    truth = batches(classified, 4, 1)
    wave, known = seen(bert(classified), truth, (gaussian(1e-6), SGD))
    ours, discrete = shares(tiger(), wave, known, truth), shares(dager(), wave, known, truth)
    assert ours > 0.8 and discrete < 0.3, (ours, discrete)


def test_noise_that_drowns_the_first_block_is_reported(classified: Text) -> None:
    wave, known = seen(bert(classified), batches(classified, 1, 1), (gaussian(1.0), SGD))
    assert refused(read(tiger(), wave, known, Budget(1)), "lost in noise")
