"""Bounds that no attacker can beat on average, under a named prior and a defense whose noise has a known density.

The server sees Y = C(g(x)) + noise of precision S^-1. With J = dC(g)/dx, the Fisher information F(x) = J' S^-1 J and a
Gaussian prior N(mean, covariance), the van Trees inequality bounds every attacker, biased or not, over n = B * d pixels:

    MSE >= (1/n) tr[(E F(x) + covariance^-1)^-1]

(Van Trees, 1968; Gill & Levit, 1995). The unbiased Cramer-Rao bound is no lower bound for an attacker with a prior and is
not given here. If an update jumps with x (the gradient of a ReLU network at a kink), the jumps reveal more than F counts.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import torch
from torch import Generator, Tensor
from torch.func import functional_call, jvp, vmap

from fedgauge.attacks.base import Knowledge
from fedgauge.client.chain import Chain
from fedgauge.client.models.losses import is_cross_entropy, logit_gradient
from fedgauge.client.training import StochasticLayer, gradient
from fedgauge.client.transforms import BatchTransform, Link, UpdateDistribution, per_example
from fedgauge.client.update import Batch, Params, Update, UpdateFn

Precision = Callable[[Update], Update]  # the noise-free update -> Fisher information about each of its entries
FULL = 256  # pixels of a batch up to which the whole F is formed, by one derivative for each pixel
DRAWS = 16  # auxiliary batches over which F is averaged; even, see _draws
BLOCKS = 8  # of the trace form
POOL = 512  # auxiliary images from which batches are drawn
CHUNK = 64  # directions, or images, computed together
PROBE = 4096  # entries of the test update that shows whether a link chooses what it drops


# -------------------------------------------------------------------------------------------------------------- prior


@dataclass(frozen=True, eq=False)
class VarianceBlock:
    """Directions of nearly equal prior variance: rows of axes (m, d); if None, all directions orthogonal to `without`."""

    axes: Tensor | None
    without: Tensor
    size: int
    information: float  # trace of the prior's information in them

    def directions(self, signs: Tensor) -> Tensor:
        """(..., d) random vectors z in the block with E z z' its projector, from Rademacher signs (..., d)."""
        if self.axes is None:
            return signs - (signs @ self.without.T) @ self.without
        return signs[..., : self.size] @ self.axes


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    """N(mean, covariance) over one example's d pixels, by the covariance's principal axes; float64.

    Args:
        mean: (d,).
        axes: (r, d) orthonormal.
        variances: (r,) along the axes, above 0.
        rest: variance in each of the d - r directions orthogonal to them, above 0.
        shrinkage: used in the fit.
    """

    mean: Tensor
    axes: Tensor
    variances: Tensor
    rest: float = 1.0
    shrinkage: float = 0.0

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> "GaussianPrior":
        """From a mean (d,) and a positive definite covariance (d, d)."""
        variances, axes = torch.linalg.eigh(covariance.double())
        if not variances[0] > 0:
            raise ValueError(f"the covariance must be positive definite, its least eigenvalue is {variances[0]:.3g}")
        return cls(mean.double(), axes.T, variances)

    @classmethod
    def fit(cls, x: Tensor, shrinkage: float | None = None) -> "GaussianPrior":
        """Fit to images x (N, ...): their covariance, shrunk towards its mean variance so that it is invertible.

        Args:
            shrinkage: in (0, 1]; default: Ledoit and Wolf's estimate of the best (2004).
        """
        flat = x.flatten(1).double()
        count, size = flat.shape
        mean = flat.mean(0)
        centred = flat - mean
        average = float(centred.square().sum()) / (count * size)  # variance of a pixel
        if not average > 0:
            raise ValueError(f"a prior needs auxiliary images that differ, got {count}")
        variances, axes = _principal(centred)
        if shrinkage is None:
            shrinkage = _ledoit_wolf(centred, variances, average)
        shrunk = (1 - shrinkage) * variances + shrinkage * average
        return cls(mean, axes, shrunk, shrinkage * average, shrinkage)

    @cached_property
    def covariance(self) -> Tensor:
        """(d, d)."""
        return self._spectral(self.variances, self.rest)

    @cached_property
    def information(self) -> Tensor:
        """The inverse covariance (d, d)."""
        return self._spectral(1 / self.variances, 1 / self.rest)

    def sample(self, count: int, rng: Generator) -> Tensor:
        """(count, d) draws."""
        z = torch.randn(count, len(self.mean), generator=rng, dtype=torch.float64)
        rest = math.sqrt(self.rest)
        along = (z @ self.axes.T) * (self.variances.sqrt() - rest)
        return self.mean + rest * z + along @ self.axes

    def blocks(self, count: int) -> list[VarianceBlock]:
        """The directions grouped by prior variance, in at most `count` groups of equal ratio, and the rest."""
        logs = self.variances.log()
        low, high = float(logs.min()), float(logs.max())
        step = (high - low) / count or 1.0
        label = ((logs - low) / step).long().clamp(max=count - 1)
        parts = [torch.nonzero(label == b).flatten() for b in range(count)]
        found = [
            VarianceBlock(self.axes[i], self.axes, len(i), float((1 / self.variances[i]).sum()))
            for i in parts
            if len(i) > 0
        ]
        left = len(self.mean) - len(self.axes)
        return found + ([VarianceBlock(None, self.axes, left, left / self.rest)] if left else [])

    def _spectral(self, along: Tensor, rest: float) -> Tensor:
        identity = torch.eye(len(self.mean), dtype=torch.float64)
        spread: Tensor = self.axes.T @ ((along - rest)[:, None] * self.axes)
        return rest * identity + spread


