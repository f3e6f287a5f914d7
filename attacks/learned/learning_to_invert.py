"""Learning To Invert: a network trained to map updates to images (Wu, Chen, Guo & Weinberger, UAI 2023).

It is trained on simulated updates of auxiliary images through the clients' own chain, so that it adapts to each defense. One
network serves all clients of a round; the next round's starts from its weights, since the model has changed only a little.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks import labels as labelling
from fedgauge.attacks.base import (
    Budget,
    ClientState,
    Knowledge,
    Reconstruction,
    StatefulAttack,
    Stream,
    Wave,
    not_applicable,
)
from fedgauge.attacks.engine.cache import TensorCache, digest
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.learned.refinement import refine
from fedgauge.attacks.learned.ridge import inverter_answer, ridge_inversion
from fedgauge.attacks.learned.shadow_updates import ShadowDataset, ShadowTrainer, UpdateFeatures, flat
from fedgauge.client.components import check_above_zero, check_at_least, check_part
from fedgauge.client.pairing import assigned
from fedgauge.client.rng import generator, seed_of

SAVED = 60.0  # seconds between two checkpoints
NOTHING = torch.zeros(16, dtype=torch.uint8)
ENUMERATED = 5  # images up to which all pairings (120) are tried at once


@dataclass(frozen=True)
class learning_to_invert(StatefulAttack):
    """The published multilayer perceptron, or refined ridge inversion; the budget's iterations are Adam's steps.

    For the published one, a client's state is the network last used for it (`inverter`, a name in the tensor cache). Its
    training ends early if the error on held-out auxiliary images has not fallen for `patience` epochs; the best epoch's
    weights are used.

    Args:
        architecture: published: the perceptron. refined: ridge inversion in closed form, whose answers are then optimised
            under the chain's likelihood and the auxiliary images' normal density (attacks/learned/refinement.py); of the
            arguments below it uses only buckets (signed) and passes, and it keeps no state.
        hidden: units of each hidden layer; 3,000 for one image and 10,000 for four in the paper. layers: their number,
            including the output layer.
        batch, rate: of Adam; the rate is divided by ten at 3/4 of the steps.
        by_label: invert one image at a time, by its restored label, instead of all at once with the best matching.
        buckets, signed: of feature hashing; 0 buckets: none. The paper uses no signs.
        passes: how often each auxiliary image is grouped with others, for batches of several.
        again: the share of the steps taken when training starts from the previous round's network.
    """

    architecture: Literal["published", "refined"] = "published"
    hidden: int = 3000
    layers: int = 3
    batch: int = 256
    rate: float = 1e-4
    patience: int = 10
    by_label: bool = False
    buckets: int = 0
    signed: bool = False
    passes: int = 1
    again: float = 0.25

    def __post_init__(self) -> None:
        check_at_least(self, 1, "hidden", "layers", "batch", "patience", "passes")
        check_at_least(self, 0, "buckets")
        check_above_zero(self, "rate")
        if self.architecture not in (kinds := ("published", "refined")):
            raise ValueError(f"architecture must be one of {', '.join(kinds)}, got {self.architecture!r}")
        check_part(self, "again")

    trains_first = True

    def initial(self) -> ClientState:
        return {"inverter": NOTHING.clone()}

    def advance(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream], memories: Sequence[ClientState]
    ) -> tuple[list[Reconstruction], list[ClientState]]:
        if self.architecture == "refined":
            linear = ridge_inversion(buckets=self.buckets, passes=self.passes)
            return refine(wave, known, budget, linear), list(memories)
        clock = Deadline(time.perf_counter(), budget.seconds)
        try:
            labels = self._labels(wave, known)
            shadow = ShadowTrainer(
                known, wave.params, UpdateFeatures(self.by_label, self.buckets, self.signed), self.passes
            )
            parents = [_name(memory["inverter"]) for memory in memories]
            made = {
                parent: ImageInverterTraining(self, shadow, budget, parent).inverter(clock)
                for parent in sorted(set(parents))
            }
            rows = shadow.view.rows(known, wave.update, labels) if self.by_label else self._rows(shadow.view, wave)
        except ValueError as error:
            return not_applicable(wave, str(error)), list(memories)
        found = []
        for k, part in enumerate(rows.view(len(wave), -1, rows.shape[1])):
            x = made[parents[k]](part).view(known.batch_size, *known.shape)
            found.append(
                made[parents[k]].with_training_note(
                    inverter_answer(x, labels[k] if labels.numel() else None, *made[parents[k]].spent)
                )
            )
        return found, [{"inverter": _stored(made[parent].name)} for parent in parents]

    def _labels(self, wave: Wave, known: Knowledge) -> Tensor:
        """Restored labels (K, B), ascending; (K, 0) if they cannot be restored and the network does not need them."""
        try:
            return labelling.restore(wave, known).sort(1).values
        except ValueError:
            if self.by_label:
                raise
            return torch.zeros(len(wave), 0, dtype=torch.int64)

    def _rows(self, view: UpdateFeatures, wave: Wave) -> Tensor:
        return view.hashed(flat(wave.update))

    def network(self, columns: int, outputs: int, seed: int) -> nn.Sequential:
        """An untrained network with torch's initial weights."""
        widths = [columns, *[self.hidden] * (self.layers - 1), outputs]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parts: list[nn.Module] = []
            for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
                parts += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return nn.Sequential(*parts[:-1], nn.Sigmoid())


