"""The limits on every attack's error, as attacks of a plan: one figure for all clients of a round, without update or truth."""

from abc import abstractmethod
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch import Generator

from fedgauge.attacks.candidate_bound import candidate_bound
from fedgauge.attacks.gaussian_prior import public_priors
from fedgauge.attacks.limits import bayes_limit, limit_method
from fedgauge.attacks.measure import Case, Measure, Memories, Rows
from fedgauge.attacks.modality.image_metrics import mse
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator


class ErrorLimit(Measure):
    """A limit on the mean squared error of every attack."""

    needs_truth: ClassVar[bool] = False

    metric = mse.name
    takes_gradients = False

    @abstractmethod
    def error(self, case: Case, rng: Generator) -> float:
        """The least error; ValueError where it does not apply."""

    def measure(self, case: Case) -> tuple[Rows, Memories]:
        found = self.error(case, generator(case.seed, "limit", case.name, case.wave.round))
        return {c: case.rows(c, {mse.name: [found]}, [WHOLE_BATCH]) for c in case.wave.clients}, {}


@dataclass(frozen=True)
class BayesLimit(ErrorLimit):
    """The Bayes error if the images of a class were Gaussian."""

    def assumes(self, fed: Federation, batch: str) -> list[str]:
        values = len(fed.protocol.groups(1)[0]) * fed.shards.batch_size * prod(fed.shards.dataset.shape)
        fitted = f"Gaussian prior of each class fitted to {len(fed.shards.auxiliary)} auxiliary images (Ledoit-Wolf shrinkage)"
        bound = "an estimate, and a bound only for Gaussian images"
        return [batch, bound, fitted, "labels known", limit_method(values)]

    def error(self, case: Case, rng: Generator) -> float:
        return bayes_limit(case.known, case.wave.params, public_priors(case.fed.shards), rng)


@dataclass(frozen=True)
class CandidateBound(ErrorLimit):
    """The bound for images of any distribution."""

    def assumes(self, fed: Federation, batch: str) -> list[str]:
        told = "labels, the rest of the batch and the private image known up to a few auxiliary images of its class"
        return [batch, "a bound for images of any distribution", told]

    def error(self, case: Case, rng: Generator) -> float:
        return candidate_bound(case.known, case.wave.params, rng)
