"""What benchmarks attack, and how they grade it.

They attack an untrained network, and the updates of clients with a batch each. A run's grader grades what they find.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.grading.scores import Grader, has_images
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.client.chain import Chain
from fedgauge.client.data.images import Dataset
from fedgauge.client.models.vision import detached_params
from fedgauge.client.update import Batch, UpdateFn
from fedgauge.simulations.benchmarks.reporting import Figure

Network = TypeVar("Network", bound=nn.Module)


def untrained(make: Callable[[], Network], seed: int = 0) -> Network:
    """A network in eval mode with the initial weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def known_of(
    model: nn.Module,
    links: Chain,
    data: Dataset,
    batch_size: int = 1,
    auxiliary: Batch | None = None,
    labels: Tensor | None = None,
) -> Knowledge:
    """What the server knows; by default it has no public examples, and restores the labels."""
    return Knowledge(model, links, data.shape, data.classes, batch_size, data.mean, data.std, labels, auxiliary)


def singles(batch: Batch) -> list[Batch]:
    """A batch's examples as batches of one."""
    return [Batch(batch.x[[k]], batch.y[[k]]) for k in range(len(batch.y))]


def observed(known: Knowledge, batches: Sequence[Batch], client: UpdateFn | None = None) -> Wave:
    """The updates of clients that hold a batch each.

    Args:
        client: what they compute; default: what the server takes them to compute.
    """
    params, compute = detached_params(known.model), client or known.forward
    updates = [{name: t.detach() for name, t in compute(params, batch, None).items()} for batch in batches]
    return Wave.stack([Observation(1, k, params, update) for k, update in enumerate(updates)])


@dataclass(frozen=True, eq=False)
class GradedImages:
    """Reconstructions of clients' images, with the grades that a run would give them.

    Args:
        found, truth: of each client.
    """

    found: Sequence[Reconstruction]
    truth: Sequence[Batch]
    data: Dataset

    def values(self, metric: str) -> list[float]:
        """A metric of each image that came back, uncapped; an attack that failed has none."""
        grader = self._grader(metric)
        pairs = zip(self.found, self.truth, strict=True)
        rows = [row for found, truth in pairs for row in grader.grade("", 0, 0, found, truth)[1]]
        return [row.value for row in rows if row.metric == metric and row.value is not None]

    @cached_property
    def psnr(self) -> list[float]:
        """PSNR of each image that came back, as it counts in a mean."""
        grader = self._grader("psnr")
        return [v for found, truth in zip(self.found, self.truth, strict=True) for v in grader.leaked(found, truth)]

    @property
    def lost(self) -> str:
        """How many images did not come back, and why the first did not; empty if all did."""
        count = sum(len(batch.y) for batch in self.truth) - len(self.psnr)
        images = "its images are not finite"
        reasons = [r.reason or (r.status if r.x is None else images) for r in self.found if not has_images(r.x)]
        return f"{count} lost: {(reasons or ['the attack gave fewer images'])[0]}" if count else ""

    def mean_psnr(self, name: str, where: str = "") -> Figure:
        """The mean PSNR, with the best, the worst and what was lost in its note; no value if nothing came back."""
        values = self.psnr
        parts = [f"n = {len(values)}{where}"]
        parts += [f"best {max(values):.1f}", f"worst {min(values):.1f}"] if values else []
        note = ", ".join([*parts, self.lost] if self.lost else parts)
        return Figure(f"{name}: mean PSNR", mean(values) if values else None, "dB", note=note)

    def _grader(self, metric: str) -> Grader:
        return Grader(ImageModality(self.data), self.data.x[:0], {metric})