@dataclass(frozen=True, eq=False)
class ImageInverter:
    """A trained network.

    Args:
        name: in the tensor cache.
        error: mean squared error on held-out auxiliary images.
        steps: taken in training; planned: the maximum; interrupted: whether the deadline ended training.
    """

    name: str
    network: nn.Sequential
    error: float
    steps: int
    planned: int
    interrupted: bool

    def __call__(self, rows: Tensor) -> Tensor:
        """Outputs (n, outputs) in [0, 1] for rows (n, columns)."""
        with torch.no_grad():
            outputs: Tensor = self.network(rows)
        return outputs

    @property
    def spent(self) -> tuple[float, int]:
        return self.error, self.steps

    def with_training_note(self, result: Reconstruction) -> Reconstruction:
        """A reconstruction by this network, marked out_of_budget if its training was interrupted."""
        if not self.interrupted or result.status != "converged":
            return result
        reason = f"{self.steps} of {self.planned} steps of training when the seconds were over"
        return Reconstruction(result.x, result.y, result.objective, result.iterations, 0.0, "out_of_budget", reason)


@dataclass(frozen=True, eq=False)
class ImageInverterTraining:
    """The training of one inverter; a killed training continues from its last checkpoint.

    Args:
        parent: the name of the network to start from; empty, or no longer in the cache: it starts from scratch.
    """

    attack: learning_to_invert
    shadow: ShadowTrainer
    budget: Budget
    parent: str

    @property
    def name(self) -> str:
        return digest(self.shadow.key, self.attack, self.budget, self.parent)

    @property
    def cache(self) -> TensorCache:
        return self.shadow.cache

    def inverter(self, clock: Deadline) -> ImageInverter:
        """The trained inverter, from the cache or trained now."""
        kept = self.cache.get(f"inverter-{self.name}", lambda: self._train(clock))
        network = self._network(kept)
        numbers = {k: int(kept[f"n {k}"]) for k in ("steps", "planned")}
        return ImageInverter(
            self.name, network, float(kept["n error"]), interrupted=bool(kept["n interrupted"]), **numbers
        )

    def _network(self, weights: dict[str, Tensor] | None) -> nn.Sequential:
        view, known = self.shadow.view, self.shadow.known
        outputs = known.shape[0] * known.shape[1] * known.shape[2] * (1 if view.by_label else known.batch_size)
        network = self.attack.network(view.columns(self.shadow.entries), outputs, seed_of("inverter", self.name))
        network = network.to(next(iter(self.shadow.params.values())))
        if weights is not None:
            network.load_state_dict({k: weights[f"w {k}"] for k in network.state_dict()})
        return network

    def _begun(self) -> tuple[nn.Sequential, bool]:
        """The network at the start of training, and whether it is the parent's; ValueError if that has another batch size."""
        fresh = self._network(None)
        kept = self.cache.read(f"inverter-{self.parent}") if self.parent else None
        size = self.shadow.known.batch_size
        if kept is not None and (trained := int(kept.get("n images", torch.tensor(size)))) != size:
            raise ValueError(
                f"the inverter of the previous round was trained on batches of {trained}, and these updates are of "
                f"batches of {size}: an inverter serves one batch size, so attack them as a new client"
            )
        fits = kept is not None and all(
            f"w {k}" in kept and kept[f"w {k}"].shape == t.shape for k, t in fresh.state_dict().items()
        )
        return (self._network(kept), True) if fits else (fresh, False)

    def _train(self, clock: Deadline) -> dict[str, Tensor]:
        network, warm = self._begun()
        planned = max(1, round(self.budget.iterations * (self.attack.again if warm else 1.0)))
        trainer = Trainer(network, self.attack.rate, self.attack.patience, planned)
        sigma = final_noise_std(self.shadow)
        shadow_data, held = self.shadow.shadow_data(False, quiet=sigma > 0), self.shadow.shadow_data(True)
        part = f"training-{self.name}"
        if (saved := self.cache.read(part)) is not None:
            trainer.restore(saved)
        trainer.record_error(self._error(network, held))
        saved_at = time.perf_counter()
        for rows, groups in batches(self.shadow, shadow_data, sigma, self.attack.batch, self.name, trainer.step):
            if trainer.done or clock.over():
                break
            trainer.train_step(rows, self._truth(groups))
            if trainer.step % steps_per_epoch(shadow_data, self.attack.batch) == 0 or trainer.done:
                trainer.record_error(self._error(network, held))
            if time.perf_counter() - saved_at > SAVED:
                self.cache.put(part, trainer.saved())
                saved_at = time.perf_counter()
        if not trainer.done:
            trainer.record_error(self._error(network, held))
        self.cache.drop(part)
        numbers = {"error": trainer.lowest, "steps": trainer.step, "planned": planned, "interrupted": not trainer.done}
        numbers["images"] = self.shadow.known.batch_size
        return {**trainer.best, **{f"n {k}": torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}}

    def _truth(self, groups: Tensor) -> Tensor:
        """The images (n, images, d)."""
        return self.shadow.auxiliary.x[groups].flatten(2)

    def _error(self, network: nn.Sequential, held: ShadowDataset) -> float:
        images = held.groups.reshape(len(held.rows), -1)
        with torch.no_grad():
            return float(matched_error(network(held.rows), self._truth(images)))


