"""SOMP: sentences by matching pursuit among those that attention heads' subspaces let pass (Li and Li, 2026).

Each attention head's gradient gives a subspace, and the heads' agreement ranks words and sentences even with as many tokens as
dimensions. A beam search extends sentences word by word. Orthogonal matching pursuit then chooses the sentence that correlates most
with the rest of the update. A correlation is the slope of a sentence's loss along the residual, so few updates are computed.

The steps follow the paper's abstract. The measure of agreement, the search for last words and the exchange of sentences are this
package's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Stream
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.text.certificate import TOLERANCE, GuessVerifier, SentenceReader, Unreadable, two_blocks
from fedgauge.attacks.text.dager import Ids
from fedgauge.attacks.text.layer_inputs import CHUNK, first_inputs, layer_inputs, logits_along
from fedgauge.client.models.language_parts import BlockParts
from fedgauge.client.update import Batch

ROUNDING = 1e-5  # of a head's largest singular value: smaller ones are rounding
RIDGE = 1e-8  # added to the heads' mean projection: an input outside all of them is this unlikely
EACH = 4  # words kept for one position, in batch sizes
BEAM = 64  # sentences that grow at once
FORMED = 8  # sentences of the best slopes whose updates are computed, one at a time
BESIDE = 6  # vectors as large as an update, more than the chosen sentences' own: two candidates, the update, residuals, a sum
MOST_NUMBERS = 2**29  # of the updates of sentences that are held at once: 4 GB


@dataclass(frozen=True)
class somp(SentenceReader):
    """Sentences of a decoder's batches, also with nearly as many tokens as dimensions.

    The budget's iterations are passes of exchanges.
    """

    def read(self, verifier: GuessVerifier, budget: Budget, stream: Stream, deadline: Deadline) -> tuple[Batch, float]:
        if not verifier.decodes:
            raise Unreadable("it reads decoders, where a word attends only to earlier ones: use dager or tiger")
        beginnings = grown(verifier)
        pursuit = Pursuit(verifier, beginnings, deadline)
        pursuit.choose(verifier.known.batch_size)
        for _ in range(budget.iterations):
            if not pursuit.exchange():
                break
        batch = pursuit.batch()
        return batch, verifier.error(batch)


def misfit(vectors: Tensor, inverse: Tensor) -> Tensor:
    """The logarithm of how little heads see of vectors (..., d): low where many see much; inverse: `head_subspaces`."""
    unit = F.normalize(vectors.double(), dim=-1)
    return ((unit @ inverse) * unit).sum(-1).log()


def head_subspaces(update: Mapping[str, Tensor], layer: BlockParts, heads: int) -> Tensor:
    """The inverse (d, d) of the mean projection onto the subspaces of a block's inputs that its heads' gradients show."""
    if layer.query.weight not in update or not bool(update[layer.query.weight].any()):
        raise Unreadable(f"{layer.query.weight} has no shared gradient, or a zero one, so no subspace: try dager")
    maps = [m for m in (layer.query, layer.key, layer.value) if m.weight in update]
    parts = [m.of(update)[0].double() for m in maps]
    width = parts[0].shape[1]
    total = parts[0].new_zeros(width, width)
    for rows in torch.cat(parts).split(len(parts[0]) // heads):  # keys and values may have fewer heads than queries
        values, basis = torch.linalg.svd(rows, full_matrices=False)[1:]
        basis = basis[values > ROUNDING * values[0]]
        total += basis.mT @ basis
    inverse: Tensor = torch.linalg.inv(total * (width / total.trace()) + RIDGE * torch.eye(width).to(total))
    return inverse


@torch.no_grad()
def grown(verifier: GuessVerifier) -> dict[Ids, float]:
    """Beginnings of sentences, of every length, that fit the subspaces of two blocks best, with their worst word's misfit.

    They lack the last word, which sends no gradient through the attention.
    """
    model, known, layers = verifier.model, verifier.known, two_blocks(verifier.model)
    heads = int(getattr(getattr(model.net, "config", None), "num_attention_heads", 1))
    first, second = (head_subspaces(verifier.update, layer, heads) for layer in layers)
    words = torch.tensor([i for i in range(model.tokenizer.size) if i != model.pad])
    places = known.shape[0] - 1
    single = torch.cat(
        [misfit(first_inputs(model, verifier.params, some, places), first) for some in words.split(CHUNK)]
    ).cpu()

    def last_misfit(x: Tensor) -> Tensor:
        parts = [layers[1].query.weight]
        chunks = (layer_inputs(model, verifier.params, parts, some)[0] for some in x.split(CHUNK))
        return torch.cat([misfit(chunk, second)[:, -1] for chunk in chunks]).cpu()

    live = torch.tensor([model.start], dtype=torch.int64)
    value, worst = torch.zeros(2, 1, dtype=torch.float64)
    found: dict[Ids, float] = {}
    for place in range(len(model.start), places):
        near = single[:, place].topk(min(EACH * known.batch_size, len(words)), largest=False).indices
        longer = torch.cat([live.repeat_interleave(len(near), 0), words[near].repeat(len(live))[:, None]], 1)
        added = single[near, place].repeat(len(live)) + last_misfit(longer)
        value, kept = (value.repeat_interleave(len(near)) + added).topk(min(BEAM, len(added)), largest=False)
        worst = torch.maximum(worst.repeat_interleave(len(near)), added)[kept]
        live = longer[kept]
        found |= {tuple(ids): float(w) for ids, w in zip(live.tolist(), worst, strict=True)}
    return found


class Pursuit:
    """Chooses sentences with updates that explain the observed one by least squares, up to a residual.

    Args:
        beginnings: words of possible sentences without the last, with misfits; every word of the vocabulary may follow.
    """

    def __init__(self, verifier: GuessVerifier, beginnings: Mapping[Ids, float], deadline: Deadline) -> None:
        self.verifier, self.model, self.beginnings, self.deadline = verifier, verifier.model, beginnings, deadline
        # gradients of biases and norms are nearly alike for all sentences
        self.matrices = {name: t for name, t in verifier.update.items() if t.dim() > 1}
        count = verifier.known.batch_size + BESIDE
        if (held := count * sum(t.numel() for t in self.matrices.values())) > MOST_NUMBERS:
            raise Unreadable(f"it holds {count} updates, {8 * held / 2**30:.0f} GB: try dager, which holds none")
        self.seen = self._flat(verifier.update)
        self.chosen: list[Ids] = []
        self.residual = self.seen
        self.coefficients = self.seen.new_zeros(0)
        self._updates: dict[Ids, Tensor] = {}

    def _flat(self, update: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([update[name].flatten().double() for name in self.matrices])

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [t.numel() for t in self.matrices.values()]
        parts = zip(self.matrices.items(), flat.split(sizes), strict=True)
        return {name: part.view_as(t).to(t) for (name, t), part in parts}

    def update_of(self, ids: Ids) -> Tensor:
        if ids in self._updates:
            return self._updates[ids]
        return self._flat(self.verifier.update_of(self.verifier.decoded([ids])))

    def _fitted(self, sentences: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """Return the best coefficients of these sentences' updates, which are cached, and the residual."""
        if not sentences:
            return self.seen.new_zeros(0), self.seen
        self._updates = {ids: self.update_of(ids) for ids in dict.fromkeys([*sentences, *self.chosen])}
        updates = [self._updates[ids] for ids in sentences]  # a matrix of them would hold them twice
        products = torch.stack([torch.stack([a @ b for b in [*updates, self.seen]]) for a in updates])
        coefficients = torch.linalg.pinv(products[:, :-1], hermitian=True) @ products[:, -1]
        residual = self.seen.clone()
        for coefficient, update in zip(coefficients, updates, strict=True):
            residual -= coefficient * update
        return coefficients, residual

    def _slopes(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return the likelihood, with the residual as a step, of beginnings (N, L) and each word after them (N, V): a mean."""
        x, step = x.to(residual.device), self._named(residual / residual.norm())
        slopes = logits_along(self.model, self.verifier.params, step, x, lambda logits: logits.log_softmax(-1))
        before = slopes[:, :-1].gather(2, x[:, 1:, None])[..., 0].sum(1)
        after: Tensor = (before[:, None] + slopes[:, -1]) / x.shape[1]
        after[:, self.model.pad] = after[:, self.model.tokenizer.size :] = -torch.inf
        return after

    def _seen_share(self, beginning: Ids) -> float:
        """Return the heads' visible share of a beginning's worst word: near 1 where all of it may be visible."""
        return math.exp(-self.beginnings[beginning] / 4)  # half a logarithm, of the mean over two blocks

    @torch.no_grad()
    def best(self, residual: Tensor, taken: Sequence[Ids]) -> Ids:
        """Return the unused sentence with the update that correlates most with a residual."""
        most, found = FORMED + len(taken), list[tuple[float, Ids]]()
        for length in sorted({len(ids) for ids in self.beginnings}):
            same = [ids for ids in self.beginnings if len(ids) == length]
            slopes = torch.cat([self._slopes(residual, some) for some in torch.tensor(same).split(CHUNK)]).cpu()
            # the longer a sentence, the smaller its update: its norm is about the inverse root
            slopes *= torch.tensor([self._seen_share(ids) * length**0.5 for ids in same])[:, None]
            values, at = slopes.flatten().topk(min(most, slopes.numel()))
            for value, i in zip(values.tolist(), at.tolist(), strict=True):
                found.append((value, (*same[i // slopes.shape[1]], i % slopes.shape[1])))
        likely = [ids for _, ids in sorted(found, reverse=True) if ids not in taken][:FORMED]

        def correlation(ids: Ids) -> float:
            update = self.update_of(ids)
            return self._seen_share(ids[:-1]) * float(update @ residual / update.norm())

        return max(likely or taken, key=correlation)

    @property
    def explained(self) -> bool:
        return float(self.residual.norm()) <= TOLERANCE * float(self.seen.norm())

    def choose(self, count: int) -> None:
        """Orthogonal matching pursuit: one sentence after the other, until there are so many or nothing is left."""
        while len(self.chosen) < count and not (self.explained or (self.chosen and self.deadline.over())):
            self.chosen.append(self.best(self.residual, self.chosen))
            self.coefficients, self.residual = self._fitted(self.chosen)

    def exchange(self) -> bool:
        """Exchange each sentence for a better one given the others, and two sentences' last words; returns whether any was."""
        changed = False
        for i in range(len(self.chosen)):
            if self.explained or self.deadline.over():
                return False
            others = [*self.chosen[:i], *self.chosen[i + 1 :]]
            changed |= self._improved({i: self.best(self._fitted(others)[1], others)})
        for i, j in combinations(range(len(self.chosen)), 2):
            if self.deadline.over():
                return False
            a, b = self.chosen[i], self.chosen[j]
            changed |= self._improved({i: (*a[:-1], b[-1]), j: (*b[:-1], a[-1])})
        return changed

    def _improved(self, changes: Mapping[int, Ids]) -> bool:
        """Exchange sentences by their index where less is left then; returns whether it is."""
        made = [changes.get(i, ids) for i, ids in enumerate(self.chosen)]
        if len(set(made)) < len(made):
            return False
        coefficients, residual = self._fitted(made)
        better = float(residual.norm()) < (1 - TOLERANCE) * float(self.residual.norm())
        if better:
            self.chosen, self.coefficients, self.residual = made, coefficients, residual
        return better

    def batch(self) -> Batch:
        """The sentences as a batch; that of the largest coefficients twice where there are too few."""
        count, shares = self.verifier.known.batch_size, self.coefficients.clone()
        sentences = list(self.chosen)
        while len(sentences) < count:
            most = int(shares.argmax())
            shares[most] -= 1 / count
            sentences.append(self.chosen[most])
        return self.verifier.decoded(sentences)
