"""Learning To Invert for text: a network trained to reconstruct sentences from updates (Wu, Chen, Guo & Weinberger, UAI 2023).

It trains on simulated updates of auxiliary sentences behind the clients' own chain, hashed into fewer numbers. It outputs one
vector for every position of every sentence, and one shared layer maps these vectors to words.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Streams, Wave, not_applicable
from fedgauge.attacks.engine.cache import digest
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.learned.learning_to_invert import hungarian
from fedgauge.attacks.learned.shadow_updates import ShadowTrainer, UpdateFeatures
from fedgauge.attacks.learned.trainer import TrainingRecord, load, perceptron, seeded, train_inverter
from fedgauge.attacks.text.certificate import language_model
from fedgauge.client.components import Count, Natural, Positive
from fedgauge.client.data.corpora import targets
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.psnr import assigned
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, as_rows, concatenate

NEVER = -1e4  # log-probability of a word that is not in the auxiliary text; finite, so that sums of it are numbers
IN_ONE_PASS = 256  # held-out updates in one pass


@dataclass(frozen=True)
class learning_to_invert_text(Attack):
    """The published inverter; iterations are Adam's steps.

    Training ends early when held-out auxiliary sentences have not become likelier for `patience` epochs; the best epoch's
    weights are used. Words that do not occur in the auxiliary text are never output. Labels are not needed.

    Args:
        hidden, layers: of the perceptron; the last layer has `width` units for every position.
        batch, rate: of Adam; the rate is cut to a tenth at 3/4 of the steps.
        buckets, signed: of feature hashing; 0 buckets: no hashing. The paper's sums have no signs.
        passes: how often each auxiliary sentence is grouped with new others, for batches of several.
        pseudo: number of additional made-up sentences; their words are drawn at the auxiliary text's frequencies.
        alone: train on no other sentences, like the paper's attacker, who knows word frequencies but no text.
    """

    hidden: Count = 1000
    layers: Count = 3
    width: Count = 128
    batch: Count = 64
    rate: Positive = 1e-3
    patience: Count = 5
    buckets: Natural = 4096
    signed: bool = True
    passes: Count = 1
    pseudo: Natural = 0
    alone: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alone and not self.pseudo:
            raise ValueError("the setting alone needs made-up sentences: set pseudo above 0")

    trains_first = True

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        clock = Deadline(budget.seconds)
        try:
            model = language_model(known)
            view = UpdateFeatures(False, self.buckets, self.signed)
            learnt_from = known
            if self.pseudo and (text := known.auxiliary) is not None:
                made = pseudo_sentences(text, self.pseudo, known.classes, model)
                learnt_from = replace(known, auxiliary=made if self.alone else concatenate([text, made]))
            shadow = ShadowTrainer(learnt_from, wave.params, view, self.passes)
            words = shadow.auxiliary.x.unique()  # those that occur in the training text
            network, record = self._inverter(shadow, words, budget, clock)
        except ValueError as error:
            return not_applicable(wave, str(error))
        with torch.no_grad():
            logits = [network(row[None])[0] for row in view.hashed(as_rows(wave.update))]
        return [answer_of(own, words, record, known, k) for k, own in enumerate(logits)]

    def _inverter(
        self, shadow: ShadowTrainer, words: Tensor, budget: Budget, clock: Deadline
    ) -> tuple["SentenceNetwork", TrainingRecord]:
        known, name = shadow.known, digest("text", shadow.key, self, budget)
        widths = [shadow.columns, *[self.hidden] * (self.layers - 1)]
        size = (known.batch_size, known.shape[0], self.width)
        network = seeded(lambda: SentenceNetwork(widths, size, len(words)), "inverter", name)
        network = network.to(next(iter(shadow.params.values())))

        def loss(logits: Tensor, groups: Tensor) -> Tensor:
            return matched_nll(logits, torch.searchsorted(words, shadow.auxiliary.x[groups]))

        def train() -> dict[str, Tensor]:
            settings = (self.batch, self.rate, self.patience, budget.iterations, clock)
            return train_inverter(
                shadow, name, network, loss, *settings, prepare=network.standardise, together=IN_ONE_PASS
            )

        return network, load(network, shadow.cache.get(f"inverter-{name}", train))


def pseudo_sentences(text: Batch, count: int, classes: int, model: LanguageModel) -> Batch:
    """Sentences with lengths and word frequencies of a text x (N, L), and labels drawn uniformly."""
    rng = generator("pseudo-sentences", digest(text.x), count)
    x = text.x[torch.randint(len(text.x), (count,), generator=rng)]
    special = torch.tensor(sorted(model.special))
    said = text.x[~torch.isin(text.x, special)]
    drawn = said[torch.randint(len(said), x.shape, generator=rng)]
    x = torch.where(torch.isin(x, special), x, drawn)
    if text.y.dim() > 1:
        return Batch(x, targets(x, model.pad))
    return Batch(x, torch.randint(classes, (count,), generator=rng))


class SentenceNetwork(nn.Module):
    """Logits (n, B, L, words) from hashed updates (n, columns), which it standardises first.

    Args:
        widths: columns and the hidden layers'.
        size: B, L, and the length of a position's vector.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, widths: Sequence[int], size: tuple[int, int, int], words: int) -> None:
        super().__init__()
        self.size = size
        self.body = perceptron([*widths, math.prod(size)])
        self.words = nn.Linear(size[-1], words)
        self.register_buffer("mean", torch.zeros(widths[0]))
        self.register_buffer("deviation", torch.ones(widths[0]))

    def standardise(self, rows: Tensor, noise: Tensor) -> None:
        """Take mean and deviation of the training rows, with the deviation (columns,) of the noise that is added to them."""
        variance, self.mean = torch.var_mean(rows, 0, correction=0)
        variance = variance + noise.square()
        self.deviation = torch.where(variance > 0, variance, 1.0).sqrt()  # a column that never changes stays 0

    def forward(self, rows: Tensor) -> Tensor:
        vectors = self.body((rows - self.mean) / self.deviation)
        logits: Tensor = self.words(vectors.view(len(rows), *self.size))
        return logits


