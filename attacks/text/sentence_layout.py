"""Sentence layout: lengths of a wave's sentences, positions of their words, and candidate words."""

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgauge.attacks import label_restoration as labelling
from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.text.certificate import Unreadable, language_model
from fedgauge.attacks.text.distance import Matcher
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import predicts_tokens

KINDS = 4  # of moves (LAMP, section 3.3)


class SentenceLayout:
    """The positions and words of P problems of a wave.

    Args:
        matcher: compares gradients of guesses with those of the wave.
        special: special tokens count as words.
        known_tokens: choose only words with a gradient of their embeddings.

    Attributes:
        table: embeddings (V, width) of all words; size: the mean length of their rows.
        words: ids (W,) that may be chosen; allowed: (P, W), which of them each problem may use, None: all.
        lengths: (P, B) tokens of each sentence; mask: which positions exist (P, B, L); free: those that hold words.
        frame: embeddings (P, B, L, width) of the other positions.
        labels: (P, B), None for next words.

    Raises:
        ValueError: the attack cannot work on this wave.
    """

    def __init__(
        self, matcher: Matcher, wave: Wave, known: Knowledge, restarts: int, special: bool, known_tokens: bool
    ) -> None:
        self.model, self.known, self.matcher = matcher.model, known, matcher
        self.table = self.model.value(self.model.parts.word, wave.params).detach()
        self.owners = torch.arange(len(wave) * restarts) // restarts
        self.lengths = lengths_of(wave, known)[self.owners]
        self.labels = (
            None if predicts_tokens(known.loss) else labelling.restore(wave, known)[self.owners].to(self.table.device)
        )
        self.words = torch.arange(self.model.vocabulary) if special else _vocabulary(self.model)
        self.allowed = _known_tokens(wave, known, self.words)[self.owners] if known_tokens else None
        self.size = float(self.table[self.words].norm(dim=1).mean())
        self.mask, self.free, self.ids = (t.to(self.table.device) for t in framed_places(self.model, self.lengths))
        self.owners = self.owners.to(self.table.device)
        self.frame = self.table[self.ids]

    def movable(self, row: int, sentence: int) -> Tensor:
        return self.free[row, sentence].nonzero().flatten()

    def framed(self, x: Tensor, rows: Tensor) -> Tensor:
        """Embeddings (N, B, L, width) of some problems, with the frame at positions that hold no words."""
        return torch.where(self.free[rows][..., None], x, self.frame[rows])

    def tokens(self, x: Tensor, soft: Tensor | None = None) -> Tensor:
        """Words (P, B, L) of the nearest rows by angle.

        Args:
            soft: where next words are labels, their logits: their probabilities count as much.
        """
        rows = F.normalize(self.table[self.words], dim=1)
        near = F.normalize(x, dim=-1) @ rows.T
        if soft is not None:
            near = near + soft.softmax(-1)[..., self.words.to(soft.device)]
        if self.allowed is not None:
            near = near.masked_fill(~self.allowed.to(x.device)[:, None, None], -torch.inf)
        nearest = self.words.to(x.device)[near.argmax(-1)]
        return torch.where(self.free, nearest, self.ids)

    def targets(self, tokens: Tensor) -> Tensor:
        """The labels that the clients' loss would take for all words (P, B, L): labels, or next words' probabilities."""
        if self.labels is not None:
            return self.labels
        return F.one_hot(tokens, self.model.vocabulary).to(self.table) * self.mask[..., None]

    def as_lists(self, tokens: Tensor, row: int, sentence: int) -> list[list[int]]:
        """Orders (N, L) of one sentence as lists of ids, without padding."""
        return tokens[:, : int(self.lengths[row, sentence])].tolist()

    def padded(self, tokens: Tensor, row: int) -> Tensor:
        """A batch (B, L) in the form of the data."""
        own = torch.where(self.mask[row], tokens, self.model.pad).cpu()
        return F.pad(own, (0, self.known.shape[0] - own.shape[1]), value=self.model.pad)


