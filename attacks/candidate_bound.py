"""A bound for images of any distribution: the Bayes error of an attacker who is given a few candidate images.

Give an attacker more than any real one has: the labels, all other examples of the batch, and N images, the private one and
others from its distribution. Simulation yields the error of the best guess, the posterior mean over the N. An attacker who
knows less cannot do better on average, whatever the distribution. No derivative is taken, so the network may have kinks. Under
little noise the N images are distinguishable, and the bound is useless.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.limits import ErrorLimit, observed
from fedgauge.attacks.measure import Case
from fedgauge.client.federation import Federation
from fedgauge.client.transforms import UpdateDistribution
from fedgauge.client.update import Batch, Params

GRADIENTS = 512  # updates to compute, shared among the classes
CLASSES = 32  # at most; of more, so many are drawn
ENTRIES = 2**26  # of all candidates' updates together, which are held at once
DRAWS = 20  # of the noise, for each candidate
WORK = 2**25  # entries that the draws read where noise is not normal: large updates get fewer draws
LEAST = 1e-6  # an error below it is that of few draws


@dataclass(frozen=True)
class CandidateBound(ErrorLimit):
    def assumes(self, fed: Federation, batch: str) -> list[str]:
        known = "labels, the rest of the batch and the private image known up to a few auxiliary images of its class"
        return [batch, "a bound for images of any distribution", known]

    def error(self, case: Case, rng: Generator) -> float:
        return candidate_bound(case.known, case.wave.params, rng)


def candidate_bound(known: Knowledge, params: Params, rng: Generator) -> float:
    """The bound on the mean squared error of a batch's pixels in [0, 1].

    It uses no update and no private image. It holds for guesses that say which example is which; pairing them with
    the truth afterwards, as is done for every attack, can gain an attacker a little. An unknown mask counts as one that shows
    every entry, which gives a weaker bound.

    Raises:
        ValueError: it does not apply to this chain or model, or the noise leaves all images distinguishable.
    """
    forward, noise = observed(known)
    x, y = known.public
    labels, counts = y.unique(return_counts=True)
    share = counts.double() / len(y)
    if len(labels) > CLASSES:
        labels = labels[torch.multinomial(share, CLASSES, replacement=True, generator=rng)]
        share = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)
    most = max(1, min(GRADIENTS // len(labels), ENTRIES // sum(t.numel() for t in params.values())))
    total = 0.0
    for label, part in zip(labels, share.tolist(), strict=True):
        own = torch.nonzero(y == label).flatten()
        own = own[torch.randperm(len(own), generator=rng)[:most]]
        rest = torch.randint(len(x), (known.batch_size,), generator=rng)
        place = torch.randint(known.batch_size, (1,), generator=rng)
        seen = []
        for one in own:
            rest[place] = one
            update = forward(params, Batch(x[rest], y[rest]), None)
            seen.append(torch.cat([t.flatten() for t in update.values()]).detach())
        total += part * bayes_error(torch.stack(seen) / noise.shrink, x[own].flatten(1), noise, rng)
    if total < LEAST:
        raise ValueError(f"the noise leaves {most} candidates of a class distinguishable, so there is no bound")
    return total


def bayes_error(updates: Tensor, x: Tensor, noise: UpdateDistribution, rng: Generator) -> float:
    """Return the least mean squared error of any guess among N equally likely x from a noisy update.

    Args:
        updates: (N, P) noise-free; x: (N, d).
    """
    x, count = x.double(), len(x)
    draws = DRAWS
    if noise.sigma > 0:  # only the distances matter, and they fit into N dimensions
        rows = _isometric(updates) / noise.sigma
    else:
        rows = updates.double() / noise.scale
        draws = max(1, min(DRAWS, WORK // (count * rows.numel())))
    left = torch.zeros((), dtype=torch.float64)
    for _ in range(draws):
        chances = _log_likelihood(rows + _noise(rows, noise, rng), rows, noise).softmax(1)
        left += (chances @ x.square()).sub((chances @ x).square()).clamp_min(0).mean()  # the posterior's variance
    return float(left) / draws


def _isometric(rows: Tensor) -> Tensor:
    """(N, N) float64 points as far from each other as the rows (N, P) are."""
    centred = rows - rows.mean(0)
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for part in centred.split(2**16, 1):
        gram += part.double() @ part.double().T
    squares, axes = torch.linalg.eigh(gram)
    points: Tensor = axes * squares.clamp_min(0).sqrt()
    return points


def _noise(rows: Tensor, noise: UpdateDistribution, rng: Generator) -> Tensor:
    """Noise of width 1."""
    if noise.sigma > 0:
        return torch.randn(rows.shape, generator=rng, dtype=rows.dtype)
    centred = torch.rand(rows.shape, generator=rng, dtype=rows.dtype) - 0.5
    return -centred.sign() * torch.log1p(-2 * centred.abs())


def _log_likelihood(seen: Tensor, rows: Tensor, noise: UpdateDistribution) -> Tensor:
    """(N, N) of each update as seen, by each candidate, up to a constant of the update."""
    normal = noise.sigma > 0
    distance = torch.cdist(seen, rows, p=2.0 if normal else 1.0, compute_mode="donot_use_mm_for_euclid_dist")
    return -distance.square() / 2 if normal else -distance
