"""Matching of sentences: embeddings descend towards the update that was seen, and moves of words in between put them in order.

DLG, TAG and LAMP (Balunović et al., NeurIPS 2022) are recipes of it; see fedgauge.attacks.text.lamp.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgauge.attacks import labels as labelling
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Status, Stream, Wave, not_applicable
from fedgauge.attacks.engine.optimizers import adam
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.text.distance import TOGETHER, Kind, Matcher, SentenceGuess
from fedgauge.attacks.text.language_prior import AUXILIARY, LanguageModelTraining, LanguagePrior, load_prior
from fedgauge.attacks.text.moves import on_all_positions, propose, shuffles
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import predicts_tokens
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch

DUMMIES = 32  # made-up sentences where label restoration asks for public ones and there are none
Discrete = Literal["alternating", "end", "none"]


@dataclass(frozen=True)
class staircase(adam):
    """Adam whose rate falls in steps.

    Args:
        stride: iterations after which it is multiplied by decay.
    """

    stride: int = 50

    def rate_at(self, iteration: int, iterations: int) -> float:
        """
        >>> [round(staircase(0.1, decay=0.5, stride=2).rate_at(i, 4), 3) for i in range(4)]
        [0.1, 0.1, 0.05, 0.05]
        """
        return float(self.rate * self.decay ** (iteration // self.stride))


@dataclass(frozen=True)
class TextMatching(Attack):
    """The engine; its fields make the recipe. Weights are those of the papers: gradients are compared in their own units.

    Lengths that are not given are read off the gradient of position embeddings, where it shows them (the longest of a batch);
    else all positions are words. Labels are restored or given; next words' are found beside the embeddings.

    Args:
        kind, l1: of the distance; see fedgauge.attacks.text.distance.
        optimizer: of the embeddings.
        length: weight of (mean length of the embeddings - that of the table's rows)^2.
        lm_weight: of the mean surprise of a word in nats, by which moves are judged.
        lm, lm_folder, training: the language model; see fedgauge.attacks.text.language_prior.
        draws: random starts, of which the likest is taken; orders: of its words, likewise.
        discrete: when words are moved: every so many iterations (period), as often at the end, or never.
        candidates: orders that are proposed each time.
        known_tokens: words are of those alone whose embeddings have a gradient, where it is shared.
        published: as the published code: the rounding that is the gradient of keys' biases counts, words may be special
            tokens, Adam's moments stay where they are when words move, and the best iterate is taken unread.
    """

    kind: Kind = "cosine"
    l1: float = 0.01
    optimizer: adam = field(default_factory=lambda: staircase(0.01, decay=0.89))
    length: float = 0.0
    lm_weight: float = 0.0
    lm: str = AUXILIARY
    lm_folder: Path | None = None
    training: LanguageModelTraining = field(default_factory=LanguageModelTraining)
    draws: int = 1
    orders: int = 1
    discrete: Discrete = "none"
    period: int = 75
    candidates: int = 200
    known_tokens: bool = False
    published: bool = False

    def __post_init__(self) -> None:
        for name in ("l1", "length", "lm_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("draws", "orders", "period", "candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def traced(self, snapshots: int) -> "TextMatching":
        raise ValueError("a trace is of pictures, and this attack finds words: it has no trace")

    def matcher(self, wave: Wave, known: Knowledge) -> Matcher:
        """What compares gradients, by a way of its own choice."""
        return Matcher(wave, known, self.kind, self.l1, keys=self.published)

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        started = time.perf_counter()
        if known.text is None or not isinstance(known.model, LanguageModel):
            return not_applicable(wave, "words are looked for, and the model reads images")
        try:
            layout = SentenceLayout(self, wave, known, budget.restarts)
            prior = self._prior(known) if self._moves and self.lm_weight else None
        except ValueError as error:
            return not_applicable(wave, str(error))
        search = _BatchDescent(self, layout, prior, streams, budget, Deadline(started, budget.seconds))
        with torch.no_grad():
            done, interrupted = search.run()
            return self._answers(search, done, interrupted, budget, time.perf_counter() - started)

    @property
    def _moves(self) -> bool:
        return self.discrete != "none"

    def _prior(self, known: Knowledge) -> LanguagePrior:
        assert isinstance(known.model, LanguageModel)
        text = None if known.auxiliary is None else known.auxiliary.x
        return load_prior(self.lm, self.lm_folder, known.model, text, self.training)

    def _answers(
        self, search: "_BatchDescent", done: int, interrupted: bool, budget: Budget, seconds: float
    ) -> list[Reconstruction]:
        """Each observation's restart of the lowest objective."""
        layout, restarts = search.layout, budget.restarts
        tokens, objectives = search.chosen()
        ranked = torch.where(objectives.isfinite(), objectives, torch.inf).view(-1, restarts)
        answers = []
        for k, best in enumerate(ranked.argmin(1).tolist()):
            row, share = k * restarts + best, seconds / len(ranked)
            if not bool(ranked[k, best].isfinite()):
                answers.append(
                    Reconstruction(None, None, float("nan"), done, share, "diverged", "the objective is not finite")
                )
                continue
            status: Status = "out_of_budget" if interrupted else "converged"
            reason = f"{done} of {budget.iterations} iterations in {budget.seconds} s" if interrupted else ""
            y = None if layout.labels is None else layout.labels[row].cpu()
            x = layout.written(tokens[row], row)
            answers.append(Reconstruction(x, y, float(ranked[k, best]), done, share, status, reason))
        return answers


class SentenceLayout:
    """What P problems of a wave share, and where their words stand.

    Attributes:
        table: embeddings (V, width) of all words; size: the mean length of their rows.
        words: ids (W,) that may be chosen; allowed: (P, W) of which each problem has these, None: all.
        lengths: (P, B) tokens of each sentence; mask: which positions exist (P, B, L); free: those that hold words.
        frame: embeddings (P, B, L, width) of the others.
        labels: (P, B), None for next words.

    Raises:
        ValueError: the attack cannot work on this wave.
    """

    def __init__(self, attack: TextMatching, wave: Wave, known: Knowledge, restarts: int) -> None:
        assert isinstance(known.model, LanguageModel)
        self.model, self.known = known.model, known
        self.matcher = attack.matcher(wave, known)
        self.table = self.model.value(self.model.parts.word, wave.params).detach()
        if known.shape[0] > self.model.positions:
            raise ValueError(
                f"sentences of {known.shape[0]} tokens, and the model has {self.model.positions} positions"
            )
        self.owners = torch.arange(len(wave) * restarts) // restarts
        self.lengths = lengths_of(wave, known)[self.owners]
        self.labels = None if predicts_tokens(known.loss) else _labels(wave, known)[self.owners].to(self.table.device)
        self.words = _vocabulary(self.model) if not attack.published else torch.arange(self.model.vocabulary)
        self.allowed = _known_tokens(wave, known, self.words)[self.owners] if attack.known_tokens else None
        self.size = float(self.table[self.words].norm(dim=1).mean())
        self._place()

    def _place(self) -> None:
        model, longest = self.model, int(self.lengths.max())
        at = torch.arange(longest)
        self.mask = at < self.lengths[..., None]
        first, last = len(model.start), len(model.end)
        self.free = (at >= first) & (at < (self.lengths - last)[..., None])
        ids = torch.full(self.mask.shape, model.pad)
        ids[..., :first] = torch.tensor(model.start, dtype=torch.int64)
        for i, token in enumerate(model.end):
            ids.scatter_(2, (self.lengths - last + i)[..., None], token)
        self.ids = ids
        device = self.table.device
        self.mask, self.free, self.owners = self.mask.to(device), self.free.to(device), self.owners.to(device)
        self.frame = self.table[ids.to(device)]

    def movable(self, row: int, sentence: int) -> Tensor:
        """Positions of a sentence's words."""
        return self.free[row, sentence].nonzero().flatten()

    def held(self, x: Tensor, rows: Tensor) -> Tensor:
        """Embeddings (N, B, L, width) of some problems, with the frame where no words are."""
        return torch.where(self.free[rows][..., None], x, self.frame[rows])

    def tokens(self, x: Tensor, soft: Tensor | None) -> Tensor:
        """Words (P, B, L): those of the nearest rows by angle; of next words, what is found of them as labels counts as much."""
        rows = F.normalize(self.table[self.words], dim=1)
        near = F.normalize(x, dim=-1) @ rows.T
        if soft is not None:
            near = near + soft[..., self.words.to(soft.device)]
        if self.allowed is not None:
            near = near.masked_fill(~self.allowed.to(x.device)[:, None, None], -torch.inf)
        found = self.words.to(x.device)[near.argmax(-1)]
        return torch.where(self.free, found, self.ids.to(x.device))

    def targets(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """What the clients' loss would be told of these words: labels, or next words' probabilities."""
        if self.labels is not None:
            return self.labels[rows]
        certain = F.one_hot(tokens, self.model.vocabulary).to(self.table)
        return certain * self.mask[rows][..., None]

    def spoken(self, tokens: Tensor, row: int, sentence: int) -> list[list[int]]:
        """Sentences (N, L) of one place as long as they are."""
        length = int(self.lengths[row, sentence])
        spoken: list[list[int]] = tokens[:, :length].tolist()
        return spoken

    def written(self, tokens: Tensor, row: int) -> Tensor:
        """A batch (B, L) as the data would have it."""
        whole = torch.full((self.known.batch_size, self.known.shape[0]), self.model.pad)
        whole[:, : tokens.shape[1]] = torch.where(self.mask[row], tokens, self.model.pad).cpu()
        return whole


class _DescentState(NamedTuple):
    """Where P problems stand: embeddings, next words' logits or None, and each one's two moments."""

    x: Tensor
    soft: Tensor | None
    moments: list[tuple[Tensor, Tensor]]

    def permuted(self, row: int, sentence: int, order: Tensor, moments: bool) -> None:
        """Put the words of one sentence in another order, in place."""
        kept = [self.x, *([] if self.soft is None else [self.soft])]
        kept += [t for both in self.moments for t in both] if moments else []
        for t in kept:
            t[row, sentence] = t[row, sentence][order.to(t.device)]


class _BatchDescent:
    """One wave's descent."""

    def __init__(
        self,
        attack: TextMatching,
        layout: SentenceLayout,
        prior: LanguagePrior | None,
        streams: Sequence[Stream],
        budget: Budget,
        clock: Deadline,
    ) -> None:
        self.attack, self.layout, self.prior, self.budget, self.clock = attack, layout, prior, budget, clock
        owners = layout.owners.tolist()
        draws = [i % budget.restarts for i in range(len(owners))]
        self.starts = [streams[k]("start", r) for k, r in zip(owners, draws, strict=True)]
        self.moving = [streams[k]("moves", r) for k, r in zip(owners, draws, strict=True)]
        self.rows = torch.arange(len(owners), device=layout.table.device)
        self.state = self._begin()
        self.best = torch.full((len(owners),), torch.inf, device=layout.table.device)
        self.kept = self.state.x.clone(), None if self.state.soft is None else self.state.soft.clone()

    def run(self) -> tuple[int, bool]:
        """The iterations done, and whether the clock ended them or the moves."""
        attack, iterations = self.attack, self.budget.iterations
        for done in range(iterations):
            if self.clock.over():
                return done, True
            self._step(done, iterations)
            if attack.discrete == "alternating" and (done + 1) % attack.period == 0:
                self._move()
        if attack.discrete == "end":
            self._return()
            for _ in range(max(1, iterations // attack.period)):
                self._move()
            self.kept = self.state.x, self.state.soft
            return iterations, self.clock.over()
        return iterations, False

    def _return(self) -> None:
        """To the best iterate."""
        self.state.x.copy_(self.kept[0])
        if self.state.soft is not None and self.kept[1] is not None:
            self.state.soft.copy_(self.kept[1])

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Each problem's words (P, B, L) and their objective (P,): of the best iterate, or of the last one where that is better."""
        tokens, objectives = self._judged(*self.kept)
        if self.attack.published:
            return tokens, objectives
        last, others = self._judged(self.state.x, self.state.soft)
        better = others < torch.where(objectives.isfinite(), objectives, torch.inf)
        return torch.where(better[:, None, None], last, tokens), torch.where(better, others, objectives)

    # ------------------------------------------------------------------------------------------------------ the start

    def _begin(self) -> _DescentState:
        layout = self.layout
        x = torch.stack([self._drawn(row) for row in range(len(self.rows))])
        soft = None
        if layout.labels is None:
            soft = layout.table.new_zeros(*x.shape[:3], layout.model.vocabulary)
        moments = [(torch.zeros_like(t), torch.zeros_like(t)) for t in (x, soft) if t is not None]
        return _DescentState(x, soft, moments)

    def _drawn(self, row: int) -> Tensor:
        """The likest of some random starts (B, L, width), then of orders of its words."""
        layout, attack, rng = self.layout, self.attack, self.starts[row]
        size = (attack.draws, *layout.mask.shape[1:], layout.table.shape[1])
        drawn = torch.randn(size, generator=rng).to(layout.table)
        drawn = drawn * (layout.size / drawn.norm(dim=-1, keepdim=True))
        x = drawn[self._likest(drawn, row)]
        if attack.orders > 1:
            whole = x.repeat(attack.orders, 1, 1, 1)
            for b in range(len(x)):
                movable = layout.movable(row, b)
                orders = on_all_positions(shuffles(len(movable), attack.orders, rng), movable, x.shape[1])
                whole[: len(orders), b] = x[b][orders]
            x = whole[self._likest(whole, row)]
        return layout.held(x[None], self.rows[row : row + 1])[0]

    def _likest(self, starts: Tensor, row: int) -> int:
        if len(starts) == 1 or self.clock.over():
            return 0
        rows = self.rows[row].expand(len(starts))
        pairs = zip(self.layout.held(starts, rows).split(TOGETHER), rows.split(TOGETHER), strict=True)
        found = torch.cat([self._distance(x, None, part) for x, part in pairs])
        return int(found.nan_to_num(torch.inf).argmin())

    # -------------------------------------------------------------------------------------------------- the objective

    def _guess(self, x: Tensor, soft: Tensor | None, rows: Tensor) -> SentenceGuess:
        layout = self.layout
        mask, owners = layout.mask[rows], layout.owners[rows]
        if layout.labels is not None:
            return SentenceGuess(x, layout.labels[rows], mask, owners)
        if soft is None:
            soft = x.new_zeros(*x.shape[:3], layout.model.vocabulary)
        return SentenceGuess(x, soft.softmax(-1) * mask[..., None], mask, owners)

    def _distance(self, x: Tensor, soft: Tensor | None, rows: Tensor) -> Tensor:
        return self.layout.matcher.value(self._guess(x, soft, rows))

    def _ordered(self, row: int, sentence: int, order: Tensor) -> Tensor:
        """Distances (N,) of a problem with one sentence's words in other orders (N, L)."""

        def moved(t: Tensor) -> Tensor:
            batches = t[row].repeat(len(order), *[1] * (t.dim() - 1))
            batches[:, sentence] = t[row, sentence][order]
            return batches

        x, soft, _ = self.state
        return self._distance(moved(x), None if soft is None else moved(soft), self.rows[row].expand(len(order)))

    def _step(self, done: int, iterations: int) -> None:
        """One step of Adam for all problems."""
        layout, (x, soft, moments) = self.layout, self.state
        guess = self._guess(x, soft, self.rows)
        value, by_x, by_y = layout.matcher.value_and_slopes(guess)
        extra, slope = self._length(x)
        value = value + extra
        self._keep(value)
        slopes = [(by_x + slope) * layout.free[..., None]]
        if by_y is not None:
            slopes.append(guess.y * (by_y - (guess.y * by_y).sum(-1, keepdim=True)))
        variables = [x] if soft is None else [x, soft]
        counts = [done] * len(x)
        for t, s, both in zip(variables, slopes, moments, strict=True):
            self.attack.optimizer.step(t, s.nan_to_num(0.0, 0.0, 0.0), both, counts, iterations)

    def _keep(self, value: Tensor) -> None:
        fell = value < self.best
        self.best = torch.where(fell, value, self.best)
        kept, soft = self.kept
        kept[fell] = self.state.x[fell]
        if soft is not None and self.state.soft is not None:
            soft[fell] = self.state.soft[fell]

    def _length(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The regulariser (P,) and its slope."""
        layout, weight = self.layout, self.attack.length
        counted = layout.mask if self.attack.published else layout.free
        norms = x.norm(dim=-1).clamp_min(1e-12)
        number = counted.flatten(1).sum(1).clamp(min=1)
        apart = (norms * counted).flatten(1).sum(1) / number - layout.size
        slope = (2 * weight * apart / number)[:, None, None, None] * x / norms[..., None]
        return weight * apart.square(), slope * counted[..., None]

    # ------------------------------------------------------------------------------------------------------ the moves

    def _move(self) -> None:
        """Put each sentence's words in the best of the proposed orders."""
        tokens = self.layout.tokens(self.state.x, None if self.state.soft is None else self.state.soft.softmax(-1))
        for row in range(len(self.rows)):
            for sentence in range(tokens.shape[1]):
                if self.clock.over():
                    return
                order = self._best_order(row, sentence, tokens[row, sentence])
                if order is not None:
                    self.state.permuted(row, sentence, order, moments=not self.attack.published)

    def _best_order(self, row: int, sentence: int, tokens: Tensor) -> Tensor | None:
        """The best order (L,) of a sentence, None where it is the one that it has."""
        layout = self.layout
        movable = layout.movable(row, sentence)
        orders = propose(len(movable), self.attack.candidates, self.moving[row])
        if len(orders) == 1:
            return None
        whole = on_all_positions(orders, movable, len(tokens))
        # in parts: soft labels of a large vocabulary are large
        total = torch.cat([self._ordered(row, sentence, part) for part in whole.split(TOGETHER)]).double().cpu()
        if self.prior is not None:
            spoken = layout.spoken(tokens[whole], row, sentence)
            total = total + self.attack.lm_weight * self.prior(spoken)
        total = total.nan_to_num(torch.inf)
        best = int(total.argmin())
        return whole[best] if total[best] < total[0] else None

    def _judged(self, x: Tensor, soft: Tensor | None) -> tuple[Tensor, Tensor]:
        """The words that embeddings are nearest to, and the objective of those words themselves."""
        layout = self.layout
        tokens = layout.tokens(x, None if soft is None else soft.softmax(-1))
        guess = SentenceGuess(
            layout.held(layout.table[tokens], self.rows),
            layout.targets(tokens, self.rows),
            layout.mask,
            layout.owners,
        )
        objectives = layout.matcher.value(guess).double().cpu()
        if self.prior is not None:
            told = [
                torch.cat([self.prior(layout.spoken(t[None], row, b)) for b, t in enumerate(batch)]).mean()
                for row, batch in enumerate(tokens)
            ]
            objectives = objectives + self.attack.lm_weight * torch.stack(told)
        return tokens, objectives


# ------------------------------------------------------------------------------------------------- what the update betrays


def lengths_of(wave: Wave, known: Knowledge) -> Tensor:
    """Tokens of each sentence (K, B): as given, or as many as the gradient of position embeddings has rows, or all.

    Those rows tell a batch's longest sentence; in next_token nothing is predicted from the last word, which has none.
    """
    assert isinstance(known.model, LanguageModel) and known.text is not None
    model, longest = known.model, known.shape[0]
    least = len(model.start) + len(model.end) + 1
    if known.text.lengths is not None:
        return known.text.lengths.clamp(min(least, longest), longest)
    told, name = known.chain.update_distribution, model.parts.position
    disturbed = told is None or told.noisy or told.sparse or told.signed
    found = torch.full((len(wave),), longest)
    if name in wave.update and not disturbed:
        rows = (wave.update[name] != 0).any(2).sum(1).cpu() + int(model.task == "next_token")
        found = torch.where(rows >= least, rows, longest).clamp(max=longest)
    return found[:, None].expand(-1, known.batch_size).clone()


def _labels(wave: Wave, known: Knowledge) -> Tensor:
    """Labels (K, B), as given or as restored from the update."""
    if known.auxiliary is None:
        model = known.model
        assert isinstance(model, LanguageModel)
        drawn = _vocabulary(model)[torch.randint(len(_vocabulary(model)), (DUMMIES, 8), generator=_dummies())]
        x = framed(drawn.tolist(), known.shape[0], model.pad, model.start, model.end)
        known = replace(known, auxiliary=Batch(x, torch.zeros(DUMMIES, dtype=torch.int64)))
    return labelling.restore(wave, known)


def _dummies() -> Generator:
    return generator("dummy sentences")


def _vocabulary(model: LanguageModel) -> Tensor:
    """Ids that are words."""
    special = torch.tensor(sorted(model.special), dtype=torch.int64)
    ids = torch.arange(model.vocabulary)
    return ids[~torch.isin(ids, special) & (ids < model.tokenizer.size)]


def _known_tokens(wave: Wave, known: Knowledge, words: Tensor) -> Tensor:
    """Which words' embeddings have a gradient (K, W) in each update; ValueError where that tells nothing."""
    assert isinstance(known.model, LanguageModel)
    name = known.model.parts.word
    if name not in wave.update:
        raise ValueError("known_tokens reads the gradient of word embeddings, and it is not shared: leave it out")
    if known.model.parts.tied:
        raise ValueError("known_tokens needs untied rows: here the head's gradient is in that of all word embeddings")
    used = (wave.update[name] != 0).any(2).cpu()
    most, least = known.batch_size * known.shape[0], int(used[:, words].sum(1).min())
    if int(used.sum(1).max()) > most or not least:
        raise ValueError(
            f"known_tokens: {int(used.sum(1).max()):,} word embeddings have a gradient, and there were 1 to {most:,} tokens: "
            "a defense hides which"
        )
    return used[:, words]
