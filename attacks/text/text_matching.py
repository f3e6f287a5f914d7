"""Matching of sentences: embeddings descend on the distance to the observed update, and moves reorder the words in between.

DLG, TAG and LAMP (Balunović et al., NeurIPS 2022) are recipes of it; see fedgauge.attacks.text.lamp.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Status, Stream, Wave, not_applicable
from fedgauge.attacks.engine.optimizers import adam
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.text.certificate import why_not_applicable
from fedgauge.attacks.text.distance import TOGETHER, Kind, Matcher, SentenceGuess
from fedgauge.attacks.text.language_prior import AUXILIARY, LanguageModelTraining, LanguagePrior, load_prior
from fedgauge.attacks.text.moves import on_all_positions, propose, shuffles
from fedgauge.attacks.text.sentence_layout import SentenceLayout
from fedgauge.client.components import check_at_least
from fedgauge.client.models.language import LanguageModel

Discrete = Literal["alternating", "end", "none"]


@dataclass(frozen=True)
class staircase(adam):
    """Adam whose rate falls in steps.

    Args:
        stride: iterations after which the rate is multiplied by decay.
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
    """The engine of all recipes, which set its fields. Weights are the papers': gradients are compared in their own units.

    Lengths that are not given are read off the gradient of position embeddings where it is usable (the longest of a batch);
    else all positions hold words. Labels are restored or given; the labels of next_token are optimised beside the embeddings.

    Args:
        kind, l1: of the distance; see fedgauge.attacks.text.distance.
        optimizer: of the embeddings.
        length: weight of (mean length of the embeddings - that of the table's rows)^2.
        lm_weight: of a word's mean negative log-likelihood in nats, by which moves are chosen.
        lm, lm_folder, training: the language model; see fedgauge.attacks.text.language_prior.
        draws: random starts, of which the nearest to the update is taken; orders: random orders of its words, likewise.
        discrete: words move every `period` iterations (alternating), as often at the end, or never (none).
        candidates: orders that are proposed each time.
        known_tokens: use only words whose embeddings have a gradient; that gradient must be shared.
        published: as the published code does: the gradient of keys' biases, which is only rounding, counts; words may be special
            tokens; Adam's moments stay in place when words move; and the best iterate is answered without comparing the last.
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
        check_at_least(self, 0, "l1", "length", "lm_weight")
        check_at_least(self, 1, "draws", "orders", "period", "candidates")

    @property
    def trains_first(self) -> bool:
        return self.lm_weight > 0

    def traced(self, snapshots: int) -> "TextMatching":
        raise ValueError("a trace records images, and this attack finds words: it has no trace; leave trace out")

    def matcher(self, wave: Wave, known: Knowledge) -> Matcher:
        """Compares gradients of guesses with those of the wave."""
        return Matcher(wave, known, self.kind, self.l1, keys=self.published)

    def layout(self, wave: Wave, known: Knowledge, restarts: int) -> SentenceLayout:
        """Where the words of a wave's sentences stand."""
        return SentenceLayout(self.matcher(wave, known), wave, known, restarts, self.published, self.known_tokens)

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        started = time.perf_counter()
        if reason := why_not_applicable(known):
            return not_applicable(wave, reason)
        try:
            layout = self.layout(wave, known, budget.restarts)
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
        device = next(known.model.parameters()).device
        return load_prior(self.lm, self.lm_folder, known.model, text, self.training, device)

    def _answers(
        self, search: "_BatchDescent", done: int, interrupted: bool, budget: Budget, seconds: float
    ) -> list[Reconstruction]:
        """Each observation's restart with the lowest objective."""
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
            x = layout.padded(tokens[row], row)
            answers.append(Reconstruction(x, y, float(ranked[k, best]), done, share, status, reason))
        return answers


