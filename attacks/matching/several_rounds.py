"""Several rounds at once: matches one batch to all updates that a client computed from it under several models.

A client's noise is drawn anew in every round and the batch stays, so the information adds up. Rounds with other examples
would distort the image. So each round is weighted by how well the image explains it (Geman and McClure's weight).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from fedgauge.attacks import label_restoration as labelling
from fedgauge.attacks.base import (
    Budget,
    ClientState,
    Knowledge,
    Reconstruction,
    StatefulAttack,
    Status,
    Streams,
    Wave,
    not_applicable,
)
from fedgauge.attacks.engine.compatibility import differentiation_of
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.engine.gradient_distances import Distance, likelihood
from fedgauge.attacks.matching.priors import total_variation
from fedgauge.attacks.matching.recipes import CUTS
from fedgauge.client.components import Count, NotNegative
from fedgauge.client.update import Batch

ALONE = 0.25  # share of the iterations on the newest round alone, before the others count
CHECK_EVERY = 25  # iterations between two updates of the rounds' weights
NEAR = 8.0  # a round's weight is a quarter if its distance exceeds the newest one's by this factor, and less beyond
FLOOR = 1e-3  # of a distance: an exact match of the newest round must not silence the others


@dataclass(frozen=True)
class several_rounds(StatefulAttack):
    """Inverting Gradients on a client's last rounds together: weighted cosine distances, and total variation.

    It needs clients that train on the same examples in several rounds, for example shards of one batch.

    Args:
        most: remembered rounds of a client, >= 1; each costs a model and an update on disk, and a gradient in each step.
        tv, rate: as in inverting_gradients.
    """

    most: Count = 8
    tv: NotNegative = 0.01
    rate: NotNegative = 0.1

    def advance(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams, memories: Sequence[ClientState]
    ) -> tuple[list[Reconstruction], list[ClientState]]:
        met = [[*_recalled(memory), wave.of([k])][-self.most :] for k, memory in enumerate(memories)]
        kept = [_remembered(rounds) for rounds in met]
        try:
            parts = [self._agreeing(k, known, rounds) for k, rounds in enumerate(met)]
            way = differentiation_of(known, wave.params, one_pass=False)
        except ValueError as error:
            return not_applicable(wave, str(error)), kept
        known = replace(known, plain=True) if way.route == "loop" else known
        # searches run one after the other, so each gets an equal share of the wave's seconds
        share = budget.seconds and budget.seconds / (len(wave) * budget.restarts)
        found = []
        with way():
            for own, (rounds, y), stream in zip(met, parts, streams, strict=True):
                ends = []
                for i in range(budget.restarts):
                    clock = Deadline(share)
                    ends.append(self._search(rounds, len(own), y, known, budget.iterations, clock, stream("start", i)))
                found.append(min(ends, key=lambda r: r.objective if r.objective == r.objective else torch.inf))
        return found, kept

    def _agreeing(self, k: int, known: Knowledge, rounds: Sequence[Wave]) -> tuple[Sequence[Wave], Tensor]:
        """The rounds with the newest one's labels, and these labels (B,): other batches often have others.

        Under noise, restored labels are sometimes wrong, so the labels that most rounds give count for all.
        """
        if known.labels is not None:
            return rounds, known.labels[k]
        restored = [tuple(labelling.restore(one, known)[0].tolist()) for one in rounds]
        update_distribution = known.chain.update_distribution
        if update_distribution is not None and update_distribution.noisy:
            return rounds, torch.tensor(max(reversed(restored), key=restored.count), device=rounds[-1].device)
        agreeing = [one for one, y in zip(rounds, restored, strict=True) if y == restored[-1]]
        return agreeing, torch.tensor(restored[-1], device=rounds[-1].device)

    def _search(
        self, rounds: Sequence[Wave], met: int, y: Tensor, known: Knowledge, iterations: int, clock: Deadline,
        rng: Generator,
    ) -> Reconstruction:  # fmt: skip
        # in the model's input units, like the other attacks
        start = torch.randn((known.batch_size, *known.shape), generator=rng)
        z = start.to(next(iter(rounds[-1].params.values()))).requires_grad_()
        low, high = (known.normalise(torch.full(known.shape, bound)).to(z) for bound in (known.low, known.high))
        noise, smooth = known.chain.update_distribution, total_variation(self.tv).bind(known, rounds[-1].params)
        # noise averages out over the rounds, for which a cosine does as well
        distance = likelihood(noise and replace(noise, sigma=0.0, scale=0.0), known.batch_size)
        adam = torch.optim.Adam([z], self.rate)
        schedule = torch.optim.lr_scheduler.MultiStepLR(adam, [int(cut * iterations) for cut in CUTS])
        weights = torch.tensor([0.0] * (len(rounds) - 1) + [1.0])
        spent, objective = 0, torch.tensor(torch.nan)
        while spent < iterations and not (spent and clock.over()):
            if spent >= ALONE * iterations and spent % CHECK_EVERY == 0:
                apart = torch.stack([_misfit(r, z.detach(), y, known, distance) for r in rounds])
                scale = NEAR * apart[-1].clamp(min=FLOOR)
                # near 1 if a round is no farther than the newest, falling to 0
                weights = (scale / (scale + (apart - apart[-1]).clamp(min=0))).square()
            misfits = [w * _misfit(r, z, y, known, distance) for r, w in zip(rounds, weights, strict=True) if w > 0]
            objective = torch.stack(misfits).sum() / weights.sum() + self.tv * smooth(z)
            # of z alone: backward() would also enter functions whose author gave a first derivative only
            (z.grad,) = torch.autograd.grad(objective, z, materialize_grads=True)
            if not bool(z.grad.isfinite().all()):
                reason = "the gradient is not finite"
                return Reconstruction(None, y, float(objective.detach()), spent, 0.0, "diverged", reason)
            z.grad.sign_()
            adam.step()
            schedule.step()
            with torch.no_grad():
                z.clamp_(low, high)
            spent += 1
        x, reason = known.examples(z.detach()), f"{int((weights > 0.5).sum())} of {met} rounds agree"
        status: Status = "converged"
        if spent < iterations:
            status, reason = "out_of_budget", f"{spent} of {iterations} iterations when the seconds were over; {reason}"
        return Reconstruction(x, y, float(objective.detach()), spent, 0.0, status, reason)


def _misfit(one: Wave, z: Tensor, y: Tensor, known: Knowledge, distance: Distance) -> Tensor:
    return distance(one.alone(0), known.forward(one.params, Batch(known.pixels(z), y), None))


def _remembered(rounds: Sequence[Wave]) -> ClientState:
    kept: dict[str, Tensor] = {"rounds": torch.tensor(len(rounds))}
    for i, one in enumerate(rounds):
        for part, tensors in (("params", one.params), ("update", one.alone(0))):
            kept |= {f"{i}/{part}/{name}": t for name, t in tensors.items()}
    return kept


def _recalled(memory: ClientState) -> list[Wave]:
    def part(i: int, kind: str) -> dict[str, Tensor]:
        prefix = f"{i}/{kind}/"
        return {name.removeprefix(prefix): t for name, t in memory.items() if name.startswith(prefix)}

    stored = [(part(i, "params"), part(i, "update")) for i in range(int(memory.get("rounds", 0)))]
    return [Wave(0, (0,), params, {k: t[None] for k, t in update.items()}) for params, update in stored]
