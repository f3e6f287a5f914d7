"""Label flipping: move rows of the classifier, so that a trained network errs and its small gradients grow.

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
    """Moves every row of the classifier by one, whatever classes the client has."""

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        name, changed = classifier(known.model, known.shape), {k: t.clone() for k, t in sent.items()}
        for key in (f"{name}.weight", f"{name}.bias"):
            if key in changed:
                changed[key] = changed[key].roll(1, 0)
        return changed
