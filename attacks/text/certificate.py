"""The certificate of a guess: put through the client's own step, it gives the very update, so it is right without the truth."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, permutations, product

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge, Reconstruction, Wave
from fedgauge.attacks.text.layer_inputs import layer_inputs, module_of_weight
from fedgauge.client.chain import Chain
from fedgauge.client.data.corpora import targets
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.training import gradient
from fedgauge.client.update import Batch, Params, Update, norm, relative_error

TOLERANCE = 1e-5  # relative, a hundred roundings of float32; two words of an untrained network exchanged are 6e-4
MOST_ORDERS = 24  # of labels or of sentences that are tried: a batch of four stands in so many
UNLIKE = "a guess that is put through the client's step gives {:.1e} of the update's norm too little or too much"


def why_unprovable(chain: Chain) -> str:
    """Why no guess can be proven under a chain, in words; empty where the right one gives the update to rounding."""
    seen = chain.update_distribution
    if seen is not None and seen.noisy:
        return "the chain adds noise, which nobody can re-create"
    if seen is not None and seen.signed:
        return "only signs are seen, and those of entries that are zero but for rounding are chance"
    if chain.mean != chain:
        return "the chain draws at random, or keeps what the server does not see"
    return ""


@dataclass(eq=False)
class GuessVerifier:
    """One observation, and what guesses at it give; it counts them.

    Args:
        k: which of the wave's.
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
        """The weights that the client began with."""
        return self.wave.params

    @property
    def reason(self) -> str:
        """What keeps every attack from reading this update; empty where nothing does."""
        if not bool(torch.isfinite(self._norm)):
            return "the update is not finite"
        return "" if bool(self._norm > 0) else "the update is zero"

    def of(self, batch: Batch) -> Update:
        """The update that a client would send of a batch, without its noise."""
        self.spent += 1
        return {name: t.detach() for name, t in self.known.forward(self.params, batch, None).items()}

    def error(self, batch: Batch) -> float:
        """|update of the batch - seen| / |seen|."""
        return self.distance(self.of(batch))

    def distance(self, update: Update) -> float:
        """|update - seen| / |seen|."""
        return relative_error(update, self.update)

    def best(self, batches: Iterable[Batch]) -> tuple[Batch, float]:
        """The first batch that is proven, else the one that comes nearest."""
        found: tuple[Batch, float] | None = None
        for batch in batches:
            error = self.error(batch)
            if found is None or error < found[1] or math.isnan(found[1]):
                found = batch, error
            if error <= TOLERANCE:
                break
        assert found is not None
        return found

    def judge(self, x: Tensor) -> tuple[Batch, float]:
        """Sentences (B, L) with their labels, as they explain the update best, and the relative error that is left."""
        return self.best(islice(self.readings(x), MOST_ORDERS))

    def answer(self, batch: Batch, error: float, seconds: float) -> Reconstruction:
        """A reconstruction that says whether it is proven."""
        y = batch.y if batch.y.dim() == 1 else None
        return Reconstruction(batch.x, y, error, self.spent, seconds, "converged", self.verdict(batch, error))

    def faintest(self, batch: Batch) -> float:
        """The gradient of the sentence that adds least, of the batch's; it counts as no iteration."""
        step = gradient(self.known.model, self.known.loss)

        def size(part: Batch) -> float:
            return float(norm({k: t.detach().double() for k, t in step(self.params, part, None).items()}))

        if len(batch.x) == 1:
            return 1.0
        parts = [size(Batch(batch.x[i : i + 1], batch.y[i : i + 1])) for i in range(len(batch.x))]
        return min(1.0, min(parts) / len(parts) / size(batch))

    def verdict(self, batch: Batch, error: float) -> str:
        """Whether a guess that leaves this relative error is proven, in words.

        A sentence of which the model is sure adds next to nothing: the error must be small beside that, too.
        """
        if why := why_unprovable(self.known.chain):
            return f"no certificate: {why}"
        if not error <= TOLERANCE:
            return f"no certificate: {UNLIKE.format(error)}"
        if not error <= TOLERANCE * self.faintest(batch):
            return "no certificate: a sentence adds so little to the update that others would leave as small an error"
        return f"certified: put through the client's step, the guess gives the update to {error:.0e}"

    def readings(self, x: Tensor) -> Iterator[Batch]:
        """Every batch that the sentences may have been, the likeliest first: orders of labels, of slices the sentences' own."""
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
        elif self._features_known:
            yield self._read_off(x)
        for order in orders:
            yield torch.tensor(order, dtype=torch.int64)

    @property
    def _features_known(self) -> bool:
        return _model(self.known).parts.head[0] in self.update

    def _read_off(self, x: Tensor) -> Tensor:
        """The labels (B,) of sentences: of the logits that a sentence's features reach, its label's alone is raised."""
        model = _model(self.known)
        weight = model.parts.head[0]
        features = layer_inputs(model, self.params, module_of_weight(model, weight), x).double()  # (B, width)
        raised: Tensor = self.update[weight].double() @ torch.linalg.pinv(features)  # (classes, B)
        return raised.argmax(0)


def sentences_are_labels(known: Knowledge) -> bool:
    """Whether words are predicted from those before: no other label is to be found."""
    return _model(known).task == "next_token"


def why_not_applicable(known: Knowledge) -> str:
    """Why an attack on sentences has nothing to attack; empty where it has."""
    if known.text is None or not isinstance(known.model, LanguageModel):
        return "it reads sentences out of a model of words, and this is none"
    return ""


def _model(known: Knowledge) -> LanguageModel:
    assert isinstance(known.model, LanguageModel)
    return known.model