def steps_per_epoch(shadow_data: ShadowDataset, size: int) -> int:
    """Steps of an epoch with batches of this size."""
    return -(-len(shadow_data.rows) // size)


def batches(
    shadow: ShadowTrainer, shadow_data: ShadowDataset, sigma: float, size: int, name: str, first: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless rows and image numbers (n, images) for every step from `first` on, each with its own draws.

    Args:
        sigma: of the noise that each step draws anew; name: of the training, which seeds its order.
    """
    images = shadow_data.groups.reshape(len(shadow_data.rows), -1)
    passed, step = divmod(first, steps_per_epoch(shadow_data, size))
    scale = sigma * shadow.view.noise(shadow.entries)
    while True:
        order = torch.randperm(len(images), generator=generator("order", name, passed))
        for chosen in order.split(size)[step:]:
            rows = shadow_data.rows[chosen]
            if sigma:
                draw = generator("noise", name, passed, int(chosen[0]))
                rows = rows + scale.to(rows) * torch.randn(rows.shape, generator=draw).to(rows)
            yield rows, images[chosen]
        passed, step = passed + 1, 0


class Trainer:
    """A network with the state of its training: everything in a checkpoint.

    Args:
        planned: steps; error: the loss between the network's outputs and the truth; default: matched_error.
    """

    def __init__(
        self,
        network: nn.Module,
        rate: float,
        patience: int,
        planned: int,
        error: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.network, self.rate, self.patience, self.planned = network, rate, patience, planned
        self._loss = error or matched_error
        # fused: otherwise Adam's memory traffic takes half as long as the matrix products
        self.adam = torch.optim.Adam(network.parameters(), lr=rate, fused=True)
        self.step = self.since = 0
        self.lowest = float("inf")
        self.best = self._weights()

    @property
    def done(self) -> bool:
        """Whether all steps are taken, or no epoch was better for `patience` epochs."""
        return self.step >= self.planned or self.since >= self.patience

    def train_step(self, rows: Tensor, truth: Tensor) -> None:
        """One step."""
        for group in self.adam.param_groups:
            group["lr"] = self.rate * (0.1 if 4 * self.step >= 3 * self.planned else 1.0)
        with torch.enable_grad():
            loss = self._loss(self.network(rows), truth)
            gradients = torch.autograd.grad(loss, list(self.network.parameters()))
        for p, g in zip(self.network.parameters(), gradients, strict=True):
            p.grad = g
        self.adam.step()
        self.step += 1

    def record_error(self, error: float) -> None:
        """Record the error on held-out images, and keep the weights if it is the lowest."""
        if error < self.lowest:
            self.lowest, self.best, self.since = error, self._weights(), 0
        else:
            self.since += 1

    def _weights(self) -> dict[str, Tensor]:
        return {f"w {k}": t.detach().clone() for k, t in self.network.state_dict().items()}

    def saved(self) -> dict[str, Tensor]:
        """A checkpoint of the training."""
        state = self.adam.state_dict()["state"]
        moments = {f"m {i} {k}": t for i, kept in state.items() for k, t in kept.items()}
        now = {k.replace("w ", "now ", 1): t for k, t in self._weights().items()}
        numbers = torch.tensor([self.step, self.since, self.lowest], dtype=torch.float64)
        return {**self.best, **now, **moments, "numbers": numbers}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Continue from a checkpoint."""
        self.network.load_state_dict({k[4:]: t for k, t in saved.items() if k.startswith("now ")})
        self.best = {k: t for k, t in saved.items() if k.startswith("w ")}
        state: dict[int, dict[str, Tensor]] = {}
        for key, t in saved.items():
            if key.startswith("m "):
                _, place, moment = key.split(" ")
                state.setdefault(int(place), {})[moment] = t
        self.adam.load_state_dict({**self.adam.state_dict(), "state": state})
        step, since, self.lowest = saved["numbers"].tolist()
        self.step, self.since = int(step), int(since)


def matched_error(found: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error between outputs (n, images * d) and images (n, images, d), under each row's best pairing."""
    found = found.view(truth.shape)
    if truth.shape[1] == 1:
        return F.mse_loss(found, truth)
    order = pairing(found.detach(), truth)
    return F.mse_loss(found.gather(1, order[:, :, None].expand_as(found)), truth)


def pairing(found: Tensor, truth: Tensor) -> Tensor:
    """For each row, the output (n, images) that belongs to each image, with the least total squared error."""
    return hungarian(torch.cdist(truth, found).square())


def hungarian(costs: Tensor) -> Tensor:
    """For each row, the output (n, images) that belongs to each image, with the least total of costs (n, images, outputs)."""
    size = costs.shape[1]
    if size <= ENUMERATED:
        orders = torch.tensor(list(permutations(range(size))), device=costs.device)
        totals = costs[:, torch.arange(size), orders].sum(2)  # (n, orders)
        return orders[totals.argmin(1)]
    return torch.stack([assigned(c) for c in costs.double().nan_to_num()]).to(costs.device)


def final_noise_std(shadow: ShadowTrainer) -> float:
    """The deviation of normal noise at the end of the chain, which each training step can draw itself; 0: other chains."""
    known = shadow.known.chain.update_distribution
    simple = known is not None and not (known.signed or known.sparse or known.scale or known.hidden)
    return known.sigma if simple and known is not None and known.shrink == 1 else 0.0


def _name(stored: Tensor) -> str:
    """A name in the tensor cache; empty for none."""
    return bytes(stored.tolist()).hex() if bool(stored.any()) else ""


def _stored(name: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(name)), dtype=torch.uint8)
