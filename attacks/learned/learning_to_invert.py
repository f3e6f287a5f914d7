"""Learning To Invert: a network trained to map updates to images (Wu, Chen, Guo & Weinberger, UAI 2023).

It is trained on simulated updates of auxiliary images through the clients' own chain, so that it adapts to each defense. One
network serves all clients of a round; the next round's starts from its weights, since the model has changed only a little.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks import label_restoration as labelling
from fedgauge.attacks.base import (
    Budget,
    ClientState,
    Knowledge,
    Reconstruction,
    StatefulAttack,
    Streams,
    Wave,
    not_applicable,
)
from fedgauge.attacks.engine.cache import digest
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.learned.refinement import refine
from fedgauge.attacks.learned.ridge import ridge_inversion
from fedgauge.attacks.learned.shadow_updates import ShadowTrainer, UpdateFeatures
from fedgauge.attacks.learned.trainer import TrainingRecord, load, perceptron, seeded, train_inverter
from fedgauge.client.components import Count, Natural, Positive, Share
from fedgauge.client.psnr import assigned

ENUMERATED = 5  # images up to which all pairings (120) are tried at once


@dataclass(frozen=True)
class learning_to_invert(StatefulAttack):
    """The published multilayer perceptron, or refined ridge inversion; the budget's iterations are Adam's steps.

    For the published one, a client's state is the network last used for it (`inverter`, a name in the tensor cache). Its
    training ends early if the error on held-out auxiliary images has not fallen for `patience` epochs; the best epoch's
    weights are used.

    Args:
        architecture: published: the perceptron. refined: ridge inversion in closed form, then an optimisation of its answers
            under the chain's likelihood and the auxiliary images' normal density (attacks/learned/refinement.py). It uses
            only buckets (signed) and passes of the arguments below, and keeps no state.
        hidden: units of each hidden layer; 3,000 for one image and 10,000 for four in the paper. layers: their number,
            including the output layer.
        batch, rate: of Adam; the rate is divided by ten at 3/4 of the steps.
        by_label: invert one image at a time, by its restored label, instead of all at once with the best matching.
        buckets, signed: of feature hashing; 0 buckets: none. The paper uses no signs.
        passes: how often each auxiliary image is grouped with others, for batches of several.
        again: the share of the steps taken when training starts from the previous round's network.
    """

    architecture: Literal["published", "refined"] = "published"
    hidden: Count = 3000
    layers: Count = 3
    batch: Count = 256
    rate: Positive = 1e-4
    patience: Count = 10
    by_label: bool = False
    buckets: Natural = 0
    signed: bool = False
    passes: Count = 1
    again: Share = 0.25

    trains_first = True

    def advance(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams, memories: Sequence[ClientState]
    ) -> tuple[list[Reconstruction], list[ClientState]]:
        if self.architecture == "refined":
            linear = ridge_inversion(buckets=self.buckets, passes=self.passes)
            return refine(wave, known, budget, linear), list(memories)
        clock = Deadline(budget.seconds)
        try:
            labels = self._labels(wave, known)
            shadow = ShadowTrainer(
                known, wave.params, UpdateFeatures(self.by_label, self.buckets, self.signed), self.passes
            )
            parents = [bytes(memory["inverter"].tolist()).hex() if memory else "" for memory in memories]
            made = {parent: self._inverter(shadow, budget, parent, clock) for parent in sorted(set(parents))}
            rows = shadow.view.rows(known, wave.update, labels)
        except ValueError as error:
            return not_applicable(wave, str(error)), list(memories)
        found = []
        for k, part in enumerate(rows.view(len(wave), -1, rows.shape[1])):
            network, record, _ = made[parents[k]]
            with torch.no_grad():
                x = network(part).view(known.batch_size, *known.shape)
            found.append(record.answer(x, labels[k] if labels.numel() else None))
        names = {
            parent: torch.tensor(list(bytes.fromhex(name)), dtype=torch.uint8) for parent, (*_, name) in made.items()
        }
        return found, [{"inverter": names[parent]} for parent in parents]

    def _inverter(
        self, shadow: ShadowTrainer, budget: Budget, parent: str, clock: Deadline
    ) -> tuple[nn.Module, TrainingRecord, str]:
        """The inverter, from the cache or trained now, and its name in the cache.

        Args:
            parent: the name of the network to start from. It starts from scratch without one, or if the network is no longer
                in the cache or was trained on batches of another size.
        """
        known, name = shadow.known, digest(shadow.key, self, budget, parent)
        outputs = math.prod(known.shape) * (1 if self.by_label else known.batch_size)
        widths = [shadow.columns, *[self.hidden] * (self.layers - 1), outputs]
        network = seeded(lambda: perceptron(widths, nn.Sigmoid()), "inverter", name)
        network = network.to(next(iter(shadow.params.values())))

        def loss(outputs: Tensor, images: Tensor) -> Tensor:
            """The mean squared error under each row's best pairing of outputs and images."""
            truth = shadow.auxiliary.x[images].flatten(2)
            found = outputs.view(truth.shape)
            if truth.shape[1] > 1:
                order = hungarian(torch.cdist(truth, found.detach()).square())
                found = found.gather(1, order[:, :, None].expand_as(found))
            return F.mse_loss(found, truth)

        def train() -> dict[str, Tensor]:
            planned = budget.iterations
            before = shadow.cache.read(f"image-inverter-{parent}") if parent else None
            if before is not None and int(before["images"]) == known.batch_size:
                load(network, before)
                planned = max(1, round(planned * self.again))
            kept = train_inverter(shadow, name, network, loss, self.batch, self.rate, self.patience, planned, clock)
            return {**kept, "images": torch.tensor(known.batch_size)}

        return network, load(network, shadow.cache.get(f"image-inverter-{name}", train)), name

    def _labels(self, wave: Wave, known: Knowledge) -> Tensor:
        """Restored labels (K, B), ascending; (K, 0) if they cannot be restored and the network does not need them."""
        try:
            return labelling.restore(wave, known).sort(1).values
        except ValueError:
            if self.by_label:
                raise
            return torch.zeros(len(wave), 0, dtype=torch.int64)


def hungarian(costs: Tensor) -> Tensor:
    """For each row, the output (n, images) that belongs to each image, with the least total of costs (n, images, outputs)."""
    size = costs.shape[1]
    if size <= ENUMERATED:
        orders = torch.tensor(list(permutations(range(size))), device=costs.device)
        totals = costs[:, torch.arange(size), orders].sum(2)  # (n, orders)
        return orders[totals.argmin(1)]
    return torch.stack([assigned(c) for c in costs.double().nan_to_num()]).to(costs.device)
