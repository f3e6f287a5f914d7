"""Learning To Invert: a network that is trained to read images off updates (Wu, Chen, Guo & Weinberger, UAI 2023).

Its lessons are simulated updates of auxiliary images behind the very chain of the clients, so that it adapts to each defense. One
network serves all clients of a round; the next round's begins with its weights, as the model has moved only a little.
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
from fedgauge.attacks.base import Budget, Knowledge, Memory, Reconstruction, Remembering, Stream, Wave, not_applicable
from fedgauge.attacks.engine.scheduler import Clock
from fedgauge.attacks.learned.cache import Shelf, digest
from fedgauge.attacks.learned.refinement import refine
from fedgauge.attacks.learned.ridge import answer, ridge_inversion
from fedgauge.attacks.learned.shadow_updates import Lessons, School, View, flat
from fedgauge.client.rng import generator, seed_of

SAVED = 60.0  # seconds between two checkpoints
NOTHING = torch.zeros(16, dtype=torch.uint8)
ENUMERATED = 5  # images up to which all pairings are tried at once: 120


@dataclass(frozen=True)
class learning_to_invert(Remembering):
    """The published multilayer perceptron, or the linear inverter with its answers refined; iterations are Adam's steps.

    The published one remembers which network met a client last (`inverter`, a name on the shelf in the cache folder). Its training
    ends early when the error on auxiliary images that are held out has not fallen for `patience` epochs; the best epoch's weights
    are used.

    Args:
        architecture: published: the perceptron. refined: ridge inversion in closed form, whose answers then descend, the chain
            and the auxiliary images' normal density deciding where to (attacks/learned/refinement.py); of what follows it reads
            buckets, which are signed, and passes alone, and it remembers nothing.
        hidden: units of each hidden layer; the paper's are 3,000 for one image and 10,000 for four. layers: all of them.
        batch, rate: of Adam; the rate is cut to a tenth at 3/4 of the steps.
        by_label: one image at a time, by its restored label, instead of all at once with the best matching.
        buckets, signed: of feature hashing; 0 buckets: none. The paper's sums have no signs.
        passes: how often each auxiliary image is grouped anew with others, for batches of several.
        again: the part of the steps that is taken where there is a network of the round before to begin with.
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
        whole = {"hidden": 1, "layers": 1, "batch": 1, "patience": 1, "passes": 1, "buckets": 0}
        for name, least in whole.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.architecture not in (kinds := ("published", "refined")):
            raise ValueError(f"architecture must be one of {', '.join(kinds)}, got {self.architecture!r}")
        if not self.rate > 0:
            raise ValueError(f"rate must be above 0, got {self.rate}")
        if not 0 < self.again <= 1:
            raise ValueError(f"again must be above 0 and at most 1, got {self.again}")

    def initial(self) -> Memory:
        return {"inverter": NOTHING.clone()}

    def advance(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream], memories: Sequence[Memory]
    ) -> tuple[list[Reconstruction], list[Memory]]:
        if self.architecture == "refined":
            linear = ridge_inversion(buckets=self.buckets, passes=self.passes)
            return refine(wave, known, budget, linear), list(memories)
        clock = Clock(time.perf_counter(), budget.seconds)
        try:
            labels = self._labels(wave, known)
            school = School(known, wave.params, View(self.by_label, self.buckets, self.signed), self.passes)
            parents = [_name(memory["inverter"]) for memory in memories]
            made = {parent: Training(self, school, budget, parent).inverter(clock) for parent in sorted(set(parents))}
            rows = school.view.rows(known, wave.update, labels) if self.by_label else self._rows(school.view, wave)
        except ValueError as error:
            return not_applicable(wave, str(error)), list(memories)
        found = []
        for k, part in enumerate(rows.view(len(wave), -1, rows.shape[1])):
            x = made[parents[k]](part).view(known.batch_size, *known.shape)
            found.append(
                made[parents[k]].told(answer(x, labels[k] if labels.numel() else None, *made[parents[k]].spent))
            )
        return found, [{"inverter": _stored(made[parent].name)} for parent in parents]

    def _labels(self, wave: Wave, known: Knowledge) -> Tensor:
        """Restored labels (K, B), ascending; (K, 0) where the network does without and they cannot be restored."""
        try:
            return labelling.restore(wave, known).sort(1).values
        except ValueError:
            if self.by_label:
                raise
            return torch.zeros(len(wave), 0, dtype=torch.int64)

    def _rows(self, view: View, wave: Wave) -> Tensor:
        return view.hashed(flat(wave.update))

    def network(self, columns: int, outputs: int, seed: int) -> nn.Sequential:
        """Untrained, as torch initialises it."""
        widths = [columns, *[self.hidden] * (self.layers - 1), outputs]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parts: list[nn.Module] = []
            for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
                parts += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return nn.Sequential(*parts[:-1], nn.Sigmoid())


