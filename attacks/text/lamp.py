"""LAMP, TAG and DLG: gradient matching for sentences, against classifiers and next-word predictors.

Embeddings descend on the distance to the observed update, and moves reorder the words in between.

Balunović et al., "LAMP: Extracting Text from Gradients with Language Model Priors" (NeurIPS 2022); Deng et al., "TAG" (2021);
Zhu et al., "Deep Leakage from Gradients" (2019), as LAMP's paper compares it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Generator, Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Status, Streams, Wave, not_applicable
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.text.certificate import language_model
from fedgauge.attacks.text.distance import TOGETHER, Kind, Matcher
from fedgauge.attacks.text.ghost_products import SentenceGuess
from fedgauge.attacks.text.language_prior import AUXILIARY, LanguagePrior, PretrainedPrior, TrainedPrior
from fedgauge.attacks.text.sentence_layout import SentenceLayout, on_all_positions, propose, shuffles
from fedgauge.client.components import Count, NotNegative

Discrete = Literal["alternating", "end", "none"]
# of length and language model, as published
WEIGHTS = {"cosine": (1.0, 0.2), "l2_l1": (25.0, 60.0), "squared": (0.0, 0.0)}


@dataclass(frozen=True)
class lamp(Attack):
    """LAMP: gradient matching alternates with moves of words that a language model scores. The paper's budget: 2,000 iterations.

    Lengths that are not given are read off the gradient of position embeddings where it is usable (the longest of a batch);
    else all positions hold words. Labels are restored or given; labels of next_token are optimised with the embeddings.

    Args:
        loss: cosine, or squares plus l1 times the magnitudes.
        rate, decay, stride: of Adam; the rate is multiplied by decay every stride iterations.
        length: weight of the embeddings' lengths; default: the paper's, 1, or 25 with l2_l1.
        lm_weight: of the language model; default: the paper's, 0.2, or 60 with l2_l1; 0: none is used.
        lm: auxiliary, a small GPT-2 trained on auxiliary text (at most lm_steps steps), or a model on Hugging Face's hub.
        lm_folder: folder of a causal model that replaces lm.
        draws, orders: random starts, and random orders of the best start's words; the nearest to the update is used.
        discrete: words move every period iterations (alternating), only at the end, or never (none).
        candidates: orders proposed each time.
        known_tokens: use only words with a gradient of their embeddings; that gradient must be shared.
        published: as the published code does: the gradient of keys' biases, which is only rounding, counts; words may be special
            tokens; Adam's moments stay in place when words move; and the best iterate is answered without comparing the last.
    """

    loss: Kind = "cosine"
    rate: float = 0.01
    decay: float = 0.89
    stride: Count = 50
    l1: NotNegative = 0.01
    length: NotNegative | None = None
    lm_weight: NotNegative | None = None
    lm: str = AUXILIARY
    lm_folder: Path | None = None
    lm_steps: Count = 600
    draws: Count = 500
    orders: Count = 500
    discrete: Discrete = "alternating"
    period: Count = 75
    candidates: Count = 200
    known_tokens: bool = False
    published: bool = False

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of the embeddings' lengths and of a word's mean negative log-likelihood in nats."""
        length, nll = WEIGHTS[self.loss]
        return length if self.length is None else self.length, nll if self.lm_weight is None else self.lm_weight

    @property
    def trains_first(self) -> bool:
        return self.weights[1] > 0

    def layout(self, wave: Wave, known: Knowledge, restarts: int) -> SentenceLayout:
        matcher = Matcher(wave, known, self.loss, self.l1, keys=self.published)
        return SentenceLayout(matcher, wave, known, restarts, self.published, self.known_tokens)

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        deadline = Deadline(budget.seconds)
        try:
            layout, prior = self.layout(wave, known, budget.restarts), self._prior(known)
        except ValueError as error:
            return not_applicable(wave, str(error))
        with torch.no_grad():
            return _BatchDescent(self, layout, prior, streams, budget, deadline).answers()

    def _prior(self, known: Knowledge) -> LanguagePrior | None:
        if self.discrete == "none" or not self.weights[1]:
            return None
        source, model, device = self.lm_folder or self.lm, language_model(known), next(known.model.parameters()).device
        if source != AUXILIARY:
            return PretrainedPrior(source, model.tokenizer, device)
        return TrainedPrior(known.public.x, model.pad, model.vocabulary, self.lm_steps, device)


