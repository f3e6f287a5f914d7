"""Learned rows: a network reads each word's own rows of the embedding and head gradients and predicts the word's positions.

Row v of the word embeddings' gradient sums the error signals at the positions of word v. Row v of the head's gradient sums the
features where it is the next word. One small network reads the rows of any word. It is trained on simulated updates behind
the clients' own chain and so adapts to any defense.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Streams, Wave, not_applicable
from fedgauge.attacks.engine.cache import digest
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.attacks.learned.shadow_updates import ShadowTrainer, UpdateFeatures
from fedgauge.attacks.learned.trainer import TrainingRecord, load, perceptron, seeded, train
from fedgauge.attacks.text.certificate import language_model
from fedgauge.attacks.text.learning_to_invert_text import NEVER, answer_of
from fedgauge.client.components import Count, Positive
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.rng import generator
from fedgauge.client.update import Update

LOUDEST, DRAWN = 24, 16  # candidates beside a sentence's words: those with the largest rows, and random others
TINY = 1e-12
MOST_HELD_OUT = 512  # held-out shadow updates at most


@dataclass(frozen=True)
class learned_rows(Attack):
    """Predicts words by position from their rows of the gradients, one sentence per update.

    The budget's iterations are Adam's steps. Training ends early when held-out auxiliary sentences have not become likelier
    for `patience` checks; the best weights are used. The word embeddings or an untied head must share their gradients.

    Args:
        hidden: units of the two hidden layers.
        batch, rate: sentences per step of Adam, and its rate, cut to a tenth at 3/4 of the steps.
        every: steps between two checks of held-out sentences.
    """

    hidden: Count = 256
    batch: Count = 32
    rate: Positive = 1e-3
    patience: Count = 5
    every: Count = 100

    trains_first = True

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        clock = Deadline(budget.seconds)
        if known.batch_size != 1:
            reason = f"it reads one sentence per update; in a batch of {known.batch_size} a word's sentence is unknown"
            return not_applicable(wave, reason)
        try:
            tables = row_tables(language_model(known), wave.params)
            shadow = ShadowTrainer(known, wave.params, UpdateFeatures(False))
            network, record = self._trained(shadow, tables, budget, clock)
        except ValueError as error:
            return not_applicable(wave, str(error))
        words = shadow.auxiliary.x.unique()
        with torch.no_grad():
            updates = ({name: t[k : k + 1] for name, t in wave.update.items()} for k in range(len(wave)))
            scores = [network(row_features(tables, update)[0])[words].T[None] for update in updates]  # (1, L, words)
        return [answer_of(own, words, record, known, k) for k, own in enumerate(scores)]

    def _trained(
        self, shadow: ShadowTrainer, tables: Sequence[str], budget: Budget, clock: Deadline
    ) -> tuple[nn.Module, TrainingRecord]:
        name = digest("rows", shadow.key, self, budget)
        features = row_features(tables, {name: t[None] for name, t in shadow.params.items()}).shape[2]
        widths = [features, self.hidden, self.hidden, shadow.known.shape[0]]
        network = seeded(lambda: perceptron(widths), "rows", name).to(shadow.device)

        def loss(rows: Tensor, positions: Tensor) -> Tensor:
            return F.cross_entropy(network(rows) + NEVER * rows[..., -1:], positions)

        def batches(rows: Tensor, truth: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
            rng = generator("rows", name)
            while True:
                chosen = torch.randint(len(rows), (self.batch,), generator=rng)
                yield rows[chosen], truth[chosen]

        def trained() -> dict[str, Tensor]:
            own, held = (shadow_rows(shadow, tables, part) for part in (False, True))
            settings = (self.rate, self.patience, budget.iterations, clock)
            return train(network, loss, batches(*own), [held], self.every, *settings)

        return network, load(network, shadow.cache.get(f"positions-{name}", trained))


def row_tables(model: LanguageModel, params: Update) -> list[str]:
    """Names of the tensors that have a row for every word.

    Raises:
        ValueError: none is shared.
    """
    named = dict.fromkeys((model.parts.word, *model.parts.head))
    tables = [name for name in named if name in params and len(params[name]) == model.vocabulary]
    if not tables:
        raise ValueError("it reads each word's row in the gradient of word embeddings or head, and neither is shared")
    return tables


def row_features(tables: Sequence[str], updates: Update) -> Tensor:
    """Features (n, vocabulary, F) of updates (n, ...): each row's direction, and its size relative to the largest row.

    The last feature is 1 for a repeated candidate, which only training data has, and which is never the answer.
    """
    parts = []
    for name in tables:
        rows = updates[name].reshape(*updates[name].shape[:2], -1)
        sizes = rows.norm(dim=2, keepdim=True)
        largest = sizes.amax(1, keepdim=True).clamp(min=TINY)
        parts += [rows / sizes.clamp(min=TINY), (sizes / largest + 1e-6).log10()]
    return torch.cat([*parts, torch.zeros_like(parts[-1])], 2)


def shadow_rows(shadow: ShadowTrainer, tables: Sequence[str], held: bool) -> tuple[Tensor, Tensor]:
    """Candidates' features (n, candidates, F), and the index of the true one at each position (n, L)."""
    groups = shadow.groups(held)[: MOST_HELD_OUT if held else None]
    x, y = shadow.auxiliary.x[groups], shadow.auxiliary.y[groups]
    rng, done, parts = generator("rows lessons", shadow.key, held), 0, []
    for updates in Simulator(shadow.known, shadow.params).updates(x, y, rng):
        rows, table = row_features(tables, updates), updates[tables[0]]
        sizes = table.reshape(*table.shape[:2], -1).norm(dim=2)
        sentences = x[done : done + len(sizes), 0]
        done += len(sizes)
        loudest = sizes.topk(min(LOUDEST, sizes.shape[1]), dim=1).indices
        drawn = torch.randint(sizes.shape[1], (len(sentences), DRAWN), generator=rng)
        candidates = torch.cat([sentences, loudest, drawn.to(sentences.device)], 1)
        first = (candidates[:, :, None] == candidates[:, None]).int().argmax(2)  # the first of equal words
        features = rows.gather(1, candidates[..., None].expand(-1, -1, rows.shape[2]))
        again = first != torch.arange(candidates.shape[1], device=first.device)
        features[again] = F.one_hot(torch.tensor(rows.shape[2] - 1), rows.shape[2]).to(rows)
        parts.append((features, first[:, : sentences.shape[1]]))
    rows, truth = (torch.cat(part) for part in zip(*parts, strict=True))
    return rows, truth