class _DescentState(NamedTuple):
    """The iterate of P problems: embeddings, next words' logits or None, and Adam's two moments of each."""

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
    """The descent of one wave's problems, all in one batch."""

    def __init__(
        self,
        attack: TextMatching,
        layout: SentenceLayout,
        prior: LanguagePrior | None,
        streams: Sequence[Stream],
        budget: Budget,
        deadline: Deadline,
    ) -> None:
        self.attack, self.layout, self.prior, self.budget, self.deadline = attack, layout, prior, budget, deadline
        owners = layout.owners.tolist()
        draws = [i % budget.restarts for i in range(len(owners))]
        self.starts = [streams[k]("start", r) for k, r in zip(owners, draws, strict=True)]
        self.moving = [streams[k]("moves", r) for k, r in zip(owners, draws, strict=True)]
        self.rows = torch.arange(len(owners), device=layout.table.device)
        self.state = self._begin()
        self.best = torch.full((len(owners),), torch.inf, device=layout.table.device)
        self.kept = self.state.x.clone(), None if self.state.soft is None else self.state.soft.clone()

    def run(self) -> tuple[int, bool]:
        """The iterations done, and whether the deadline ended them."""
        attack, iterations = self.attack, self.budget.iterations
        for done in range(iterations):
            if self.deadline.over():
                return done, True
            self._step(done, iterations)
            if attack.discrete == "alternating" and (done + 1) % attack.period == 0:
                self._move()
        if attack.discrete == "end":
            self._return_to_best()
            for _ in range(max(1, iterations // attack.period)):
                self._move()
            self.kept = self.state.x, self.state.soft
            return iterations, self.deadline.over()
        return iterations, False

    def _return_to_best(self) -> None:
        self.state.x.copy_(self.kept[0])
        if self.state.soft is not None and self.kept[1] is not None:
            self.state.soft.copy_(self.kept[1])

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Each problem's words (P, B, L) and their objective (P,), of the best iterate or of the last, whichever is better."""
        tokens, objectives = self._scored(*self.kept)
        if self.attack.published:
            return tokens, objectives
        last, others = self._scored(self.state.x, self.state.soft)
        better = others < torch.where(objectives.isfinite(), objectives, torch.inf)
        return torch.where(better.to(last.device)[:, None, None], last, tokens), torch.where(better, others, objectives)

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
        """The random start (B, L, width) nearest to the update, then the nearest order of its words."""
        layout, attack, rng = self.layout, self.attack, self.starts[row]
        size = (attack.draws, *layout.mask.shape[1:], layout.table.shape[1])
        drawn = torch.randn(size, generator=rng).to(layout.table)
        drawn = drawn * (layout.size / drawn.norm(dim=-1, keepdim=True))
        x = drawn[self._nearest(drawn, row)]
        if attack.orders > 1:
            whole = x.repeat(attack.orders, 1, 1, 1)
            for b in range(len(x)):
                movable = layout.movable(row, b)
                orders = on_all_positions(shuffles(len(movable), attack.orders, rng), movable, x.shape[1])
                whole[: len(orders), b] = x[b][orders]
            x = whole[self._nearest(whole, row)]
        return layout.framed(x[None], self.rows[row : row + 1])[0]

    def _nearest(self, starts: Tensor, row: int) -> int:
        if len(starts) == 1 or self.deadline.over():
            return 0
        rows = self.rows[row].expand(len(starts))
        pairs = zip(self.layout.framed(starts, rows).split(TOGETHER), rows.split(TOGETHER), strict=True)
        distances = torch.cat([self._distance(x, None, part) for x, part in pairs])
        return int(distances.nan_to_num(torch.inf).argmin())

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
        """Distances (N,) of one problem for N orders (N, L) of one sentence's words."""

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
        self._keep_best(value)
        slopes = [(by_x + slope) * layout.free[..., None]]
        if by_y is not None:
            slopes.append(guess.y * (by_y - (guess.y * by_y).sum(-1, keepdim=True)))
        variables = [x] if soft is None else [x, soft]
        counts = [done] * len(x)
        for t, s, both in zip(variables, slopes, moments, strict=True):
            self.attack.optimizer.step(t, s.nan_to_num(0.0, 0.0, 0.0), both, counts, iterations)

    def _keep_best(self, value: Tensor) -> None:
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
                if self.deadline.over():
                    return
                order = self._best_order(row, sentence, tokens[row, sentence])
                if order is not None:
                    self.state.permuted(row, sentence, order, moments=not self.attack.published)

    def _best_order(self, row: int, sentence: int, tokens: Tensor) -> Tensor | None:
        """The best order (L,) of a sentence, None where none beats the present one."""
        layout = self.layout
        movable = layout.movable(row, sentence)
        orders = propose(len(movable), self.attack.candidates, self.moving[row])
        if len(orders) == 1:
            return None
        whole = on_all_positions(orders, movable, len(tokens))
        # in parts: soft labels of a large vocabulary are large
        total = torch.cat([self._ordered(row, sentence, part) for part in whole.split(TOGETHER)]).double().cpu()
        if self.prior is not None:
            total = total + self.attack.lm_weight * self.prior(layout.as_lists(tokens[whole], row, sentence))
        total = total.nan_to_num(torch.inf)
        best = int(total.argmin())
        return whole[best] if total[best] < total[0] else None

    def _scored(self, x: Tensor, soft: Tensor | None) -> tuple[Tensor, Tensor]:
        """The words nearest to the embeddings, and the objective of those words."""
        layout = self.layout
        tokens = layout.tokens(x, None if soft is None else soft.softmax(-1))
        guess = SentenceGuess(
            layout.framed(layout.table[tokens], self.rows),
            layout.targets(tokens, self.rows),
            layout.mask,
            layout.owners,
        )
        objectives = layout.matcher.value(guess).double().cpu()
        if self.prior is not None:
            nll = [
                torch.cat([self.prior(layout.as_lists(t[None], row, b)) for b, t in enumerate(batch)]).mean()
                for row, batch in enumerate(tokens)
            ]
            objectives = objectives + self.attack.lm_weight * torch.stack(nll)
        return tokens, objectives
