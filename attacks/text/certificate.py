"""Certificates: a guess is proven right, without the truth, when the client's own step turns it into the observed update."""

import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, permutations, product

import torch
from torch import Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Status, Stream, Wave
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.text.layer_inputs import layer_inputs
from fedgauge.client.chain import Chain
from fedgauge.client.data.corpora import targets
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.training import gradient
from fedgauge.client.update import Batch, Update, norm, relative_error

TOLERANCE = 1e-5  # relative, a hundred roundings of float32; swapping two words of an untrained network gives 6e-4
MOST_ORDERS = 24  # of labels that are tried: as many as a batch of four has


class Unreadable(ValueError):
    """An attack on sentences cannot read an update."""


def language_model(known: Knowledge) -> LanguageModel:
    """The attacked model.

    Raises:
        Unreadable: it does not read sentences.
    """
    if known.text is None or not isinstance(known.model, LanguageModel):
        raise Unreadable("it reconstructs sentences and needs a language model; this model reads images")
    return known.model


def provable(chain: Chain) -> bool:
    """Return whether the right guess reproduces the update up to rounding."""
    seen = chain.update_distribution
    # of signs, those of entries that are zero up to rounding are random
    return chain.mean == chain and not (seen is not None and seen.signed)


def noise_of(known: Knowledge) -> float:
    """The standard deviation of an entry's noise, as far as the attacker knows it."""
    seen = known.chain.update_distribution
    return 0.0 if seen is None else math.hypot(seen.sigma, math.sqrt(2) * seen.scale)


class GuessVerifier:
    """Compares guesses with one observation, and counts them.

    Args:
        k: the observation's index in the wave.

    Raises:
        Unreadable: no attack on sentences can read this update.
    """

    def __init__(self, wave: Wave, known: Knowledge, k: int) -> None:
        self.wave, self.known, self.k, self.device, self.spent = wave, known, k, wave.device, 0
        self.model = language_model(known)
        self.params = wave.params  # the weights that the client started from
        self.update = wave.alone(k)
        size = float(norm({name: t.double() for name, t in self.update.items()}))
        if not 0 < size < math.inf:
            raise Unreadable("the update is zero or not finite")

    @property
    def decodes(self) -> bool:
        """Return whether the task is next_token, where the sentences are their own labels."""
        return self.model.task == "next_token"

    def framed(self, sentences: Sequence[Sequence[int]]) -> Tensor:
        """Sentences in the form of the data (B, L)."""
        return framed(sentences, self.known.shape[0], self.model.pad)

    def decoded(self, sentences: Sequence[Sequence[int]]) -> Batch:
        """Sentences as a batch with their words as labels."""
        x = self.framed(sentences)
        return Batch(x, targets(x, self.model.pad))

    def update_of(self, batch: Batch) -> Update:
        """The update that a client would send for a batch, without its noise."""
        self.spent += 1
        batch = Batch(batch.x.to(self.device), batch.y.to(self.device))
        return {name: t.detach() for name, t in self.known.forward(self.params, batch, None).items()}

    def error(self, batch: Batch) -> float:
        """|update of the batch - seen| / |seen|."""
        return relative_error(self.update_of(batch), self.update)

    def best(self, batches: Iterable[Batch]) -> tuple[Batch, float]:
        """The first batch that is proven, else the nearest one, with its relative error."""
        nearest: list[tuple[Batch, float]] = []
        for batch in batches:
            nearest.append((batch, self.error(batch)))
            if nearest[-1][1] <= TOLERANCE:
                return nearest[-1]
        return min(nearest, key=lambda guess: math.inf if math.isnan(guess[1]) else guess[1])

    def best_labels(self, x: Tensor) -> tuple[Batch, float]:
        """Sentences (B, L) with the labels that explain the update best, and the relative error that remains."""
        return self.best(islice(self.interpretations(x), MOST_ORDERS))

    def smallest_share(self, batch: Batch) -> float:
        """The smallest sentence gradient relative to the batch's; it counts as no iteration."""
        if len(batch.x) == 1:
            return 1.0
        step = gradient(self.known.model, self.known.loss)

        def size(part: Batch) -> float:
            return float(norm({k: t.detach().double() for k, t in step(self.params, part, None).items()}))

        parts = [size(Batch(batch.x[i : i + 1], batch.y[i : i + 1])) for i in range(len(batch.x))]
        return min(1.0, min(parts) / len(parts) / size(batch))

    def verdict(self, batch: Batch, error: float) -> str:
        """Describe whether a guess with this relative error is proven.

        A sentence that the model predicts well adds almost nothing: the error must also be small compared with that.
        """
        if not provable(self.known.chain):
            return "no certificate: the chain adds noise, is random, or shows only signs, so no guess can be proven"
        if error <= TOLERANCE and error <= TOLERANCE * self.smallest_share(batch):
            return f"certified: the client's step turns the guess into the observed update, to {error:.0e}"
        return f"no certificate: the guess leaves an error of {error:.1e}, as other sentences might"

    def interpretations(self, x: Tensor) -> Iterator[Batch]:
        """Every batch that the sentences (B, L) may form with labels, the likeliest first."""
        if self.decodes:
            yield Batch(x, targets(x, self.model.pad))
            return
        orders: Iterable[tuple[int, ...]] = product(range(self.known.classes), repeat=len(x))
        if self.known.labels is not None:
            orders = dict.fromkeys(permutations(self.known.labels[self.k].tolist()))
        elif (weight := self.model.parts.head[0]) in self.update:
            # a sentence's features raise only the logit of its label
            features = layer_inputs(self.model, self.params, [weight], x)[0].double()
            yield Batch(x, (self.update[weight].double() @ torch.linalg.pinv(features)).argmax(0).cpu())
        for order in orders:
            yield Batch(x, torch.tensor(order, dtype=torch.int64))


class SentenceReader(Attack):
    """An attack that reads each observation's sentences by themselves, and tries to prove them."""

    @abstractmethod
    def read(self, verifier: GuessVerifier, budget: Budget, stream: Stream, deadline: Deadline) -> tuple[Batch, float]:
        """The sentences and the relative error that they leave; Unreadable if nothing can be read."""

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        deadline = Deadline(time.perf_counter(), budget.seconds)
        return [self._answer(wave, known, k, budget, stream, deadline) for k, stream in enumerate(streams)]

    def _answer(
        self, wave: Wave, known: Knowledge, k: int, budget: Budget, stream: Stream, deadline: Deadline
    ) -> Reconstruction:
        started = time.perf_counter()
        try:
            verifier = GuessVerifier(wave, known, k)
            batch, error = self.read(verifier, budget, stream, deadline)
        except Unreadable as why:
            seconds = time.perf_counter() - started
            return Reconstruction(None, None, math.nan, 0, seconds, "not_applicable", str(why))
        y, reason = None if verifier.decodes else batch.y, verifier.verdict(batch, error)
        status: Status = "converged"
        if deadline.over() and not error <= TOLERANCE:
            status, reason = "out_of_budget", f"its seconds were over; {reason}"
        return Reconstruction(batch.x, y, error, verifier.spent, time.perf_counter() - started, status, reason)