@dataclass(frozen=True, eq=False)
class Inverter:
    """A trained network.

    Args:
        name: on the shelf.
        error: mean squared error on auxiliary images that were held out.
        steps: that it took; planned: those that it might have; interrupted: whether the clock ended it.
    """

    name: str
    network: nn.Sequential
    error: float
    steps: int
    planned: int
    interrupted: bool

    def __call__(self, rows: Tensor) -> Tensor:
        """(n, outputs) in [0, 1] of rows (n, columns)."""
        with torch.no_grad():
            found: Tensor = self.network(rows)
        return found

    @property
    def spent(self) -> tuple[float, int]:
        return self.error, self.steps

    def told(self, found: Reconstruction) -> Reconstruction:
        """A reconstruction by it, with how its training ended."""
        if not self.interrupted or found.status != "converged":
            return found
        reason = f"{self.steps} of {self.planned} steps of training when its seconds were over"
        return Reconstruction(found.x, found.y, found.objective, found.iterations, 0.0, "out_of_budget", reason)


@dataclass(frozen=True, eq=False)
class Training:
    """The training of one inverter; where it was killed, it goes on from its last checkpoint.

    Args:
        parent: the name of the network that it begins with; empty, or no longer on the shelf: it begins anew.
    """

    attack: learning_to_invert
    school: School
    budget: Budget
    parent: str

    @property
    def name(self) -> str:
        return digest(self.school.key, self.attack, self.budget, self.parent)

    @property
    def shelf(self) -> Shelf:
        return self.school.shelf

    def inverter(self, clock: Clock) -> Inverter:
        """Trained now, unless it was before."""
        kept = self.shelf.get(f"inverter-{self.name}", lambda: self._train(clock))
        network = self._network(kept)
        numbers = {k: int(kept[f"n {k}"]) for k in ("steps", "planned")}
        return Inverter(self.name, network, float(kept["n error"]), interrupted=bool(kept["n interrupted"]), **numbers)

    def _network(self, weights: dict[str, Tensor] | None) -> nn.Sequential:
        view, known = self.school.view, self.school.known
        outputs = known.shape[0] * known.shape[1] * known.shape[2] * (1 if view.by_label else known.batch_size)
        network = self.attack.network(view.columns(self.school.entries), outputs, seed_of("inverter", self.name))
        network = network.to(next(iter(self.school.params.values())))
        if weights is not None:
            network.load_state_dict({k: weights[f"w {k}"] for k in network.state_dict()})
        return network

    def _begun(self) -> tuple[nn.Sequential, bool]:
        """The network as training begins, and whether it is the parent's; ValueError where that is for batches of another size."""
        fresh = self._network(None)
        kept = self.shelf.read(f"inverter-{self.parent}") if self.parent else None
        size = self.school.known.batch_size
        if kept is not None and (trained := int(kept.get("n images", torch.tensor(size)))) != size:
            raise ValueError(
                f"the inverter of the round before was trained on batches of {trained}, and these updates are of "
                f"batches of {size}: an inverter serves one batch size, so attack them as a client that was never met"
            )
        fits = kept is not None and all(
            f"w {k}" in kept and kept[f"w {k}"].shape == t.shape for k, t in fresh.state_dict().items()
        )
        return (self._network(kept), True) if fits else (fresh, False)

    def _train(self, clock: Clock) -> dict[str, Tensor]:
        network, warm = self._begun()
        planned = max(1, round(self.budget.iterations * (self.attack.again if warm else 1.0)))
        pupil = Pupil(network, self.attack.rate, self.attack.patience, planned)
        sigma = fresh_noise(self.school)
        lessons, held = self.school.lessons(False, quiet=sigma > 0), self.school.lessons(True)
        part = f"training-{self.name}"
        if (saved := self.shelf.read(part)) is not None:
            pupil.restore(saved)
        pupil.look(self._error(network, held))
        saved_at = time.perf_counter()
        for rows, groups in batches(self.school, lessons, sigma, self.attack.batch, self.name, pupil.step):
            if pupil.done or clock.over():
                break
            pupil.learn(rows, self._truth(groups))
            if pupil.step % epoch(lessons, self.attack.batch) == 0 or pupil.done:
                pupil.look(self._error(network, held))
            if time.perf_counter() - saved_at > SAVED:
                self.shelf.put(part, pupil.saved())
                saved_at = time.perf_counter()
        if not pupil.done:
            pupil.look(self._error(network, held))
        self.shelf.drop(part)
        numbers = {"error": pupil.lowest, "steps": pupil.step, "planned": planned, "interrupted": not pupil.done}
        numbers["images"] = self.school.known.batch_size
        return {**pupil.best, **{f"n {k}": torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}}

    def _truth(self, groups: Tensor) -> Tensor:
        """(n, images, d)."""
        return self.school.auxiliary.x[groups].flatten(2)

    def _error(self, network: nn.Sequential, held: Lessons) -> float:
        images = held.groups.reshape(len(held.rows), -1)
        with torch.no_grad():
            return float(matched_error(network(held.rows), self._truth(images)))