def _principal(centred: Tensor) -> tuple[Tensor, Tensor]:
    """Variances and orthonormal axes (r, d) of centred rows (N, d), through the smaller of the two products."""
    count, size = centred.shape
    if count > size:
        variances, axes = torch.linalg.eigh(centred.T @ centred / count)
        return variances.clamp_min(0), axes.T
    variances, weights = torch.linalg.eigh(centred @ centred.T / count)
    kept = variances > 1e-10 * variances[-1]  # centring makes one direction empty, repeated images more
    axes = weights[:, kept].T @ centred
    return variances[kept], axes / (count * variances[kept]).sqrt()[:, None]


def _ledoit_wolf(centred: Tensor, variances: Tensor, average: float) -> float:
    """The shrinkage of least expected squared error, in (0, 1] (Ledoit & Wolf, 2004, lemma 3.4)."""
    count, size = centred.shape
    squares = float(variances.square().sum())
    distance = squares - size * average**2
    error = (float(centred.square().sum(1).square().mean()) - squares) / count
    return 1.0 if error >= distance else max(error / distance, 1e-6)


# -------------------------------------------------------------------------------------------------------------- noise


def known_noise(chain: Chain) -> tuple[Chain, UpdateDistribution] | None:
    """The chain whose noise-free form F describes, and the noise on it; None without noise of a known density.

    The chain ends before a sign: the server observes the signs of its noisy output, and later links only change the scale.
    """
    whole = chain.update_distribution
    if any(isinstance(link, BatchTransform) for link in chain.links):
        return None  # the noisy update is computed from other examples, which no prior here describes
    if whole is None or not whole.noisy or any(_chooses(link) for link in chain.links):
        return None
    for i in range(len(chain.links)):
        so_far = Chain(chain.links[: i + 1]).update_distribution
        if so_far is not None and so_far.signed:
            return Chain(chain.links[:i]), so_far
    return chain, whole


def _chooses(link: object) -> bool:
    """Whether a link drops entries depending on their values, so that the choice itself reveals something about the data."""
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


def precision(noise: UpdateDistribution, seen: Update | None = None) -> Precision:
    """Fisher information about each entry of the noise-free update, under noise of a known density.

    Args:
        noise: normal or Laplace (1 / b^2 for location), possibly before a mask or a sign.
        seen: its exact zeros are the entries that the client's own mask dropped; default: the average over masks.
    """
    if not noise.noisy or (noise.sigma > 0 and noise.scale > 0):
        raise ValueError(f"expected noise of one known density, got {noise}")

    def weights(expected: Update) -> Update:
        found = {k: _weight(t / noise.shrink, noise) / noise.shrink**2 for k, t in expected.items()}
        if not noise.sparse:
            return found
        if seen is None:  # entries under a known mask are constant in x, others are visible with probability shrink
            return {k: noise.shrink * w for k, w in found.items()}
        return {k: torch.where(seen[k] != 0, w, torch.zeros_like(w)) for k, w in found.items()}

    return weights


