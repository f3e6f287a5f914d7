"""Top-k: upload the largest entries of the whole update, and add the rest to the next update (Stich et al., 2018).

This error feedback makes compressed training converge (Karimireddy et al., 2019).
"""

from dataclasses import dataclass, replace

import torch
from torch import Generator

from fedgauge.client.components import Share
from fedgauge.client.transforms import Link, StatefulTransform, UpdateDistribution
from fedgauge.client.update import Update


@dataclass(frozen=True)
class top_k(StatefulTransform):
    """Keep a fraction keep (0 < keep <= 1) of all entries together, the largest by magnitude.

    Args:
        error_feedback: whether a client adds the entries that it did not send so far to its next update.

    Example:
        >>> update, memory = {"w": torch.tensor([1.0, -3.0])}, {"w": torch.tensor([0.5, 0.0])}
        >>> top_k(keep=0.5).advance(update, memory, None)  # sent, and kept for the next round
        ({'w': tensor([ 0., -3.])}, {'w': tensor([1.5000, 0.0000])})
    """

    keep: Share
    error_feedback: bool = True

    def initial(self, update: Update) -> Update:
        return {k: torch.zeros_like(t) for k, t in update.items()} if self.error_feedback else {}

    def advance(self, update: Update, memory: Update, rng: Generator | None) -> tuple[Update, Update]:
        whole = {k: t + memory[k] for k, t in update.items()} if self.error_feedback else update
        sent = largest(whole, self.keep)
        # what is not finite must not stay for ever: one such update would make all later ones useless
        left = {k: (t - sent[k]).nan_to_num(0.0, 0.0, 0.0) for k, t in whole.items()} if self.error_feedback else {}
        return sent, left

    @property
    def mean(self) -> Link:
        """As in a client's first round: later, only the client knows what it has not sent."""
        return replace(self, error_feedback=False)

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """Sent entries keep their noise; that larger entries are sent more often, and what is added from before, is ignored."""
        return None if before.signed else replace(before, sparse=True)


def largest(update: Update, keep: float) -> Update:
    """The largest round(keep * entries) entries of an update, at least one, with all ties; zeros elsewhere."""
    magnitudes = torch.cat([t.detach().abs().flatten() for t in update.values()])
    threshold = magnitudes.topk(max(1, round(keep * magnitudes.numel()))).values[-1]
    return {k: torch.where(t.abs() >= threshold.to(t), t, torch.zeros_like(t)) for k, t in update.items()}
