"""Complete dictionary learning: finds the directions in which most rows of a matrix vanish.

Rows L (m, B) that mix B sparse sources by an unknown basis give back source i as L q_i. The directions q_i are local minima of
the l1 norm of L q on the sphere if there are enough rows. Soft thresholding from many starts (Qu et al., Finding a sparse vector
in a subspace, 2014) comes near some; the convex program of a linear constraint (Spielman et al., Exact recovery of sparsely-used
dictionaries, 2012) and reweighted least squares (Chartrand and Yin, 2008) make them exact, and planes of two show hidden others.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

STARTS = 4  # starts of a round, for each wanted direction
SHRINKAGES = 150  # of each start; most settle in fewer
# of the soft thresholding, in root mean squares of L q: small ones suit few rows, large ones many
THRESHOLDS = (0.2, 0.6)
REWEIGHTINGS = 30
WIDE, NARROW = 0.3, 1e-6  # first and last smoothing of the reweighting, in root mean squares
NEAR_ZERO = 0.05  # of a root mean square; smaller entries are nearly silent
DEVIATIONS = 3.0  # of the noise, below which an entry counts as silent
ALIKE, SAME = 0.95, 0.999  # cosines from which two directions are one, before and after the reweighting
INDEPENDENT = 0.1  # sine of the least angle between a chosen direction and those chosen before
KEPT = 4  # candidates for each wanted direction
CROSSINGS = 2  # searches for mixtures in a round


@dataclass(frozen=True, eq=False)
class SparseMixture:
    """Rows that mix B sparse sources.

    Args:
        rows: L (m, B) of orthonormal columns, float64.
        blur: (B,) standard deviation of the noise in each column of L; zeros: none.
    """

    rows: Tensor
    blur: Tensor

    @property
    def size(self) -> int:
        """B."""
        return self.rows.shape[1]

    @property
    def unit(self) -> float:
        """Root mean square of L q."""
        return 1 / math.sqrt(len(self.rows))

    def noise(self, directions: Tensor) -> Tensor:
        """(N, 1) standard deviation of the noise in L q."""
        noise: Tensor = (directions * self.blur).norm(dim=1, keepdim=True)
        return noise

    def silence(self, directions: Tensor) -> Tensor:
        """(N, 1) entries of L q below this are nearly silent."""
        return (DEVIATIONS * self.noise(directions)).clamp(min=NEAR_ZERO * self.unit)

    def loud(self, directions: Tensor) -> Tensor:
        """(N,) about how many entries of L q are not silent."""
        return ((directions @ self.rows.T).abs() / self.silence(directions)).clamp(max=1).sum(1)

    def bases(self, rng: Generator) -> Iterator[Tensor]:
        """The best basis after each round, without end: unit rows (at most B, B), the sparsest first."""
        pool = self.rows.new_empty(0, self.size)
        basis = pool
        while True:
            pool = self._joined(pool, self._refined(self._shrunk(basis, rng)))
            for _ in range(CROSSINGS):
                basis = self._basis(pool)
                if not len(crossed := self._crossings(basis)):
                    break
                pool = self._joined(pool, self._refined(crossed))
            basis = self._basis(pool)
            yield basis

    def _shrunk(self, basis: Tensor, rng: Generator) -> Tensor:
        """Rough directions, orthogonal to a part of the basis, so that others are found: its sparsest part, or a random one."""
        free = torch.eye(self.size).to(self.rows)
        if len(basis):
            random = bool(torch.randint(2, (1,), generator=rng))
            count = int(torch.randint(0 if random else self.size // 2, self.size, (1,), generator=rng))
            taken = (torch.randperm(len(basis), generator=rng) if random else torch.arange(len(basis)))[:count]
            free = torch.linalg.qr(torch.cat([basis[taken].T, free], 1)).Q[:, len(taken) : self.size]
        rows, count = self.rows @ free, STARTS * self.size
        start = torch.randint(len(rows), (count,), generator=rng)
        least, most = THRESHOLDS
        threshold = self.unit * (least + (most - least) * torch.rand(count, 1, generator=rng).to(rows))
        found = F.normalize(rows[start], dim=1)
        for _ in range(SHRINKAGES):
            signals = found @ rows.T
            found = F.normalize((signals - signals.clamp(-threshold, threshold)) @ rows, dim=1)
        found = found[found.norm(dim=1) > 0.5]  # others began at a neuron that is off for all
        return _distinct(found @ free.T if len(found) else free.T, ALIKE)

    def _refined(self, normals: Tensor) -> Tensor:
        """Directions at minima of the l_p norm of L q.

        With p = 1 among the q with n q = 1, for each normal n, there are no local minima; from there on the sphere, p falls to 1/2.
        """
        directions = normals
        for k in range(REWEIGHTINGS):
            directions = F.normalize(torch.linalg.solve(self._weighted(directions, k, 1.0), normals), dim=1)
        for k in range(REWEIGHTINGS):
            gram = self._weighted(directions, k, 1 - k / (REWEIGHTINGS - 1) / 2)
            directions = torch.linalg.eigh(gram).eigenvectors[..., 0]
        return directions

    def _weighted(self, directions: Tensor, k: int, p: float) -> Tensor:
        """(N, B, B) sums of squares of L q in step k of a search for the least l_p norm near N directions."""
        smooth = self.unit * WIDE * (NARROW / WIDE) ** (k / (REWEIGHTINGS - 1))
        spread = self.noise(directions).clamp(min=smooth)
        weights = ((directions @ self.rows.T).square() + spread.square()) ** (p / 2 - 1)
        return (self.rows.T * weights[:, None]) @ self.rows

    def _crossings(self, basis: Tensor) -> Tensor:
        """In the planes of two directions, those in which many further rows vanish, if they are sparser than the basis is.

        A mixture of two similar sources can be a minimum that hides one of them. Where the source that is known is on and the
        hidden one is off, the mixture is in one proportion to the known one.
        """
        signals, window = basis @ self.rows.T, max(2, len(self.rows) // 10)
        on = signals.abs() > self.silence(basis)
        found = []
        for k in range(len(basis)):
            angles = torch.atan2(signals[k].expand_as(signals), signals) % math.pi
            angles = angles.where(on[k] & on, math.inf).sort(dim=1).values
            widths = (angles[:, window:] - angles[:, :-window]).nan_to_num(math.inf)
            narrowest = widths.min(1)
            angle = angles.gather(1, narrowest.indices[:, None] + window // 2)
            planes = (narrowest.values < math.inf) & (torch.arange(len(basis), device=basis.device) > k)
            found.append((angle.cos() * basis[k] - angle.sin() * basis)[planes])
        crossed = F.normalize(torch.cat(found), dim=1)
        loud = self.loud(crossed)
        order = loud.argsort()[: 2 * KEPT * self.size]
        crossed = _distinct(crossed[order][loud[order] < self.loud(basis).max()], ALIKE)
        return crossed[(crossed @ basis.T).abs().amax(1) < ALIKE][: 2 * self.size]

    def _joined(self, pool: Tensor, fresh: Tensor) -> Tensor:
        every = torch.cat([pool, fresh])
        return _distinct(every[self.loud(every).argsort(stable=True)], SAME)[: KEPT * self.size]

    def _basis(self, pool: Tensor) -> Tensor:
        chosen: list[int] = []
        left = pool
        for k in range(len(pool)):
            if len(chosen) < self.size and float(left[k].norm()) > INDEPENDENT:
                chosen.append(k)
                axis = F.normalize(left[k], dim=0)
                left = left - (left @ axis)[:, None] * axis
        return pool[chosen]


def _distinct(directions: Tensor, cosine: float) -> Tensor:
    """The first of those that are alike up to sign."""
    alike = (directions @ directions.T).abs() > cosine
    kept: list[int] = []
    for k in range(len(directions)):
        if not kept or not bool(alike[k, kept].any()):
            kept.append(k)
    return directions[kept]
