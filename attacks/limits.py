"""Limits of any attack under noise of a known density: an estimate for Gaussian images, and a certificate.

The server sees Y = C(g(x)) + noise of precision S^-1. Let J = dC(g)/dx, F(x) = J' S^-1 J the Fisher information, and
N(mean, covariance) a Gaussian prior. The van Trees inequality bounds every attacker, biased or not, over n = B * d pixels:

    MSE >= (1/n) tr[(E F(x) + covariance^-1)^-1]

(Van Trees, 1968; Gill & Levit, 1995). For images it is an estimate, not a bound. Any density of this covariance has at least
the Gaussian's information, so attackers who know more than means and covariances may pass it. `candidate_bound` holds for any
images. The unbiased Cramer-Rao bound is no lower bound for an attacker with a prior and is not given here. If an update jumps
with x (the gradient of a ReLU network at a kink), the jumps reveal more than F counts.
"""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.func import functional_call

from fedgauge.attacks.base import Knowledge, Role
from fedgauge.attacks.engine.computation import along
from fedgauge.attacks.gaussian_prior import ClassPrior, VarianceBlock, public_priors
from fedgauge.attacks.measure import Case, Measure, Memories, Rows
from fedgauge.attacks.modality.image_metrics import mse
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.client.chain import Chain
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import StochasticLayer, gradient
from fedgauge.client.models.losses import logit_gradient
from fedgauge.client.rng import generator
from fedgauge.client.transforms import BatchTransform, Link, UpdateDistribution, per_example
from fedgauge.client.update import Batch, Params, Update, UpdateFn

Precision = Callable[[Update], Update]  # the noise-free update -> Fisher information about each of its entries
DRAWS = 32  # auxiliary batches over which F is averaged, shared among the priors
LEAST = 4  # of one prior; even, see _draws
BLOCKS = 8  # of directions
POOL = 512  # auxiliary images of a prior among which those are found that the model errs on
CHUNK = 64  # directions, or images, computed together
PROBE = 4096  # entries of the test update that shows whether a link chooses what it drops


def known_noise(chain: Chain) -> UpdateDistribution | None:
    """Return the chain's noise, also where only its sign is seen; None without noise of a known density."""
    noise = chain.update_distribution
    if any(isinstance(link, BatchTransform) for link in chain.links):
        return None  # the noisy update is computed from other examples, which no prior here describes
    known = noise is not None and noise.noisy and not any(map(_chooses, chain.links))
    return noise if known else None


def noise_is_known(fed: Federation) -> bool:
    """Return whether the update of one client, or the sum of a group, carries noise of a known density."""
    return known_noise(fed.as_seen(fed.chain, fed.protocol.group_size)) is not None


def _chooses(link: object) -> bool:
    """Return whether a link drops entries by their values, so that the choice itself reveals something about the data."""
    link = link.inner if isinstance(link, per_example) else link
    known = link.update_distribution(UpdateDistribution()) if isinstance(link, Link) else None
    if known is not None and known.hidden:
        return True
    if not isinstance(link, Link) or known is None or not known.sparse or known.shrink != 1:
        return False
    rising = torch.arange(1.0, PROBE + 1)

    def dropped(values: Tensor) -> Tensor:
        batch = Batch(torch.zeros(1), torch.zeros(1, dtype=torch.int64))
        return link(lambda params, batch, rng: {"w": values})({}, batch, None)["w"] == 0

    return not torch.equal(dropped(rising), dropped(rising.flip(0)))


def precision(noise: UpdateDistribution) -> Precision:
    """Fisher information about each entry of the noise-free update, averaged over unknown masks.

    Args:
        noise: normal or Laplace (1 / b^2 for location), possibly before a mask.
    """
    # entries under a known mask are constant in x, others are visible with probability shrink
    visible, width = noise.shrink if noise.sparse else 1.0, noise.sigma or noise.scale
    return lambda expected: {k: visible * torch.full_like(t, width**-2) / noise.shrink**2 for k, t in expected.items()}


def block_traces(
    forward: UpdateFn,
    params: Params,
    batch: Batch,
    weigh: Precision,
    blocks: Sequence[VarianceBlock],
    rng: Generator,
    probes: int = 1,
    place: int = 0,
) -> Tensor:
    """tr F(x) of the example at a place within each block of directions, (blocks,), from `probes` Rademacher probes of each."""
    signs = torch.randint(0, 2, (len(blocks), probes, batch.x[0].numel()), generator=rng).double() * 2 - 1
    directions = torch.cat([block.directions(s) for block, s in zip(blocks, signs, strict=True)]).to(batch.x.dtype)
    moving = batch.x.new_zeros(len(directions), *batch.x.shape)
    moving[:, place] = directions.view(-1, *batch.x.shape[1:])
    moves = _moves(forward, params, batch, weigh, moving)
    return moves.double().square().sum(1).view(len(blocks), probes).mean(1)


def _moves(forward: UpdateFn, params: Params, batch: Batch, weigh: Precision, directions: Tensor) -> Tensor:
    """S^-1/2 J v for each direction v (N, B, ...): (N, entries of the update)."""

    def update(x: Tensor) -> Update:
        return forward(params, Batch(x, batch.y), None)

    roots = {k: w.sqrt() for k, w in weigh(update(batch.x)).items()}
    moved = along(update, batch.x, directions)
    return torch.cat([(moved[k] * root).flatten(1) for k, root in roots.items()], 1)