def _weight(value: Tensor, noise: UpdateDistribution) -> Tensor:
    """Information about a value from its noisy version, or from that version's sign."""
    width = noise.sigma or noise.scale
    if not noise.signed:
        return torch.full_like(value, width**-2)
    u = value.double() / width
    if noise.sigma > 0:  # density^2 / (below * above), in logarithms: both tails underflow
        tails = torch.special.log_ndtr(u) + torch.special.log_ndtr(-u)
        found = (-u.square() - math.log(2 * math.pi) - tails).exp()
    else:
        tail = (-u.abs()).exp() / 2
        found = tail / (1 - tail)
    weight: Tensor = found / width**2
    return weight.to(value.dtype)


# -------------------------------------------------------------------------------------------------------- information


def fisher(forward: UpdateFn, params: Params, batch: Batch, weigh: Precision, chunk: int = CHUNK) -> Tensor:
    """F(x) = J' S^-1 J, (n, n) float64, of all n entries of batch.x, by n forward-mode derivatives in chunks."""
    units = torch.eye(batch.x.numel(), dtype=batch.x.dtype).view(-1, *batch.x.shape)
    rows = torch.cat([_moves(forward, params, batch, weigh, part).double() for part in units.split(chunk)])
    return rows @ rows.T


def block_traces(
    forward: UpdateFn,
    params: Params,
    batch: Batch,
    weigh: Precision,
    blocks: Sequence[VarianceBlock],
    rng: Generator,
    probes: int = 1,
) -> Tensor:
    """tr F(x) within each block of directions of each example, (blocks,), from `probes` Rademacher probes of each block."""
    signs = torch.randint(0, 2, (len(blocks), probes, *batch.x.flatten(1).shape), generator=rng).double() * 2 - 1
    directions = torch.stack([block.directions(s) for block, s in zip(blocks, signs, strict=True)])
    flat = directions.to(batch.x.dtype).view(-1, *batch.x.shape)  # (blocks * probes, B, ...)
    moves = _moves(forward, params, batch, weigh, flat)
    return moves.double().square().sum(1).view(len(blocks), probes).mean(1)


def _moves(forward: UpdateFn, params: Params, batch: Batch, weigh: Precision, directions: Tensor) -> Tensor:
    """S^-1/2 J v for each direction v (N, B, ...): (N, entries of the update)."""

    def update(x: Tensor) -> Update:
        return forward(params, Batch(x, batch.y), None)

    def along(v: Tensor) -> Update:
        moved: Update = jvp(update, (batch.x,), (v,))[1]
        return moved

    roots = {k: w.sqrt() for k, w in weigh(update(batch.x)).items()}
    with warnings.catch_warnings():  # torch compiles some rules on its first forward-mode derivative, with a warning
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        moved = vmap(along)(directions)
    return torch.cat([(moved[k] * root).flatten(1) for k, root in roots.items()], 1)


# ------------------------------------------------------------------------------------------------------------- bounds


def van_trees(informations: Sequence[Tensor], prior: GaussianPrior) -> float:
    """The bound on the mean squared error per pixel, from F(x) (n, n) at draws x from the prior's population.

    For a batch it assumes the examples in their order: pairing them afterwards can gain an attacker a little.
    For a record observed again under fresh noise, the informations of the rounds add up: pass their sums.
    """
    return local_estimate(torch.stack(list(informations)).mean(0), prior)


def local_estimate(information: Tensor, prior: GaussianPrior) -> float:
    """(1/n) tr[(F(x) + covariance^-1)^-1] at one x, with F (n, n): the expectation there, not a bound."""
    examples = len(information) // len(prior.mean)
    total = information + torch.block_diag(*[prior.information] * examples)
    return float(torch.cholesky_inverse(torch.linalg.cholesky(total)).trace()) / len(information)


def trace_bound(traces: Tensor, blocks: Sequence[VarianceBlock], examples: int = 1) -> float:
    """A weaker van Trees bound from the traces of E F in blocks of directions; by Jensen's inequality never above it.

    For one block it is n / (tr E F + tr covariance^-1).
    """
    sizes = torch.tensor([examples * block.size for block in blocks], dtype=torch.float64)
    priors = torch.tensor([examples * block.information for block in blocks], dtype=torch.float64)
    return float((sizes.square() / (traces + priors)).sum() / sizes.sum())