def matched_nll(logits: Tensor, truth: Tensor) -> Tensor:
    """Mean -log p of the words of sentences (n, B, L) under logits (n, B, L, words), by each row's best pairing."""
    if truth.shape[1] > 1:
        log = logits.detach().log_softmax(-1)
        costs = [-log.gather(3, own[:, None, :, None].expand(*log.shape[:3], 1)).sum((2, 3)) for own in truth.unbind(1)]
        order = hungarian(torch.stack(costs, 1))
        logits = logits.gather(1, order[:, :, None, None].expand_as(logits))
    return F.cross_entropy(logits.flatten(0, 2), truth.flatten())


def answer_of(logits: Tensor, vocabulary: Tensor, record: TrainingRecord, known: Knowledge, k: int) -> Reconstruction:
    """The likeliest sentences of the k-th update under its logits (B, L, words) of the words of a vocabulary (words,)."""
    model = language_model(known)
    if not bool(logits.isfinite().all()):
        return record.answer(None)
    log = logits.new_full((*logits.shape[:2], model.vocabulary), NEVER)
    log[..., vocabulary] = logits.log_softmax(-1)
    return record.answer(likeliest(log, model, None if known.lengths is None else known.lengths[k]))


def likeliest(log: Tensor, model: LanguageModel, lengths: Tensor | None) -> Tensor:
    """The likeliest sentences (B, L) under each position's log-probabilities (B, L, vocabulary), framed and padded.

    Args:
        lengths: (B,) including special tokens; None: the likeliest.
    """
    log, lengths = log.cpu(), None if lengths is None else lengths.cpu()
    special = torch.tensor(sorted(model.special))
    best = log.index_fill(2, special, -torch.inf).max(2)
    start, end = torch.tensor(model.start, dtype=torch.int64), torch.tensor(model.end, dtype=torch.int64)
    least, longest = len(start) + len(end) + 1, log.shape[1]

    def total(n: int) -> Tensor:
        """The log-probability (B,) of the likeliest sentences of n tokens."""
        inner = best.values[:, len(start) : n - len(end)].sum(1)
        for place, token in enumerate(model.end, n - len(end)):
            inner = inner + log[:, place, token]
        return inner + log[:, n:, model.pad].sum(1)

    sums = torch.stack([total(n) for n in range(least, longest + 1)], 1)  # (B, lengths)
    rows = range(len(log))
    if lengths is None:
        chosen = [(j, least + int(sums[j].argmax())) for j in rows]
    else:
        given = lengths.clamp(least, longest)
        order = assigned(-sums[:, given - least].T)
        chosen = [(int(j), int(n)) for j, n in zip(order, given, strict=True)]
    found = torch.full(log.shape[:2], model.pad)
    for k, (j, n) in enumerate(chosen):
        found[k, :n] = torch.cat([start, best.indices[j, len(start) : n - len(end)], end])
    return found