def epoch(lessons: Lessons, size: int) -> int:
    """Steps of an epoch, in batches of a size."""
    return -(-len(lessons.rows) // size)


def batches(
    school: School, lessons: Lessons, sigma: float, size: int, name: str, first: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and image numbers (n, images) of every step from a first one on, without end; each has its own draws.

    Args:
        sigma: of the noise that each step draws anew; name: of the training, from which its order follows.
    """
    images = lessons.groups.reshape(len(lessons.rows), -1)
    passed, step = divmod(first, epoch(lessons, size))
    scale = sigma * school.view.noise(school.entries)
    while True:
        order = torch.randperm(len(images), generator=generator("order", name, passed))
        for chosen in order.split(size)[step:]:
            rows = lessons.rows[chosen]
            if sigma:
                draw = generator("noise", name, passed, int(chosen[0]))
                rows = rows + scale.to(rows) * torch.randn(rows.shape, generator=draw).to(rows)
            yield rows, images[chosen]
        passed, step = passed + 1, 0


class Pupil:
    """A network with the state of its training: all that a checkpoint holds.

    Args:
        planned: steps; error: what is minimised, of the network's answers and the truth; default: matched_error.
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
        # fused: a step by itself costs as much memory traffic as half of the matrix products take time
        self.adam = torch.optim.Adam(network.parameters(), lr=rate, fused=True)
        self.step = self.since = 0
        self.lowest = float("inf")
        self.best = self._weights()

    @property
    def done(self) -> bool:
        """Whether all steps are taken, or no epoch has been better for long."""
        return self.step >= self.planned or self.since >= self.patience

    def learn(self, rows: Tensor, truth: Tensor) -> None:
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

    def look(self, error: float) -> None:
        """Take note of the error on held-out images."""
        if error < self.lowest:
            self.lowest, self.best, self.since = error, self._weights(), 0
        else:
            self.since += 1

    def _weights(self) -> dict[str, Tensor]:
        return {f"w {k}": t.detach().clone() for k, t in self.network.state_dict().items()}

    def saved(self) -> dict[str, Tensor]:
        """As a checkpoint."""
        state = self.adam.state_dict()["state"]
        moments = {f"m {i} {k}": t for i, kept in state.items() for k, t in kept.items()}
        now = {k.replace("w ", "now ", 1): t for k, t in self._weights().items()}
        numbers = torch.tensor([self.step, self.since, self.lowest], dtype=torch.float64)
        return {**self.best, **now, **moments, "numbers": numbers}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """From a checkpoint."""
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
    """Mean squared error of outputs (n, images * d) to images (n, images, d), under each row's best pairing."""
    found = found.view(truth.shape)
    if truth.shape[1] == 1:
        return F.mse_loss(found, truth)
    order = pairing(found.detach(), truth)
    return F.mse_loss(found.gather(1, order[:, :, None].expand_as(found)), truth)


def pairing(found: Tensor, truth: Tensor) -> Tensor:
    """For each row which output (n, images) belongs to each image, at the least total squared error."""
    return cheapest(torch.cdist(truth, found).square())


def cheapest(costs: Tensor) -> Tensor:
    """For each row which output (n, images) belongs to each image, at the least total of costs (n, images, outputs)."""
    size = costs.shape[1]
    if size <= ENUMERATED:
        orders = torch.tensor(list(permutations(range(size))), device=costs.device)
        totals = costs[:, torch.arange(size), orders].sum(2)  # (n, orders)
        return orders[totals.argmin(1)]
    from scipy.optimize import linear_sum_assignment

    chosen = [torch.from_numpy(linear_sum_assignment(c)[1]) for c in costs.double().nan_to_num().cpu().numpy()]
    return torch.stack(chosen).to(costs.device)


def fresh_noise(school: School) -> float:
    """The deviation of normal noise that the chain adds at its end, of which each step can draw its own; 0: not of that kind."""
    known = school.known.chain.conditional
    simple = known is not None and not (known.signed or known.sparse or known.scale or known.hidden)
    return known.sigma if simple and known is not None and known.shrink == 1 else 0.0


def _name(stored: Tensor) -> str:
    """A name on the shelf, empty for none."""
    return bytes(stored.tolist()).hex() if bool(stored.any()) else ""


def _stored(name: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(name)), dtype=torch.uint8)