def bayes_limit(known: Knowledge, params: Params, prior: GaussianPrior, rng: Generator) -> float:
    """The van Trees bound on the mean squared error of a batch's pixels in [0, 1], with F averaged over auxiliary images.

    It uses no update and no private image. Labels count as known, so it also holds for attackers without them.

    Raises:
        ValueError: the bound does not apply to this chain or model.
    """
    found = known_noise(known.chain)
    if found is None:
        raise ValueError("the chain has no noise of a known density")
    for name, module in known.model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise ValueError(f"layer {name!r} is dropout in train mode: the density of its draws is not known")
        if isinstance(module, StochasticLayer):
            raise ValueError(f"layer {name!r} draws noise, so the update is not normal around its noise-free form")
    part, noise = found
    bare = gradient(known.model, known.loss, normalise=known.normalise)
    forward, weigh = part.mean(bare), precision(noise)
    draws = list(_draws(known, params, rng))
    if known.batch_size * len(prior.mean) <= FULL:
        return van_trees([weight * fisher(forward, params, batch, weigh) for batch, weight in draws], prior)
    blocks = prior.blocks(BLOCKS)
    traces = [weight * block_traces(forward, params, batch, weigh, blocks, rng) for batch, weight in draws]
    return trace_bound(torch.stack(traces).mean(0), blocks, known.batch_size)


def _draws(known: Knowledge, params: Params, rng: Generator) -> Iterator[tuple[Batch, float]]:
    """Auxiliary batches, with weights that make their weighted mean equal the mean over uniform draws.

    F grows with the model's error, and late in training few images dominate its mean. So in every other batch one example
    is drawn in proportion to the error; no weight exceeds 2, whatever the chain is.
    """
    if known.auxiliary is None:
        raise ValueError("the limit needs auxiliary images")
    pool = torch.randperm(len(known.auxiliary.x), generator=rng)[:POOL]
    errors = _errors(known, params, pool)
    for i in range(DRAWS):
        chosen = torch.randint(len(pool), (known.batch_size,), generator=rng)
        if i % 2:
            place = torch.randint(known.batch_size, (1,), generator=rng)
            chosen[place] = torch.multinomial(errors, 1, generator=rng)
        weight = 2 / (1 + float(errors[chosen].mean() / errors.mean()))
        yield Batch(known.auxiliary.x[pool[chosen]], known.auxiliary.y[pool[chosen]]), weight


def _errors(known: Knowledge, params: Params, pool: Tensor) -> Tensor:
    """|derivative of the loss by the logits|^2 of some auxiliary images, above 0; for cross-entropy |softmax - one-hot|^2."""
    assert known.auxiliary is not None
    model = copy.deepcopy(known.model).eval()  # a proxy that must not draw noise or change statistics
    x, y = known.auxiliary.x[pool], known.auxiliary.y[pool]
    with torch.no_grad():
        logits = [functional_call(model, params, (known.normalise(part),)) for part in x.split(CHUNK)]
    if not is_cross_entropy(known.loss):
        slopes = [logit_gradient(known.loss, part, labels) for part, labels in zip(logits, y.split(CHUNK), strict=True)]
        return torch.cat(slopes).double().square().sum(1).clamp_min(1e-12)
    chances = torch.cat([part.softmax(1) for part in logits]).double()
    return (chances - torch.nn.functional.one_hot(y, chances.shape[1])).square().sum(1).clamp_min(1e-12)


def limit_method(size: int) -> str:
    """The method of `bayes_limit` for batches of this many pixels, in words."""
    kind = "whole" if size <= FULL else f"by its trace in {BLOCKS} blocks of the prior's directions (a weaker bound)"
    return f"Fisher information {kind}, averaged over {DRAWS} batches of auxiliary images"


# --------------------------------------------------------------------------------------------------------- certificate


def reconstruction_robustness(prior_success: float, sigma: float, releases: int = 1) -> float:
    """The highest success rate of any reconstruction under Gaussian noise: Phi(Phi^-1(kappa) + sqrt(T) / sigma).

    (ReRo: Balle et al., 2022; closed form for full batches: Hayes et al., 2023.)

    Args:
        prior_success: kappa, the success rate of the best guess without an update, in [0, 1].
        sigma: noise over sensitivity, above 0.
        releases: T, of the same record under fresh noise.

    >>> round(reconstruction_robustness(0.1, sigma=1.0), 4)
    0.3891
    """
    if not 0 < prior_success < 1:  # under a bounded density ratio, success probabilities 0 and 1 stay as they are
        return prior_success
    normal = NormalDist()
    return normal.cdf(normal.inv_cdf(prior_success) + math.sqrt(releases) / sigma)