def framed_places(model: LanguageModel, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions that exist and those of free words (..., L), and the ids (..., L) of start, end and padding."""
    at, first, last = torch.arange(int(lengths.max())), len(model.start), len(model.end)
    mask = at < lengths[..., None]
    ids = torch.full(mask.shape, model.pad)
    ids[..., :first] = torch.tensor(model.start, dtype=torch.int64)
    for i, token in enumerate(model.end):
        ids.scatter_(-1, (lengths - last + i)[..., None], token)
    return mask, (at >= first) & (at < (lengths - last)[..., None]), ids


def lengths_of(wave: Wave, known: Knowledge) -> Tensor:
    """Tokens of each sentence (K, B): as given, else the nonzero rows of the position embeddings' gradient, else all positions.

    Those rows give a batch's longest sentence. In next_token the last word has no row, since nothing is predicted from it.
    """
    model, longest = language_model(known), known.shape[0]
    least = len(model.start) + len(model.end) + 1
    if known.lengths is not None:
        return known.lengths.clamp(min(least, longest), longest)
    distribution, name = known.chain.update_distribution, model.parts.position
    disturbed = distribution is None or distribution.noisy or distribution.sparse or distribution.signed
    lengths = torch.full((len(wave),), longest)
    if name in wave.update and not disturbed:
        rows = (wave.update[name] != 0).any(2).sum(1).cpu() + int(model.task == "next_token")
        lengths = torch.where(rows >= least, rows, longest).clamp(max=longest)
    return lengths[:, None].expand(-1, known.batch_size).clone()


def _vocabulary(model: LanguageModel) -> Tensor:
    special = torch.tensor(sorted(model.special), dtype=torch.int64)
    ids = torch.arange(model.vocabulary)
    return ids[~torch.isin(ids, special) & (ids < model.tokenizer.size)]


def _known_tokens(wave: Wave, known: Knowledge, words: Tensor) -> Tensor:
    """Return the words with an embedding gradient (K, W) in each update; Unreadable where that reveals nothing."""
    model, most = language_model(known), known.batch_size * known.shape[0]
    if model.parts.word in wave.update and not model.parts.tied:
        used = (wave.update[model.parts.word] != 0).any(2).cpu()
        if int(used.sum(1).max()) <= most and bool(used[:, words].any(1).all()):
            return used[:, words]
    raise Unreadable("the word embeddings' gradient is withheld or hides the words: set known_tokens = false")


def propose(n: int, count: int, rng: Generator) -> Tensor:
    """Different orders (N, n) int64 of n words, N <= count, the present order first.

    By turns: swap two words, move one, move a span of them, move a prefix behind the rest.

    >>> propose(1, 5, torch.Generator()).tolist()
    [[0]]
    """
    orders = {tuple(range(n)): None}
    for i in range(count - 1 if n > 1 else 0):
        orders.setdefault(tuple(_moved(n, i % KINDS, rng)))
    return torch.tensor(list(orders), dtype=torch.int64).view(len(orders), n)


def shuffles(n: int, count: int, rng: Generator) -> Tensor:
    """Random orders (N, n) of n words, N <= count, the present order first."""
    drawn = [tuple(torch.randperm(n, generator=rng).tolist()) for _ in range(count - 1 if n > 1 else 0)]
    orders = list(dict.fromkeys([tuple(range(n)), *drawn]))
    return torch.tensor(orders, dtype=torch.int64).view(len(orders), n)


def on_all_positions(orders: Tensor, movable: Tensor, length: int) -> Tensor:
    """Orders (N, n) of the movable positions (n,) as orders (N, length) of all positions.

    The other positions, special tokens and padding, stay.

    >>> on_all_positions(torch.tensor([[1, 0]]), torch.tensor([1, 2]), 4).tolist()
    [[0, 2, 1, 3]]
    """
    whole = torch.arange(length, device=movable.device).repeat(len(orders), 1)
    whole[:, movable] = movable[orders.to(movable.device)]
    return whole


def _moved(n: int, kind: int, rng: Generator) -> list[int]:
    order = list(range(n))
    if kind == 0:
        i, j = _drawn(n, rng), _drawn(n, rng)
        order[i], order[j] = order[j], order[i]
        return order
    if kind == 3:
        cut = 1 + _drawn(n - 1, rng)
        return order[cut:] + order[:cut]
    first = _drawn(n, rng)
    last = first + 1 if kind == 1 else first + 1 + _drawn(n - first, rng)
    span, rest = order[first:last], order[:first] + order[last:]
    place = _drawn(len(rest) + 1, rng)
    return rest[:place] + span + rest[place:]


def _drawn(below: int, rng: Generator) -> int:
    return int(torch.randint(below, (1,), generator=rng))
