"""Cost of matching sentences: a candidate of LAMP and a step of its cosine, against a plain loop over sentences."""

from collections.abc import Callable, Mapping
from statistics import median
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Sentences, Wave
from fedgauge.attacks.text.distance import Matcher, SentenceGuess
from fedgauge.client.chain import chain
from fedgauge.client.models.language import LanguageModel, encoder, tiny_bert
from fedgauge.client.models.tokenizer import Tokenizer, load_tokenizer
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.training import local_sgd
from fedgauge.client.update import Batch
from fedgauge.simulations.benchmarks.engine import observed, untrained
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, interleaved, one_thread

MINILM = "minilm"
CANDIDATE, STEP = "a candidate, scored among others", "a cosine step, among other sentences"


class SentenceProblem:
    """Sentences of random words of one length, their updates by a model with frozen word embeddings, and guesses.

    Args:
        length: tokens of a sentence, including [CLS] and [SEP] or their like.
        sentences: advanced together; candidates: scored together.
    """

    def __init__(self, model: LanguageModel, length: int, sentences: int, candidates: int) -> None:
        self.model, self.length, self.labels = model, length, torch.arange(sentences) % 2
        size, rng = length - len(model.start) - len(model.end), generator("text benchmark", "words")
        inner = torch.randint(model.vocabulary // 2, model.vocabulary, (sentences, size), generator=rng)
        start, end = (torch.tensor([tokens] * sentences, dtype=torch.int64) for tokens in (model.start, model.end))
        known = Knowledge(model, chain(local_sgd(1.0)), (length,), 2, 1, (), (), text=Sentences())
        self.wave = observed(known, Batch(torch.cat([start, inner, end], 1), self.labels))
        self.matcher = Matcher(self.wave, known, "cosine")
        self.together = self._guess(torch.arange(sentences))
        self.proposed = self._guess(torch.zeros(candidates, dtype=torch.int64))

    def _guess(self, owners: Tensor) -> SentenceGuess:
        """A random guess at each of these sentences."""
        size = len(owners), 1, self.length, self.model.width
        x = 0.05 * torch.randn(size, generator=generator("text benchmark", "guess"))
        return SentenceGuess(x, self.labels[owners][:, None], torch.ones(size[:3], dtype=torch.bool), owners)


class PlainLoop:
    """The published loop: one sentence after another, with all gradients formed and cosines tensor by tensor.

    It leaves out the keys' biases, too: their gradients are rounding errors, so no two ways to compute their cosine agree.
    """

    def __init__(self, problem: SentenceProblem) -> None:
        self.model, self.params = problem.model, detached_params(problem.model)
        self.leaves = {k: self.params[k].clone().requires_grad_() for k in problem.matcher.names}
        self.seen = {k: -problem.wave.update[k] for k in self.leaves}

    def distance(self, x: Tensor, y: Tensor, owner: int, slopes: bool) -> Tensor:
        """The distance of one guess x (1, L, width)."""
        value = F.cross_entropy(functional_call(self.model, self.params | self.leaves, (x,)), y)
        found = torch.autograd.grad(value, list(self.leaves.values()), create_graph=slopes, materialize_grads=True)
        terms = [
            1 - F.cosine_similarity(g.flatten(), self.seen[k][owner].flatten(), 0, 1e-20)
            for k, g in zip(self.leaves, found, strict=True)
        ]
        return torch.stack(terms).mean()

    def values(self, guess: SentenceGuess) -> Tensor:
        """The distances (P,) of all guesses."""
        rows = zip(guess.x, guess.y, guess.owners.tolist(), strict=True)
        return torch.stack([self.distance(x, y, k, slopes=False).detach() for x, y, k in rows])

    def slopes(self, guess: SentenceGuess) -> Tensor:
        """The gradients of the distances by the embeddings (P, 1, L, width)."""
        found = []
        for x, y, k in zip(guess.x, guess.y, guess.owners.tolist(), strict=True):
            leaf = x.clone().requires_grad_()
            found.append(torch.autograd.grad(self.distance(leaf, y, k, slopes=True), leaf)[0])
        return torch.stack(found)


def text(
    model: LanguageModel | None = None,
    length: int = 12,
    sentences: int = 16,
    candidates: int = 64,
    repetitions: int = 5,
) -> BenchmarkReport:
    """The costs in CPU milliseconds, ours and the plain loop's in turns; on MiniLM-L6 if no model is given."""
    settings = dict(
        sentences=f"{length} tokens, words at random, word embeddings frozen, float32, one update each",
        candidate=f"the mean of {candidates} of one sentence", step=f"the mean of {sentences} sentences together",
        plain="one after the other, every gradient formed, distances tensor by tensor; of as few as take a second",
        threads=1, seed=0, repetitions=repetitions, clock="CPU milliseconds, medians of interleaved repetitions",
    )  # fmt: skip
    with one_thread():
        problem = SentenceProblem(model or minilm(length), length, sentences, candidates)
        matcher, plain = problem.matcher, PlainLoop(problem)
        proposed, together = problem.proposed, problem.together
        few, fewer = (SentenceGuess(*(t[:n] for t in guess)) for guess, n in ((proposed, 8), (together, 4)))
        works: Mapping[str, Callable[[], object]] = {
            CANDIDATE: lambda: matcher.value(proposed),
            f"{CANDIDATE}, plain": lambda: plain.values(few),
            STEP: lambda: matcher.value_and_slopes(together),
            f"{STEP}, plain": lambda: plain.slopes(fewer),
        }
        spent = interleaved(works, repetitions)
    figures = []
    for name, counts, most, least in ((CANDIDATE, (proposed, few), 25.0, 3.5), (STEP, (together, fewer), 45.0, 5.0)):
        times = zip((spent[name], spent[f"{name}, plain"]), counts, strict=True)
        ours, theirs = (1000 * median(seconds) / len(guess.x) for seconds, guess in times)
        note = f"{ours:.1f} ms against {theirs:.1f}"
        figures.append(Figure(name, ours, "ms", at_most=most))
        figures.append(Figure(f"{name}: plain loop / ours", theirs / ours, "x", at_least=least, note=note))
    return BenchmarkReport(tuple(figures), settings)


def minilm(length: int) -> LanguageModel:
    """MiniLM-L6 with frozen word embeddings; ValueError if its package is missing."""
    words = load_tokenizer(MINILM)
    return untrained(lambda: encoder((length,), words, "classification", 2, MINILM, freeze=("words",)))


def random_sentences(
    count: int, length: int, vocabulary: int, form: tuple[int, int, int], device: torch.device
) -> tuple[Wave, Knowledge]:
    """Sentences of random words, one an update of a BERT with random weights and frozen word embeddings.

    Args:
        length: tokens of a sentence, including [CLS] and [SEP].
        form: of the network: layers, width, heads.
    """
    counted = SimpleNamespace(get_vocab_size=lambda: vocabulary)  # all that is asked of it
    words = Tokenizer("random", counted, pad=0, cls=2, sep=3, special=frozenset(range(5)))
    model = untrained(lambda: tiny_bert((length,), words, "classification", 2, *form, 512, ("words",))).to(device)
    inner = torch.randint(5, vocabulary, (count, length - 2), generator=generator("gpu", "words"))
    start, end = (torch.full((count, 1), token) for token in (2, 3))
    x, y = torch.cat([start, inner, end], 1).to(device), (torch.arange(count) % 2).to(device)
    given = Sentences(torch.full((count, 1), length))
    known = Knowledge(model, chain(local_sgd(1.0)), (length,), 2, 1, (), (), labels=y[:, None], text=given)
    return observed(known, Batch(x, y)), known
