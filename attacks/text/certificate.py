"""Certificates: a guess is proven right, without the truth, when the client's own step turns it into the observed update."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, permutations, product
from typing import Any

import torch
from torch import Tensor

from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Status, Stream, Streams, Wave
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.exact.closed_form import EachByItself, Reader
from fedgauge.attacks.text.layer_inputs import layer_inputs, logits_along
from fedgauge.client.chain import Chain
from fedgauge.client.data.corpora import targets
from fedgauge.client.gradient import gradient
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.language_parts import BlockParts
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.update import Batch, Update, norm, relative_error

TOLERANCE = 1e-5  # relative, a hundred roundings of float32; swapping two words of an untrained network gives 6e-4
LEAST_SHARE = 1.2e-7  # of a sentence in the batch's gradient: less is lost in the rounding of float32
MOST_ORDERS = 24  # of labels that are tried: as many as a batch of four has
MOST = 12  # of the words that a frozen head's logits rank first
FIRST = 3  # highest-ranked words that are tried for each sentence


class Unreadable(ValueError):
    """An attack on sentences cannot read an update."""


def language_model(known: Knowledge) -> LanguageModel:
    """The attacked model.

    Raises:
        Unreadable: it does not read sentences.
    """
    if not isinstance(known.model, LanguageModel):
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
    return 0.0 if seen is None else math.sqrt(seen.variance)


def two_blocks(model: LanguageModel) -> Sequence[BlockParts]:
    """The first two attention blocks; Unreadable if the model has only one."""
    if len(model.parts.layers) < 2:
        raise Unreadable("it reads two attention blocks, and the model has one")
    return model.parts.layers[:2]


class GuessVerifier:
    """Compares guesses with the only observation of a wave, and counts them; Unreadable if the model reads no sentences."""

    def __init__(self, wave: Wave, known: Knowledge) -> None:
        self.wave, self.known, self.device, self.spent = wave, known, wave.device, 0
        self.model = language_model(known)
        self.decodes = self.model.task == "next_token"  # the sentences are then their own labels
        self.params = wave.params  # the weights that the client started from
        self.update = wave.alone(0)

    def framed(self, sentences: Sequence[Sequence[int]]) -> Tensor:
        """Sentences in the form of the data (B, L)."""
        return framed(sentences, self.known.shape[0], self.model.pad)

    def decoded(self, sentences: Sequence[Sequence[int]]) -> Batch:
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
        return nearest((batch, self.error(batch)) for batch in batches)

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

        A sentence that the model predicts well adds almost nothing: the error must also be small compared with that. If it adds
        nothing, no guess of it is proven.
        """
        if not provable(self.known.chain):
            return "no certificate: the chain adds noise, is random, or shows only signs, so no guess can be proven"
        share = self.smallest_share(batch) if error <= TOLERANCE else 0.0
        if share > LEAST_SHARE and error <= TOLERANCE * share:
            return f"certified: the client's step turns the guess into the observed update, to {error:.0e}"
        return f"no certificate: the guess leaves an error of {error:.1e}, as other sentences might"

    def interpretations(self, x: Tensor) -> Iterator[Batch]:
        """Every batch that the sentences (B, L) may form with labels, the likeliest first."""
        if self.decodes:
            yield Batch(x, targets(x, self.model.pad))
            return
        orders: Iterable[tuple[int, ...]] = product(range(self.known.classes), repeat=len(x))
        if self.known.labels is not None:
            orders = dict.fromkeys(permutations(self.known.labels[0].tolist()))
        elif (weight := self.model.parts.head[0]) in self.update:
            # a sentence's features raise only the logit of its label
            features = layer_inputs(self.model, self.params, [weight], x)[0].double()
            yield Batch(x, (self.update[weight].double() @ torch.linalg.pinv(features)).argmax(0).cpu())
        for order in orders:
            yield Batch(x, torch.tensor(order, dtype=torch.int64))


def nearest(guesses: Iterable[tuple[Batch, float]], late: Callable[[], bool] = lambda: False) -> tuple[Batch, float]:
    """The first of several batches with their errors that is proven, else the nearest of those made until it is late."""
    made: list[tuple[Batch, float]] = []
    for guess in guesses:
        made.append(guess)
        if guess[1] <= TOLERANCE or late():
            break
    return min(made, key=lambda guess: math.inf if math.isnan(guess[1]) else guess[1])


