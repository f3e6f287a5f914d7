"""Search ATS policies (Gao et al., CVPR 2021, algorithm 1).

`python -m fedgauge.simulations.experiments.search_ats SCENARIO.toml` scores random policies without training: by how long a
gradient stays unlike the true one on the way from noise to the image (privacy), and by how differently a network responds to
different images (accuracy). It uses the scenario's auxiliary images, so that the search reveals nothing about private data.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from fedgauge.client.components import SpecError
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Params, UpdateFn
from fedgauge.defenses.ats import OPERATIONS, Policy, ats
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run.environment import one_thread

POINTS = 20  # steps on the way from noise to the image [code]
OFFSET = 1e-5  # on eigenvalues (Mellor et al., 2020) [code]
THRESHOLD = -85.0  # of the accuracy score, for ResNet20 and 100 images of CIFAR-100 [code]
MAX_OPERATIONS = 3  # operations of a policy


@dataclass(frozen=True)
class ScoredPolicy:
    """A policy and its scores.

    Args:
        privacy: the mean similarity of gradients; lower is harder to invert.
        accuracy: higher is easier to learn from.
    """

    policy: str
    privacy: float
    accuracy: float


@dataclass(frozen=True, eq=False)
class PolicyScorer:
    """Scores policies on a federation's network and auxiliary images.

    Args:
        federation: gives the network, its normalisation and its auxiliary images.
        images: for the privacy score and for the accuracy score.
        steps: of gradient descent on 32 auxiliary images each, before privacy is scored; a scenario whose [model] names
            weights is scored on those.
    """

    federation: Federation
    images: tuple[int, int] = (20, 100)
    steps: int = 100

    def __post_init__(self) -> None:
        few, many = self.images
        available = len(self.federation.shards.auxiliary)
        if few < 1 or many < 2 or max(few, many) > available:
            raise ValueError(
                f"privacy needs at least 1 image and accuracy 2, at most {available} (the auxiliary images), got {few} and {many}"
            )

    def score(self, policy: Policy, seed: int) -> ScoredPolicy:
        """Both scores of a policy; equal seeds give the same images, signs and noise."""
        link = ats(policy, self.federation.shards.dataset.shape)
        augmented = link.transform(self._batch(max(self.images)), generator(seed, "augment"))
        few, many = (Batch(augmented.x[:n], augmented.y[:n]) for n in self.images)
        private = privacy(self.federation.gradient, self._trained, few, generator(seed, "noise"))
        federation = self._untrained
        return ScoredPolicy(str(link), private, accuracy(federation.model, federation.shards.dataset.normalise(many.x)))

    def _batch(self, count: int, first: int = 0) -> Batch:
        auxiliary = self.federation.shards.auxiliary_batch()
        index = (torch.arange(count) + first) % len(auxiliary.x)
        return Batch(auxiliary.x[index], auxiliary.y[index])

    @cached_property
    def _untrained(self) -> Federation:
        """The federation with a network drawn from the seed, for the accuracy score."""
        protocol = self.federation.protocol
        drawn = {k: v for k, v in protocol.model.items() if k != "weights"}
        return Federation(replace(protocol, model=drawn))

    @cached_property
    def _trained(self) -> Params:
        """Weights after a little training, for the privacy score."""
        params, _ = self.federation.initial()
        if "weights" in self.federation.protocol.model:
            return params
        for step in range(self.steps):
            update = self.federation.gradient(params, self._batch(32, 32 * step), None)
            params = {k: p - 0.1 * update[k] for k, p in params.items()}
        return params


def privacy(compute: UpdateFn, params: Params, batch: Batch, rng: Generator, points: int = POINTS) -> float:
    """Mean over examples of the gradient's similarity to the true one, averaged over the way from noise to the example.

    The similarity is the mean over parameters of the cosine (0 where one is zero); the average is the trapezium rule's.
    """

    def similarities(x: Tensor, y: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=rng).to(x)
        part = torch.linspace(0, 1, points + 1).to(x).view(-1, *[1] * x.dim())
        way = (1 - part) * noise + part * x
        policies = vmap(lambda at: compute(params, Batch(at[None], y[None]), None))(way)
        return torch.stack([_cosines(t.flatten(1)) for t in policies.values()]).mean(0)

    each = [torch.trapezoid(similarities(x, y)) / points for x, y in zip(*batch, strict=True)]
    return float(torch.stack(each).mean())


def _cosines(rows: Tensor) -> Tensor:
    """The cosine of each row with the last."""
    unit = F.normalize(rows.double(), dim=1)
    return unit @ unit[-1]


def accuracy(model: nn.Module, x: Tensor) -> float:
    """How differently a network responds to different (normalised) images x: the score of Mellor et al. (2020).

    -sum(log(v + k) + 1 / (v + k)) over the eigenvalues v of the correlation matrix of d(sum of the logits) / dx; -inf if one
    image's derivative is constant, so that it has no correlation.
    """
    at = x.detach().clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(at).sum(), at)
    correlation = slopes.flatten(1).double().corrcoef()
    if not torch.isfinite(correlation).all():
        return -math.inf
    values = torch.linalg.eigvalsh(correlation).clamp_min(0) + OFFSET
    return -float((values.log() + 1 / values).sum())


def candidates(count: int, rng: Generator) -> list[Policy]:
    """Different random policies: each of three slots holds one of the operations, or rarely none [code]."""
    most = sum(len(OPERATIONS) ** n for n in range(1, MAX_OPERATIONS + 1))
    if not 1 <= count <= most:
        raise ValueError(f"there are {most} policies of at most {MAX_OPERATIONS} operations, got --candidates {count}")
    policies: dict[Policy, None] = {}
    while len(policies) < count:
        places = torch.randint(-1, len(OPERATIONS), (MAX_OPERATIONS,), generator=rng).tolist()
        if policy := tuple(number for number in places if number >= 0):
            policies[policy] = None
    return list(policies)


def search(
    scorer: PolicyScorer, policies: Sequence[Policy], threshold: float = THRESHOLD, seed: int = 0
) -> list[ScoredPolicy]:
    """The policies whose accuracy score reaches the threshold, the most private first."""
    scored = [scorer.score(policy, seed) for policy in policies]
    return sorted((s for s in scored if s.accuracy >= threshold), key=lambda s: s.privacy)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fedgauge.simulations.experiments.search_ats", description=__doc__)
    parser.add_argument("scenario", type=Path, help="gives the network and the auxiliary images")
    parser.add_argument("--candidates", type=int, default=50, help="random policies (the published code draws 1,600)")
    parser.add_argument(
        "--threshold", type=float, help="minimum accuracy score; default: that of undefended images, less a tenth"
    )
    parser.add_argument("--images", type=int, nargs=2, default=(20, 100), help="for privacy, for accuracy")
    parser.add_argument("--show", type=int, default=10, help="how many of the best to print")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scores of undefended images, of the published policies and of the best policies."""
    options = _parser().parse_args(arguments)
    try:
        scorer = PolicyScorer(Scenario.load(options.scenario).federation, tuple(options.images))
        policies = candidates(options.candidates, generator(options.seed, "candidates"))
        with one_thread():
            bare = scorer.score((), options.seed)
            threshold = bare.accuracy - abs(bare.accuracy) / 10 if options.threshold is None else options.threshold
            known = [scorer.score(policy, options.seed) for policy in ((7, 4, 15), (21, 13, 3))]
            best = search(scorer, policies, threshold, options.seed)
    except (SpecError, ValueError, OSError) as error:
        print(f"search_ats: {error}", file=sys.stderr)
        return 2
    print(f"{len(best)} of {len(policies)} policies have an accuracy score of {threshold:.1f} or more\n")
    print("| policy | privacy score (lower: harder to invert) | accuracy score |\n|---|---:|---:|")
    for scored in (replace(bare, policy="none"), *known, *best[: options.show]):
        print(f"| {scored.policy} | {scored.privacy:.4f} | {scored.accuracy:.1f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
