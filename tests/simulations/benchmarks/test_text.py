"""The benchmark of text: both ways compute the same, and it counts what it says."""

import pytest
import torch

from fedgauge.client.models.language import LanguageModel, tiny_bert
from fedgauge.client.models.tokenizer import wordpiece
from fedgauge.simulations.benchmarks.text import PlainLoop, SentenceProblem, text

pytest.importorskip("transformers", reason="the extra [text] is not installed")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    words = wordpiece(("the cat sat on the mat", "a dog barks"), 100)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny_bert((8,), words, "classification", 2, freeze=("words",))


def test_the_plain_loop_and_ours_compute_the_same(model: LanguageModel) -> None:
    problem = SentenceProblem(model, 8, 3, 5)
    plain, matcher = PlainLoop(problem), problem.matcher
    ours, slopes, _ = matcher.value_and_slopes(problem.together)
    assert torch.allclose(ours, plain.values(problem.together), atol=1e-5)
    assert torch.allclose(slopes, plain.slopes(problem.together), atol=1e-5 * float(slopes.abs().max()))
    assert torch.allclose(matcher.value(problem.proposed), plain.values(problem.proposed), atol=1e-5)


def test_each_cost_has_its_ratio(model: LanguageModel) -> None:
    report = text(model, 8, sentences=3, candidates=5, repetitions=1)
    for ours, ratio in zip(report.figures[::2], report.figures[1::2], strict=True):
        assert ours.value is not None and ratio.value is not None
        first, second = (float(part) for part in ratio.note.replace(" ms", "").split(" against "))
        assert ours.value == pytest.approx(first, abs=0.06)
        assert ratio.value == pytest.approx(second / first, rel=0.2)
