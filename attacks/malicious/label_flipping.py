"""Label flipping: swap rows of the classifier, so that a trained network errs and its small gradients grow.

Appendix A of Inverting Gradients (Geiping et al., NeurIPS 2020): a misclassified image has a larger gradient, which survives more
noise. Any matching attack can invert it with the weights that were sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Generator

from fedgauge.attacks.base import Knowledge, Observation
from fedgauge.attacks.engine.computation import classifier
from fedgauge.attacks.malicious.server_attack import ServerAttack
from fedgauge.client.update import Params


@dataclass(frozen=True)
class label_flipping(ServerAttack):
    """Swaps two rows of the classifier, or moves every row by one, whatever classes the client has.

    Args:
        classes: the two to swap; None: move all rows.
    """

    classes: tuple[int, int] | None = None

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        order = list(range(known.classes))
        if self.classes is None:
            order = order[-1:] + order[:-1]
        else:
            one, other = self.classes
            if one == other or not all(0 <= c < known.classes for c in self.classes):
                raise ValueError(f"classes must be two of 0 to {known.classes - 1}, got {self.classes}")
            order[one], order[other] = other, one
        name, changed = classifier(known.model, known.shape), {k: t.clone() for k, t in sent.items()}
        for key in (f"{name}.weight", f"{name}.bias"):
            if key in changed:
                changed[key] = changed[key][order]
        return changed
