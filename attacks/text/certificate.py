"""Certificates: a guess is proven right, without the truth, when the client's own step turns it into the observed update."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, permutations, product

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge, Reconstruction, Status, Wave
from fedgauge.attacks.text.layer_inputs import layer_inputs, module_of_weight
from fedgauge.client.chain import Chain
from fedgauge.client.data.corpora import targets
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.training import gradient
from fedgauge.client.update import Batch, Params, Update, norm, relative_error

TOLERANCE = 1e-5  # relative, a hundred roundings of float32; swapping two words of an untrained network gives 6e-4
MOST_ORDERS = 24  # of labels or of sentences that are tried: as many as a batch of four has
NEEDS_LANGUAGE_MODEL = "it reconstructs sentences and needs a language model; this model reads images"
UNLIKE = "the guess's update differs from the observed one by {:.1e} of its norm"


def why_unprovable(chain: Chain) -> str:
    """Why no guess can be proven under a chain; empty where the right guess reproduces the update up to rounding."""
    seen = chain.update_distribution
    if seen is not None and seen.noisy:
        return "the chain adds noise, which nobody can reproduce"
    if seen is not None and seen.signed:
        return "only signs are seen, and those of entries that are zero up to rounding are random"
    if chain.mean != chain:
        return "the chain is random, or drops something that the server never sees"
    return ""


@dataclass(eq=False)
class GuessVerifier:
    """Compares guesses with one observation, and counts them.

    Args:
        k: the observation's index in the wave.
    """

    wave: Wave
    known: Knowledge
    k: int
    spent: int = 0
    update: Update = field(init=False)

    def __post_init__(self) -> None:
        self.update = self.wave.alone(self.k)
        self._norm = norm({name: t.double() for name, t in self.update.items()})

    @property
    def params(self) -> Params:
        """The weights that the client started from."""
        return self.wave.params

    @property
    def reason(self) -> str:
        """Why no attack can read this update; empty where one can."""
        if not bool(torch.isfinite(self._norm)):
            return "the update is not finite"
        return "" if bool(self._norm > 0) else "the update is zero"

    def update_of(self, batch: Batch) -> Update:
        """The update that a client would send for a batch, without its noise."""
        self.spent += 1
        device = self.wave.device
        batch = Batch(batch.x.to(device), batch.y.to(device))
        return {name: t.detach() for name, t in self.known.forward(self.params, batch, None).items()}

    def error(self, batch: Batch) -> float:
        """|update of the batch - seen| / |seen|."""
        return self.distance(self.update_of(batch))

    def distance(self, update: Update) -> float:
        """|update - seen| / |seen|."""
        return relative_error(update, self.update)

    def best(self, batches: Iterable[Batch]) -> tuple[Batch, float]:
        """The first batch that is proven, else the nearest one, with its relative error."""
        nearest: tuple[Batch, float] | None = None
        for batch in batches:
            error = self.error(batch)
            if nearest is None or error < nearest[1] or math.isnan(nearest[1]):
                nearest = batch, error
            if error <= TOLERANCE:
                break
        assert nearest is not None
        return nearest

    def best_labels(self, x: Tensor) -> tuple[Batch, float]:
        """Sentences (B, L) with the labels that explain the update best, and the relative error that remains."""
        return self.best(islice(self.interpretations(x), MOST_ORDERS))

    def answer(self, batch: Batch, error: float, seconds: float, over: bool = False) -> Reconstruction:
        """A reconstruction whose reason says whether it is proven; over: the time ended the search for it."""
        y, reason = batch.y if batch.y.dim() == 1 else None, self.verdict(batch, error)
        status: Status = "out_of_budget" if over else "converged"
        reason = f"its seconds were over; {reason}" if over else reason
        return Reconstruction(batch.x, y, error, self.spent, seconds, status, reason)

    def nothing(self, reason: str, seconds: float) -> Reconstruction:
        """The result where nothing can be read."""
        return Reconstruction(None, None, math.nan, self.spent, seconds, "not_applicable", reason)

    def smallest_share(self, batch: Batch) -> float:
        """The smallest sentence gradient relative to the batch's; it counts as no iteration."""
        step = gradient(self.known.model, self.known.loss)

        def size(part: Batch) -> float:
            return float(norm({k: t.detach().double() for k, t in step(self.params, part, None).items()}))

        if len(batch.x) == 1:
            return 1.0
        parts = [size(Batch(batch.x[i : i + 1], batch.y[i : i + 1])) for i in range(len(batch.x))]
        return min(1.0, min(parts) / len(parts) / size(batch))

    def verdict(self, batch: Batch, error: float) -> str:
        """Whether a guess with this relative error is proven, in words.

        A sentence that the model predicts well adds almost nothing: the error must be small compared with that, too.
        """
        if why := why_unprovable(self.known.chain):
            return f"no certificate: {why}"
        if not error <= TOLERANCE:
            return f"no certificate: {UNLIKE.format(error)}"
        if not error <= TOLERANCE * self.smallest_share(batch):
            return "no certificate: a sentence adds so little to the update that other sentences would leave as small an error"
        return f"certified: the client's step turns the guess into the observed update, to {error:.0e}"

    def interpretations(self, x: Tensor) -> Iterator[Batch]:
        """Every batch that the sentences may form, the likeliest first: label orders and, with slices, sentence orders."""
        together = self.known.chain.slice_of(len(x)) >= len(x)
        for order in [tuple(range(len(x)))] if together else permutations(range(len(x))):
            rows = x[list(order)]
            for y in self._labels(rows):
                yield Batch(rows, y)

    def _labels(self, x: Tensor) -> Iterator[Tensor]:
        if sentences_are_labels(self.known):
            yield targets(x, _model(self.known).pad)
            return
        orders: Iterable[tuple[int, ...]] = product(range(self.known.classes), repeat=len(x))
        if self.known.labels is not None:
            orders = dict.fromkeys(permutations(self.known.labels[self.k].tolist()))
        elif self._head_is_shared:
            yield self._labels_by_head(x)
        for order in orders:
            yield torch.tensor(order, dtype=torch.int64)

    @property
    def _head_is_shared(self) -> bool:
        return _model(self.known).parts.head[0] in self.update

    def _labels_by_head(self, x: Tensor) -> Tensor:
        """The labels (B,) of sentences: a sentence's features raise only the logit of its label."""
        model = _model(self.known)
        weight = model.parts.head[0]
        features = layer_inputs(model, self.params, module_of_weight(model, weight), x).double()  # (B, width)
        raised: Tensor = self.update[weight].double() @ torch.linalg.pinv(features)  # (classes, B)
        return raised.argmax(0).cpu()


def sentences_are_labels(known: Knowledge) -> bool:
    """Whether the task is next_token, where the sentences are their own labels."""
    return _model(known).task == "next_token"


def why_not_applicable(known: Knowledge) -> str:
    """Why an attack on sentences does not apply to this model; empty where it does."""
    if known.text is None or not isinstance(known.model, LanguageModel):
        return NEEDS_LANGUAGE_MODEL
    return ""


def _model(known: Knowledge) -> LanguageModel:
    assert isinstance(known.model, LanguageModel)
    return known.model
