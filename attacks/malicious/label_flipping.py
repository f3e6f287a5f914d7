"""Label flipping: rows of the classifier change places, so that a trained network errs and its small gradients grow.

Appendix A of Inverting Gradients (Geiping et al., NeurIPS 2020): an image that the network has learned sends hardly any
gradient; one that it takes for another class a large one. Any attack by matching inverts it, knowing the weights that were sent.
Of one example without noise nothing is won: a cosine, and a ratio of gradients, do not change with its size. Noise drowns the
small one alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Generator

from fedgauge.attacks.base import Knowledge, Observation
from fedgauge.attacks.malicious.server_attack import ServerAttack
from fedgauge.client.models.vision import last_linear
from fedgauge.client.update import Params


@dataclass(frozen=True)
class label_flipping(ServerAttack):
    """Two rows of the classifier swapped; or every row moved by one, whatever classes the client has.

    Args:
        classes: the two; None: all.
    """

    classes: tuple[int, int] | None = None

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        order = list(range(known.classes))
        if self.classes is None:
            order = order[-1:] + order[:-1]
        else:
            one, other = self.classes
            if one == other or not all(0 <= c < known.classes for c in self.classes):
                raise ValueError(
                    f"classes must be two different ones from 0 to {known.classes - 1}, got {self.classes}"
                )
            order[one], order[other] = other, one
        name, changed = last_linear(known.model), {k: t.clone() for k, t in sent.items()}
        for key in (f"{name}.weight", f"{name}.bias"):
            if key in changed:
                changed[key] = changed[key][order]
        return changed
