"""What matching sentences costs: a candidate of LAMP, a step of its cosine and of TAG, against a plain loop over sentences."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Sentences, Wave
from fedgauge.attacks.text.distance import Kind, Matcher, SentenceGuess
from fedgauge.client.chain import chain
from fedgauge.client.models.language import LanguageModel, encoder, tiny_bert
from fedgauge.client.models.tokenizer import Tokenizer, load_tokenizer
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.training import local_sgd
from fedgauge.client.update import Batch, Params
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, interleaved, one_thread
from fedgauge.simulations.benchmarks.updates import observed, singles, untrained

MINILM = "minilm"
CANDIDATE, STEP = "a candidate, scored among others", "a cosine step, among other sentences"
TAG_STEP = "a step of TAG, among other sentences"
L1 = 0.01


@dataclass(frozen=True, eq=False)
class SentenceProblem:
    """Sentences of random words of one length, their updates by a model with frozen word embeddings, and guesses.

    Args:
        length: tokens of a sentence, including [CLS] and [SEP] or their like.
        sentences: advanced together; candidates: scored together.
    """

    model: LanguageModel
    length: int
    sentences: int
    candidates: int

    @cached_property
    def params(self) -> Params:
        return detached_params(self.model)

    @cached_property
    def labels(self) -> Tensor:
        return torch.arange(self.sentences) % 2

    @cached_property
    def wave(self) -> Wave:
        rng, model, batches = generator("text benchmark", "words"), self.model, []
        for k in range(self.sentences):
            inner = self.length - len(model.start) - len(model.end)
            words = torch.randint(model.vocabulary // 2, model.vocabulary, (inner,), generator=rng).tolist()
            x = torch.tensor([[*model.start, *words, *model.end]])
            batches.append(Batch(x, self.labels[k : k + 1]))
        return observed(self.known, batches)

    @property
    def known(self) -> Knowledge:
        return Knowledge(self.model, chain(local_sgd(1.0)), (self.length,), 2, 1, (), (), text=Sentences())

    def matcher(self, kind: Kind) -> Matcher:
        return Matcher(self.wave, self.known, kind, L1)

    def guess(self, count: int, owners: Tensor) -> SentenceGuess:
        """`count` random guesses at the sentences of `owners`."""
        rng, size = generator("text benchmark", "guess"), (count, 1, self.length, self.model.width)
        x = 0.05 * torch.randn(size, generator=rng)
        return SentenceGuess(x, self.labels[owners][:, None], torch.ones(size[:3], dtype=torch.bool), owners)

    @cached_property
    def together(self) -> SentenceGuess:
        return self.guess(self.sentences, torch.arange(self.sentences))

    @cached_property
    def proposed(self) -> SentenceGuess:
        return self.guess(self.candidates, torch.zeros(self.candidates, dtype=torch.int64))


class PlainLoop:
    """The published loop: one sentence after another, with all gradients formed and distances tensor by tensor.

    It leaves out the keys' biases, too: their gradients are rounding errors, so no two ways to compute their cosine agree.

    Args:
        kind: cosine, or l2_l1.
    """

    def __init__(self, problem: SentenceProblem, kind: Kind) -> None:
        self.model, self.params, self.kind = problem.model, problem.params, kind
        self.leaves = {k: problem.params[k].clone().requires_grad_() for k in problem.matcher(kind).names}
        self.seen = {k: -problem.wave.update[k] for k in self.leaves}

    def distance(self, x: Tensor, y: Tensor, owner: int, slopes: bool) -> Tensor:
        """The distance of one guess x (1, L, width)."""
        value = F.cross_entropy(functional_call(self.model, self.params | self.leaves, (x,)), y)
        found = torch.autograd.grad(value, list(self.leaves.values()), create_graph=slopes, materialize_grads=True)
        if self.kind == "l2_l1":
            apart = [self.seen[k][owner] - g for k, g in zip(self.leaves, found, strict=True)]
            return torch.stack([t.square().sum() + L1 * t.abs().sum() for t in apart]).sum()
        terms = [
            1 - (g * self.seen[k][owner]).sum() / (g.norm() * self.seen[k][owner].norm()).clamp_min(1e-20)
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
    progress: Progress,
    model: LanguageModel | None = None,
    length: int = 12,
    sentences: int = 16,
    candidates: int = 64,
    repetitions: int = 5,
) -> BenchmarkReport:
    """The costs in CPU milliseconds, ours and the plain loop's in turns; on MiniLM-L6 if no model is given."""
    settings: dict[str, object] = dict(
        sentences=f"{length} tokens, words at random, word embeddings frozen, float32, one update each",
        candidate=f"the mean of {candidates} of one sentence", step=f"the mean of {sentences} sentences together",
        plain="one after the other, every gradient formed, distances tensor by tensor; of as few as take a second",
        threads=1, seed=0, repetitions=repetitions, clock="CPU milliseconds, medians of interleaved repetitions",
    )  # fmt: skip
    if model is None:
        try:
            model = minilm(length)
        except ValueError as error:
            return BenchmarkReport((Figure(CANDIDATE, None, "ms", note=str(error)),), settings)
    with one_thread():
        problem = SentenceProblem(model, length, sentences, candidates)
        matcher, plain = problem.matcher("cosine"), PlainLoop(problem, "cosine")
        tag, plain_tag = problem.matcher("l2_l1"), PlainLoop(problem, "l2_l1")
        proposed, together = problem.proposed, problem.together
        few, fewer = _first(proposed, 8), _first(together, 4)
        works: Mapping[str, tuple[int, Callable[[], object]]] = {
            "candidate": (len(proposed.x), lambda: matcher.value(proposed)),
            "plain candidate": (len(few.x), lambda: plain.values(few)),
            "step": (len(together.x), lambda: matcher.value_and_slopes(together)),
            "plain step": (len(fewer.x), lambda: plain.slopes(fewer)),
            "tag": (len(together.x), lambda: tag.value_and_slopes(together)),
            "plain tag": (len(fewer.x), lambda: plain_tag.slopes(fewer)),
        }
        spent = interleaved({name: work for name, (_, work) in works.items()}, repetitions, progress)
    each = {name: 1000 * median(times) / works[name][0] for name, times in spent.items()}
    return BenchmarkReport(
        (
            *_figures(CANDIDATE, each["candidate"], each["plain candidate"], 25.0, 3.5),
            *_figures(STEP, each["step"], each["plain step"], 45.0, 5.0),
            *_figures(TAG_STEP, each["tag"], each["plain tag"]),
        ),
        settings,
    )


def minilm(length: int) -> LanguageModel:
    """MiniLM-L6 with frozen word embeddings; ValueError if its package is missing."""
    words = load_tokenizer(MINILM)
    return untrained(lambda: encoder((length,), words, "classification", 2, MINILM, freeze=("words",)))


def _first(guess: SentenceGuess, count: int) -> SentenceGuess:
    return SentenceGuess(*(t[:count] for t in guess))


def _figures(
    name: str, ours: float, plain: float, at_most: float | None = None, ratio: float | None = None
) -> list[Figure]:
    note = f"{ours:.1f} ms against {plain:.1f}"
    return [
        Figure(name, ours, "ms", at_most=at_most),
        Figure(f"{name}: plain loop / ours", plain / ours, "x", at_least=ratio, note=note),
    ]


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
    return observed(known, singles(Batch(x, y))), known