def trace_bound(traces: Tensor, blocks: Sequence[VarianceBlock]) -> float:
    """A weaker van Trees bound from the traces of E F in blocks of directions; by Jensen's inequality never above it.

    For one block it is d / (tr E F + tr covariance^-1).
    """
    sizes = torch.tensor([block.size for block in blocks], dtype=torch.float64)
    priors = torch.tensor([block.information for block in blocks], dtype=torch.float64)
    return float((sizes.square() / (traces + priors)).sum() / sizes.sum())


def observed(known: Knowledge) -> tuple[UpdateFn, UpdateDistribution]:
    """A client's noise-free update, and the noise on it.

    Raises:
        ValueError: the density of this chain's or model's randomness is not known.
    """
    found = known_noise(known.chain)
    if found is None or found.signed:
        raise ValueError("the values that the server sees have no noise of a known density")
    for name, module in known.model.named_modules():
        dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        if dropout or isinstance(module, StochasticLayer):
            raise ValueError(f"layer {name!r} draws random numbers, so the update's density is not known")
    return known.chain.mean(gradient(known.model, known.loss, normalise=known.normalise)), found


def bayes_limit(known: Knowledge, params: Params, priors: Sequence[ClassPrior], rng: Generator) -> float:
    """The mean squared error of pixels in [0, 1] that the van Trees bound would allow if the images of a class were Gaussian.

    It is the mean over labels of a bound for each, with F averaged over auxiliary batches that hold such an example, so labels
    count as known. It uses no update and no private image.

    Raises:
        ValueError: it does not apply to this chain or model.
    """
    forward, noise = observed(known)
    weigh, count = precision(noise), max(LEAST, DRAWS // len(priors))

    def of_class(own: ClassPrior) -> float:
        blocks = own.prior.blocks(BLOCKS)
        traces = [
            weight * block_traces(forward, params, batch, weigh, blocks, rng, place=place)
            for batch, place, weight in list(_draws(known, params, own.labels, count, rng))
        ]
        return trace_bound(torch.stack(traces).mean(0), blocks)

    return sum(own.share * of_class(own) for own in priors) / sum(own.share for own in priors)


def _draws(
    known: Knowledge, params: Params, labels: Tensor, count: int, rng: Generator
) -> Iterator[tuple[Batch, int, float]]:
    """Auxiliary batches, the place of an example with one of these labels, and its weight.

    Weighted, their mean is the mean over uniform draws. F grows with the model's error, and late in training few images dominate
    its mean. So every other example is drawn in proportion to the error; no weight exceeds 2, whatever the chain is.
    """
    x, y = known.public
    own = torch.nonzero(torch.isin(y, labels)).flatten()
    own = own[torch.randperm(len(own), generator=rng)[:POOL]]
    errors = _errors(known, params, own)
    for i in range(count):
        chosen = torch.randint(len(x), (known.batch_size,), generator=rng)
        place = int(torch.randint(known.batch_size, (1,), generator=rng))
        uniform = i % 2 == 0
        one = int(
            torch.randint(len(own), (1,), generator=rng) if uniform else torch.multinomial(errors, 1, generator=rng)
        )
        chosen[place] = own[one]
        yield Batch(x[chosen], y[chosen]), place, 2 / (1 + float(errors[one] / errors.mean()))


def _errors(known: Knowledge, params: Params, pool: Tensor) -> Tensor:
    """|derivative of the loss by the logits|^2 of some auxiliary images, above 0."""
    model = copy.deepcopy(known.model).eval()  # a proxy that must not draw noise or change statistics
    x, y = (t[pool] for t in known.public)
    with torch.no_grad():
        logits = [functional_call(model, params, (known.normalise(part),)) for part in x.split(CHUNK)]
    slopes = [logit_gradient(known.loss, part, labels) for part, labels in zip(logits, y.split(CHUNK), strict=True)]
    return torch.cat(slopes).double().square().sum(1).clamp_min(1e-12)


class ErrorLimit(Measure):
    needs_truth: ClassVar[bool] = False

    metric = mse.name
    role: Role = "limit"
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

    role = "estimate"

    def assumes(self, fed: Federation, batch: str) -> list[str]:
        fitted = f"Gaussian prior of each class fitted to {len(fed.shards.auxiliary)} auxiliary images (Ledoit-Wolf shrinkage)"
        bound = "an estimate, and a bound only for Gaussian images"
        form = f"by its trace in {BLOCKS} blocks of the prior's directions (a weaker bound)"
        method = f"Fisher information {form}, averaged over batches of auxiliary images"
        return [batch, bound, fitted, "labels known", method]

    def error(self, case: Case, rng: Generator) -> float:
        return bayes_limit(case.known, case.wave.params, public_priors(case.fed.shards), rng)


def reconstruction_robustness(prior_success: float, sigma: float, releases: int = 1) -> float:
    """The highest success rate of any reconstruction under Gaussian noise: Phi(Phi^-1(kappa) + sqrt(T) / sigma).

    (ReRo: Balle et al., 2022; closed form for full batches: Hayes et al., 2023.)

    Args:
        prior_success: kappa, the success rate of the best guess without an update, in [0, 1].
        sigma: noise over sensitivity, above 0.
        releases: T, of the same record under fresh noise.
    """
    if not 0 < prior_success < 1:  # under a bounded density ratio, success probabilities 0 and 1 stay as they are
        return prior_success
    normal = NormalDist()
    return normal.cdf(normal.inv_cdf(prior_success) + math.sqrt(releases) / sigma)