class SentenceReader(EachByItself):
    on_cpu = False

    @abstractmethod
    def read(self, verifier: GuessVerifier, budget: Budget, stream: Stream, deadline: Deadline) -> tuple[Batch, float]:
        """The sentences and the relative error that they leave; Unreadable if nothing can be read."""

    def readers(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> Sequence[Reader]:
        deadline = Deadline(budget.seconds)
        return [partial(self._judged, budget, stream, deadline) for stream in streams]

    def _judged(
        self, budget: Budget, stream: Stream, deadline: Deadline, alone: Wave, known: Knowledge
    ) -> Reconstruction:
        verifier = GuessVerifier(alone, known)
        batch, error = self.read(verifier, budget, stream, deadline)
        y, reason = None if verifier.decodes else batch.y, verifier.verdict(batch, error)
        if late := deadline.over() and not error <= TOLERANCE:
            reason = f"its seconds were over; {reason}"
        status: Status = "out_of_budget" if late else "converged"
        return Reconstruction(batch.x, y, error, verifier.spent, 0.0, status, reason)


def labelled(verifier: GuessVerifier, sentences: Sequence[Sequence[int]]) -> tuple[Batch, float]:
    """Sentences with the labels that explain the update best, or a decoder's with their last words, and the error that remains."""
    if verifier.decodes:
        return complete_sentences(verifier, sentences)
    return verifier.best_labels(verifier.framed(sentences))


def complete_sentences(verifier: GuessVerifier, known: Sequence[Sequence[int]]) -> tuple[Batch, float]:
    """Sentences completed by their last words, and the relative error that remains.

    Nothing is predicted from a last word, so it shows only in the head's update. Each row of that is a sum of the vectors from
    which its word was predicted, and all vectors but the last are known. Where the head is frozen, the difference that remains
    is followed through the model to the logits at the sentence's end.

    Args:
        known: each sentence's words without the last; at least one.
    """
    # any word may stand last: the true one shows in the difference
    words = [[*ids[: verifier.known.shape[0] - 1], ids[0]] for ids in known]
    batch = verifier.decoded(words)
    update = verifier.update_of(batch)
    error = relative_error(update, verifier.update)
    step = {name: verifier.update[name] - t for name, t in update.items()}
    ranked = _ranked(verifier, batch, step, [len(ids) - 2 for ids in words])
    first = {i: rank[0] for i, rank in enumerate(ranked)}
    for change in [first, *({i: word} for i, rank in enumerate(ranked) for word in rank)]:
        changed = [[*ids[:-1], change.get(i, ids[-1])] for i, ids in enumerate(words)]
        guess = verifier.decoded(changed)
        if (new_error := verifier.error(guess)) < error:
            words, batch, error = changed, guess, new_error
        if error <= TOLERANCE:
            break
    return batch, error


def _ranked(verifier: GuessVerifier, batch: Batch, step: Update, ends: Sequence[int]) -> list[list[int]]:
    """For each sentence the words that may end it, the likeliest first.

    Args:
        step: what a guess's update lacks; ends: the positions before the last words.
    """
    model, name, sentences = verifier.model, verifier.model.parts.head[0], range(len(ends))
    if name not in step:
        raised = logits_along(model, verifier.params, step, batch.x.to(verifier.device))[sentences, ends]
        return raised.topk(MOST).indices.tolist()
    net: Any = model.net  # with tied embeddings the head's weight has another module's name
    inputs = layer_inputs(model, verifier.params, [net.get_output_embeddings()], batch.x)[0][sentences, ends].double()
    ranked, own = [], batch.x[batch.x != model.pad].unique().cpu()
    for shares in (step[name].double() @ torch.linalg.pinv(inputs)).cpu().T:  # (V,) of each sentence
        elsewhere = shares.index_fill(0, own, -torch.inf)
        best, alone = elsewhere.topk(FIRST).indices.tolist(), shares.topk(FIRST).indices.tolist()
        # only the last word adds to the row of a word that occurs nowhere else; in tied embeddings the rows of words that occur
        # also hold an input's share, so they are no evidence: all these words are tried, too
        sure = float(elsewhere.max()) > float(shares.abs().max()) / 10
        likely = own[shares[own].argsort(descending=True)].tolist()
        ranked.append(list(dict.fromkeys([*(best if sure else []), *alone, *likely])))
    return ranked