def dlg_text(rate: float = 0.1, known_tokens: bool = False, published: bool = False) -> lamp:
    """DLG for text: squared distance, Adam from one random start. The paper's budget: 2,500 iterations.

    Args:
        known_tokens, published: as for lamp.
    """
    return replace(tag(rate, 0.0, known_tokens, published), loss="squared")


def tag(rate: float = 0.1, l1: float = 0.01, known_tokens: bool = False, published: bool = False) -> lamp:
    """TAG: squared distance plus a distance of magnitudes. The paper's budget: 2,500 iterations.

    Args:
        l1: weight of the magnitudes.
        known_tokens, published: as for lamp.
    """
    return lamp(
        "l2_l1", rate, decay=1.0, l1=l1, length=0, lm_weight=0, draws=1, orders=1, discrete="none",
        known_tokens=known_tokens, published=published,
    )  # fmt: skip


class _BatchDescent:
    """The descent of one wave's problems, all in one batch.

    Attributes:
        variables: embeddings (P, B, L, width) and, where next words are labels, their logits.
        kept: the variables of the best iterate.
    """

    def __init__(
        self,
        attack: lamp,
        layout: SentenceLayout,
        prior: LanguagePrior | None,
        streams: Streams,
        budget: Budget,
        deadline: Deadline,
    ) -> None:
        self.attack, self.layout, self.prior, self.budget, self.deadline = attack, layout, prior, budget, deadline
        draws = [(stream, r) for stream in streams for r in range(budget.restarts)]
        self.moving = [stream("moves", r) for stream, r in draws]
        self.rows = torch.arange(len(draws), device=layout.table.device)
        x = torch.stack([self._drawn(row, stream("start", r)) for row, (stream, r) in enumerate(draws)])
        soft = [] if layout.labels is not None else [x.new_zeros(*x.shape[:3], layout.model.vocabulary)]
        self.variables = [x, *soft]
        self.adam = torch.optim.Adam(self.variables)
        self.best = torch.full((len(draws),), torch.inf, device=layout.table.device)
        self.kept = [t.clone() for t in self.variables]

    def answers(self) -> list[Reconstruction]:
        layout, budget = self.layout, self.budget
        done, interrupted = self.run()
        tokens, objectives = self.chosen()
        ranked = torch.where(objectives.isfinite(), objectives, torch.inf).view(-1, budget.restarts)
        status: Status = "out_of_budget" if interrupted else "converged"
        reason = f"{done} of {budget.iterations} iterations in {budget.seconds} s" if interrupted else ""
        answers = []
        for k, best in enumerate(ranked.argmin(1).tolist()):
            row, value = k * budget.restarts + best, float(ranked[k, best])
            if value == torch.inf:
                lost = "the objective is not finite"
                answers.append(Reconstruction(None, None, float("nan"), done, 0.0, "diverged", lost))
                continue
            y = None if layout.labels is None else layout.labels[row].cpu()
            answers.append(Reconstruction(layout.padded(tokens[row], row), y, value, done, 0.0, status, reason))
        return answers

    def run(self) -> tuple[int, bool]:
        """The iterations done, and whether the deadline ended them."""
        attack, iterations = self.attack, self.budget.iterations
        for done in range(iterations):
            if self.deadline.over():
                return done, True
            self._step(done)
            if attack.discrete == "alternating" and (done + 1) % attack.period == 0:
                self._move()
        if attack.discrete != "end":
            return iterations, False
        self.variables = self.kept
        for _ in range(max(1, iterations // attack.period)):
            self._move()
        return iterations, self.deadline.over()

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Each problem's words (P, B, L) and their objective (P,), of the best iterate or of the last, whichever is better."""
        tokens, objectives = self._scored(self.kept)
        if self.attack.published:
            return tokens, objectives
        last, others = self._scored(self.variables)
        better = others < torch.where(objectives.isfinite(), objectives, torch.inf)
        return torch.where(better.to(last.device)[:, None, None], last, tokens), torch.where(better, others, objectives)

    def _drawn(self, row: int, rng: Generator) -> Tensor:
        """The random start (B, L, width) nearest to the update, then the nearest order of its words."""
        layout, attack = self.layout, self.attack
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
        distances = torch.cat([self._distance([x], part) for x, part in pairs])
        return int(distances.nan_to_num(torch.inf).argmin())

    def _guess(self, variables: Sequence[Tensor], rows: Tensor) -> SentenceGuess:
        layout, x = self.layout, variables[0]
        mask = layout.mask[rows]
        if layout.labels is not None:
            y = layout.labels[rows]
        else:
            soft = variables[1] if len(variables) > 1 else x.new_zeros(*x.shape[:3], layout.model.vocabulary)
            y = soft.softmax(-1) * mask[..., None]
        return SentenceGuess(x, y, mask, layout.owners[rows])

    def _distance(self, variables: Sequence[Tensor], rows: Tensor) -> Tensor:
        return self.layout.matcher.value(self._guess(variables, rows))

    def _ordered(self, row: int, sentence: int, order: Tensor) -> Tensor:
        """Distances (N,) of one problem for N orders (N, L) of one sentence's words."""

        def moved(t: Tensor) -> Tensor:
            batches = t[row].repeat(len(order), *[1] * (t.dim() - 1))
            batches[:, sentence] = t[row, sentence][order]
            return batches

        return self._distance([moved(t) for t in self.variables], self.rows[row].expand(len(order)))

    def _step(self, done: int) -> None:
        layout, x = self.layout, self.variables[0]
        guess = self._guess(self.variables, self.rows)
        value, by_x, by_y = layout.matcher.value_and_slopes(guess)
        extra, slope = self._length(x)
        value = value + extra
        fell = value < self.best
        self.best = torch.where(fell, value, self.best)
        for kept, t in zip(self.kept, self.variables, strict=True):
            kept[fell] = t[fell]
        slopes = [(by_x + slope) * layout.free[..., None]]
        if by_y is not None:
            slopes.append(guess.y * (by_y - (guess.y * by_y).sum(-1, keepdim=True)))
        for t, s in zip(self.variables, slopes, strict=True):
            t.grad = s.nan_to_num(0.0, 0.0, 0.0)
        self.adam.param_groups[0]["lr"] = self.attack.rate * self.attack.decay ** (done // self.attack.stride)
        self.adam.step()

    def _length(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The regulariser (P,), (mean length of the embeddings - that of the table's rows)^2, and its slope."""
        layout, (weight, _) = self.layout, self.attack.weights
        counted = layout.mask if self.attack.published else layout.free
        norms = x.norm(dim=-1).clamp_min(1e-12)
        number = counted.flatten(1).sum(1).clamp(min=1)
        apart = (norms * counted).flatten(1).sum(1) / number - layout.size
        slope = (2 * weight * apart / number)[:, None, None, None] * x / norms[..., None]
        return weight * apart.square(), slope * counted[..., None]

    def _move(self) -> None:
        tokens = self.layout.tokens(*self.variables)
        moments = [state[key] for state in self.adam.state.values() for key in ("exp_avg", "exp_avg_sq")]
        moved = [*self.variables, *([] if self.attack.published else moments)]
        for row in range(len(self.rows)):
            for sentence in range(tokens.shape[1]):
                if self.deadline.over():
                    return
                order = self._best_order(row, sentence, tokens[row, sentence])
                for t in moved:
                    t[row, sentence] = t[row, sentence][order.to(t.device)]

    def _best_order(self, row: int, sentence: int, tokens: Tensor) -> Tensor:
        """The best order (L,) of a sentence's words; the present one is among those that are compared."""
        layout = self.layout
        movable = layout.movable(row, sentence)
        whole = on_all_positions(propose(len(movable), self.attack.candidates, self.moving[row]), movable, len(tokens))
        if len(whole) == 1:
            return whole[0]
        # in parts: soft labels of a large vocabulary are large
        total = torch.cat([self._ordered(row, sentence, part) for part in whole.split(TOGETHER)]).double().cpu()
        if self.prior is not None:
            total = total + self.attack.weights[1] * self.prior(layout.as_lists(tokens[whole], row, sentence))
        total = total.nan_to_num(torch.inf)
        return whole[int(total.argmin()) if float(total.min()) < float(total[0]) else 0]

    def _scored(self, variables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The words nearest to the embeddings, and the objective of those words."""
        layout = self.layout
        tokens = layout.tokens(*variables)
        x, y = layout.framed(layout.table[tokens], self.rows), layout.targets(tokens)
        objectives = layout.matcher.value(SentenceGuess(x, y, layout.mask, layout.owners)).double().cpu()
        if self.prior is not None:
            nll = [
                torch.cat([self.prior(layout.as_lists(t[None], row, b)) for b, t in enumerate(batch)]).mean()
                for row, batch in enumerate(tokens)
            ]
            objectives = objectives + self.attack.weights[1] * torch.stack(nll)
        return tokens, objectives
