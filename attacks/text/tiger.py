"""TIGER: words descend on their inputs' distance to the subspaces of attention blocks' gradients (Kalikman et al., 2026).

Under noise no span contains a word exactly, so the distance becomes an objective. Mixtures of likely words minimise the distance of
their inputs from the subspaces of several blocks, and the unexplained part of these. Random matrix theory weights the directions by
their precision. The objective follows the paper's abstract; candidates, weights, the second term and the exchange of words are this
package's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.attacks.base import Budget, Stream
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.text.certificate import GuessVerifier, SentenceReader, Unreadable, labelled, noise_of
from fedgauge.attacks.text.layer_inputs import CHUNK, first_inputs, layer_inputs
from fedgauge.attacks.text.sentence_layout import framed_places, lengths_of
from fedgauge.client.components import Positive
from fedgauge.client.update import Batch

RIDGE = 1e-4  # added to inner products of inputs: those that hardly differ explain no direction between them
FAINT = 0.02  # weight of a direction below which it is left out
MARGIN = 20  # dimensions that must be left outside a subspace
CANDIDATES = 128  # words of a position, the nearest to the first block's subspace
BLOCKS = 3  # attention blocks with a subspace in the objective, from the first on
EXCHANGED, PASSES = 8, 2  # words that are tried in each position after the descent, and how often
START = 0.5  # standard deviation of the starts' logits


@dataclass(frozen=True)
class tiger(SentenceReader):
    """Words of small batches from attention gradients, also under noise that hides them from dager.

    The budget's iterations are Adam's steps. An encoder's lengths that are not given are read off the first block, where
    its last token fits best. A decoder's are read off the gradient of positions where it is usable, else all positions hold
    words.

    Args:
        rate: of Adam, on the logits of the words' mixtures.
    """

    rate: Positive = 0.1

    def read(self, verifier: GuessVerifier, budget: Budget, stream: Stream, deadline: Deadline) -> tuple[Batch, float]:
        search = _WordSearch(self, verifier, deadline)
        found = []
        for restart in range(budget.restarts):
            starts = [search.descend(budget.iterations, stream("start", restart))]
            if restart == 0:  # the nearest words one by one, which are the same in each restart
                nearest = search.prior.expand(len(search.mask), -1, -1)
                starts.append((search.words(nearest), nearest))
            found.append(search.exchange(*min(starts, key=lambda start: search.value(start[0]))))
            if deadline.over():
                break
        words, _ = min(found, key=lambda one: one[1])
        verifier.spent = search.spent
        return labelled(verifier, [ids[there].tolist() for ids, there in zip(words, search.mask, strict=True)])


@dataclass(frozen=True, eq=False)
class Subspace:
    """The directions of one block's inputs that its gradients show.

    Args:
        basis: (r, d), orthonormal rows.
        weights: (r,), the squared cosine between a direction that is seen and the true one.
    """

    basis: Tensor
    weights: Tensor

    def outside(self, x: Tensor) -> Tensor:
        """The part of inputs (..., d) outside the subspace, of their squared norm."""
        seen: Tensor = ((x @ self.basis.mT).square() * self.weights).sum(-1)
        return 1 - seen / x.square().sum(-1)

    def unexplained(self, x: Tensor) -> Tensor:
        """The part of the subspace (...) that no combination of inputs (..., n, d) explains."""
        unit = x / x.norm(dim=-1, keepdim=True)
        inner = unit @ unit.mT + RIDGE * torch.eye(unit.shape[-2]).to(unit)
        cross = unit @ self.basis.mT
        explained = (cross * torch.linalg.solve(inner, cross)).sum(-2)
        missing: Tensor = ((1 - explained) * self.weights).sum(-1) / self.weights.sum()
        return missing


def subspace(parts: Sequence[Tensor], most: int, noise: float) -> Subspace | None:
    """The subspace of the inputs that maps with these gradients (out, d) share; None if there are none, or noise or inputs fill it.

    Maps are stacked in units of their noise, an entry's standard deviation and rounding. Singular values up to sqrt(rows) +
    sqrt(columns) is the part of pure noise; above, a direction's cosine with the true one is known (Benaych-Georges and
    Nadakuditi, 2012). Those after the largest possible number of inputs are noise, wherever it comes from.
    """
    stacked = []
    for part in parts:
        rounding = float(torch.linalg.matrix_norm(part.double(), 2)) * torch.finfo(part.dtype).eps
        if (level := math.hypot(noise, rounding)) > 0:
            stacked.append(part.double() / level)
    if not stacked:
        return None
    rows = torch.cat(stacked)
    n, width = rows.shape
    values, basis = torch.linalg.svd(torch.linalg.qr(rows, mode="r").R)[1:]
    level = 1.0
    if most < min(n, width):
        level = max(level, float((values[most:].square().sum() / ((n - most) * (width - most))).sqrt()))
    ratio, y = width / n, (values / level).square() / n
    inner = (y - ratio - 1).clamp(min=2 * math.sqrt(ratio))  # below, it is noise, and the weight is 0
    x = (inner + (inner.square() - 4 * ratio).clamp(min=0).sqrt()) / 2
    weights = ((x.square() - ratio) / (x.square() + ratio * x))[:most]
    # the largest singular value of noise alone scatters around the edge by about this part
    edge = (math.sqrt(n) + math.sqrt(width)) * (1 + min(n, width) ** (-2 / 3))
    kept = (weights > FAINT) & (values[:most] > level * edge)
    if not 0 < float(weights[kept].sum()) <= width - MARGIN:
        return None
    return Subspace(basis[: len(weights)][kept].to(parts[0]), weights[kept].to(parts[0]))


class _WordSearch:
    def __init__(self, attack: tiger, verifier: GuessVerifier, deadline: Deadline) -> None:
        self.attack, self.verifier, self.model, self.deadline, self.spent = (
            attack,
            verifier,
            verifier.model,
            deadline,
            0,
        )
        known, update = verifier.known, verifier.update
        # of the blocks that rise above the noise, by a weight of the map whose inputs they are about
        self.spaces: dict[str, Subspace] = {}
        for layer in self.model.parts.layers[:BLOCKS]:
            parts = [m.of(update)[0] for m in (layer.query, layer.key, layer.value) if m.weight in update]
            found = subspace(parts, known.batch_size * known.shape[0], noise_of(known))
            if found is not None:
                self.spaces[layer.query.weight] = found
            elif not self.spaces:
                raise Unreadable("attention block 1's gradient is not shared, lost in noise, or of nearly full rank")
        self.table = self.model.value(self.model.parts.word, verifier.params).detach()
        fit = self._fit()
        self.mask, self.free, self.ids = self._places(fit)
        self.candidates, self.prior = self._likely(fit[:, : self.mask.shape[1]])

    def _fit(self) -> Tensor:
        """Return each word's distance from the first block's subspace in every position (V, L), relative to the average word."""
        ids, space = torch.arange(self.model.vocabulary), next(iter(self.spaces.values()))
        most = self.verifier.known.shape[0]
        outside = [
            space.outside(first_inputs(self.model, self.verifier.params, words, most)) for words in ids.split(CHUNK)
        ]
        fit = torch.cat(outside).cpu()
        return fit / fit.mean(0)

    def _places(self, fit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return masks of tokens and of free words (B, L), and the ids (B, L) of start, end and padding."""
        model, known = self.model, self.verifier.known
        first, last, size = len(model.start), len(model.end), known.batch_size
        lengths = lengths_of(self.verifier.wave, known)[0]
        if last and known.lengths is None:
            ends = fit[model.end[-1], : int(lengths.max())].clone()
            ends[: first + last] = torch.inf
            places = ends.argsort()[:size]
            # sentences of one length leave fewer places that fit
            near = places[ends[places] <= (4 * ends[places[0]]).clamp(min=1e-4)]
            lengths = 1 + near.repeat(size)[:size].sort(descending=True).values
        # a decoder's last word sends no gradient through the attention
        return framed_places(model, (lengths - int(self.verifier.decodes)).clamp(min=first + last + 1))

    def _likely(self, fit: Tensor) -> tuple[Tensor, Tensor]:
        """Each position's candidates (L, K), the nearest first, and the logits (L, K) from which they start."""
        words = fit.clone()
        words[sorted({*self.model.special, self.model.pad})] = torch.inf
        words[self.model.tokenizer.size :] = torch.inf
        count = min(CANDIDATES, int(words[:, 0].isfinite().sum()))
        nearest, chosen = words.topk(count, dim=0, largest=False)
        return chosen.mT.contiguous(), ((1 - nearest) / fit.std(0)).mT

    def _inputs(self, x: Tensor, mask: Tensor) -> list[Tensor]:
        """The inputs (B, L, width) of all blocks that count, of words' ids (B, L) or embeddings (B, L, width)."""
        return layer_inputs(self.model, self.verifier.params, list(self.spaces), x, mask)

    def _distance(self, inputs: Sequence[Tensor]) -> Tensor:
        """The objective (...) of inputs (..., n, width), a batch's of one block after the other."""
        pairs = zip(self.spaces.values(), inputs, strict=True)
        return torch.stack([space.outside(x).mean(-1) + space.unexplained(x) for space, x in pairs]).sum(0)

    def descend(self, iterations: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """The words (B, L) at the end of a descent from a random start, and the mixtures' logits (B, L, K)."""
        shape = (len(self.mask), *self.prior.shape)
        logits = (self.prior + START * torch.randn(shape, generator=rng)).to(self.table)
        optimizer = torch.optim.Adam([logits], self.attack.rate)
        rows, frame = self.table[self.candidates], self.table[self.ids]
        free, mask = self.free.to(self.table.device), self.mask.to(self.table.device)
        for _ in range(iterations):
            if self.deadline.over():
                break
            with torch.enable_grad():
                leaf = logits.detach().requires_grad_()
                mixed = torch.einsum("blk,lkd->bld", leaf.softmax(-1), rows)
                inputs = self._inputs(torch.where(free[..., None], mixed, frame), mask)
                value = self._distance([x[mask] for x in inputs])
                (slope,) = torch.autograd.grad(value, leaf)
            logits.grad = slope.nan_to_num()
            optimizer.step()
            self.spent += 1
        return self.words(logits.cpu()), logits.cpu()

    def words(self, logits: Tensor) -> Tensor:
        best = logits.argmax(-1)
        words = self.candidates.expand(len(best), -1, -1).gather(2, best[..., None])[..., 0]
        return torch.where(self.free, words, self.ids)

    @torch.no_grad()
    def value(self, words: Tensor) -> float:
        return float(self._distance([x[self.mask] for x in self._inputs(words, self.mask)]))

    @torch.no_grad()
    def exchange(self, words: Tensor, logits: Tensor) -> tuple[Tensor, float]:
        """Words (B, L) exchanged one by one for likely ones that bring the batch nearer, with the distance then."""
        likely = logits.topk(min(EXCHANGED, logits.shape[-1]), -1).indices
        tried = torch.cat([likely, torch.arange(likely.shape[-1]).expand_as(likely)], -1)
        inputs = self._inputs(words, self.mask)
        value = float(self._distance([x[self.mask] for x in inputs]))
        places = self.free.nonzero().tolist()
        for _ in range(PASSES):
            before = value
            for b, t in places:
                if self.deadline.over():
                    return words, value
                others = {*self.candidates[t, tried[b, t]].tolist(), *words[self.free[:, t], t].tolist()}
                options = sorted(others - {int(words[b, t])})
                if not options:
                    continue
                length = int(self.mask[b].sum())
                changed = words[b, :length].repeat(len(options), 1)
                changed[:, t] = torch.tensor(options)
                new = self._inputs(changed, torch.ones_like(changed, dtype=torch.bool))
                rest = self.mask.clone()
                rest[b] = False
                whole = [torch.cat([x, y[rest].expand(len(x), -1, -1)], 1) for x, y in zip(new, inputs, strict=True)]
                values = self._distance(whole)
                best = int(values.nan_to_num(torch.inf).argmin())
                if float(values[best]) < value:
                    value, words[b, t] = float(values[best]), options[best]
                    for x, y in zip(new, inputs, strict=True):
                        y[b, :length] = x[best]
            if value == before:
                break
        return words, value
