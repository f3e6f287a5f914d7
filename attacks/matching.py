"""Gradient matching: find the images whose update is the one that was seen, under a prior; recipes name the papers.

reconstruct argmin_x distance(seen, forward(x)) + tv * TV(x), for K observations x R restarts advanced together.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from attacks import labels as labelling
from attacks.base import Attack, Budget, Knowledge, Reconstruction, Status, Stream, Wave, not_applicable
from attacks.distances import Distance, cosine, squared
from attacks.optimizers import Adam, Variables, cut_rate
from attacks.priors import total_variation
from attacks.unstride import unstrided
from client.update import Batch, Params, Update

CUTS = (3 / 8, 5 / 8, 7 / 8)


@dataclass(frozen=True)
class GradientMatching(Attack):
    """The engine; its fields make the recipe.

    Args:
        distance: the likelihood term.
        tv: weight of the total variation prior, on normalised images.
        rate: learning rate, in units of normalised pixels, cut to a tenth at each of cuts.
        signed: Adam on the gradient's sign.
        box: keep pixels in [0, 1] after each step.
        labels: "restored" before matching (or given by the threat model), or "optimised" beside the image as in DLG.
    """

    distance: Distance
    tv: float = 0.0
    rate: float = 0.1
    signed: bool = True
    cuts: tuple[float, ...] = CUTS
    box: bool = True
    labels: Literal["restored", "optimised"] = "restored"

    def __post_init__(self) -> None:
        if not self.tv >= 0:
            raise ValueError(f"tv must not be negative, got {self.tv}")
        if not self.rate > 0:
            raise ValueError(f"rate must be above 0, got {self.rate}")

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        started = time.perf_counter()
        if reason := self._refuse(known):
            return not_applicable(wave, reason)
        soft = self.labels == "optimised" and known.labels is None
        try:
            y = None if soft else labelling.restore(wave, known)  # (K, B)
        except ValueError as error:
            return not_applicable(wave, str(error))
        variables = self._start(known, budget, streams, soft)
        spent = self._descend(variables, y, wave, known, budget, started)
        with torch.no_grad():
            objectives = self._objectives(variables, y, wave, known)  # (K, R)
        objectives = torch.where(objectives.isfinite(), objectives, torch.inf)
        seconds = (time.perf_counter() - started) / len(wave)
        results = []
        for k, best in enumerate(objectives.argmin(1).tolist()):
            x = known.pixels(variables["x"][k, best]).clamp(0, 1)
            guess = variables["y"][k, best].argmax(1) if y is None else y[k]
            objective = float(objectives[k, best])
            status: Status = "converged" if spent == budget.iterations else "out_of_budget"
            if not torch.isfinite(objectives[k, best]) or not torch.isfinite(x).all():
                status = "diverged"
            reasons = {
                "out_of_budget": f"{spent} of {budget.iterations} iterations in {budget.seconds} s",
                "diverged": "the objective or the image is not finite",
            }
            reason = reasons.get(status, "")
            results.append(Reconstruction(x.detach(), guess, objective, spent, seconds, status, reason))
        return results

    def _refuse(self, known: Knowledge) -> str:
        for name, module in known.model.named_modules():
            if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                return f"layer {name!r} is dropout in train mode: its draws are not in the update's differentiable form"
        return ""

    def _start(self, known: Knowledge, budget: Budget, streams: Sequence[Stream], soft: bool) -> Variables:
        """Gaussian images (K, R, B, C, H, W) and, for soft labels, Gaussian logits (K, R, B, classes)."""

        def draw(purpose: str, *size: int) -> Tensor:
            return torch.stack(
                [
                    torch.stack([torch.randn(size, generator=stream(purpose, r)) for r in range(budget.restarts)])
                    for stream in streams
                ]
            )

        variables = {"x": draw("start", known.batch_size, *known.shape)}
        if soft:
            variables["y"] = draw("labels", known.batch_size, known.classes)
        return variables

    def _descend(
        self, variables: Variables, y: Tensor | None, wave: Wave, known: Knowledge, budget: Budget, started: float
    ) -> int:
        """Advance all problems together; returns the iterations done."""
        low, high = (known.normalise(torch.full((len(known.mean), 1, 1), v)) for v in (0.0, 1.0))
        adam = Adam(signed=self.signed)
        for iteration in range(budget.iterations):
            if budget.seconds is not None and time.perf_counter() - started > budget.seconds:
                return iteration
            gradients = self._gradients(variables, y, wave, known)
            adam.step(variables, gradients, cut_rate(self.rate, iteration, budget.iterations, self.cuts))
            if self.box:
                torch.clamp(variables["x"], low, high, out=variables["x"])
        return budget.iterations

    def _gradients(self, variables: Variables, y: Tensor | None, wave: Wave, known: Knowledge) -> Variables:
        """Gradients (K, R, ...) of all problems: of their objectives' sum, in which each has a term of its own.

        By autograd outside vmap: grad within vmap gives the same, at a quarter more time.
        """
        leaves = {name: t.detach().requires_grad_() for name, t in variables.items()}
        with torch.enable_grad():
            total = self._objectives(leaves, y, wave, known).sum()
        if not total.requires_grad:  # a chain that lets nothing of the images through
            return {name: torch.zeros_like(t) for name, t in variables.items()}
        gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True))

    def _objectives(self, variables: Variables, y: Tensor | None, wave: Wave, known: Knowledge) -> Tensor:
        """Objectives (K, R) of all problems, on one axis of K * R: a second vmap would cost more than it saves."""
        restarts = variables["x"].shape[1]
        seen = {name: _repeat(t, restarts) for name, t in wave.update.items()}
        labels = None if y is None else _repeat(y, restarts)
        flat = {name: t.flatten(0, 1) for name, t in variables.items()}
        one = partial(self._objective, known=known, params=wave.params)
        with unstrided():
            objectives: Tensor = vmap(one, in_dims=(0, None if y is None else 0, 0))(flat, labels, seen)
        return objectives.view(-1, restarts)

    def _objective(
        self, variables: Variables, y: Tensor | None, seen: Update, *, known: Knowledge, params: Params
    ) -> Tensor:
        """One problem: variables x (B, C, H, W) normalised and perhaps y (B, classes) logits; a scalar."""
        target = variables["y"].softmax(1) if y is None else y
        expected = known.forward(params, Batch(known.pixels(variables["x"]), target), None)
        objective = self.distance(seen, expected)
        return objective + self.tv * total_variation(variables["x"]) if self.tv else objective


def inverting_gradients(tv: float = 0.01, rate: float = 0.1) -> GradientMatching:
    """Inverting Gradients (Geiping et al., NeurIPS 2020): cosine, total variation, signed Adam, three cuts of the rate."""
    return GradientMatching(cosine, tv=tv, rate=rate)


def dlg(rate: float = 0.1) -> GradientMatching:
    """Deep Leakage from Gradients (Zhu et al., NeurIPS 2019): squared distance, images and soft labels found together.

    The paper's L-BFGS is replaced by Adam with the engine's schedule, which does not diverge.
    """
    return GradientMatching(squared, rate=rate, signed=False, box=False, labels="optimised")


def idlg(rate: float = 0.1) -> GradientMatching:
    """iDLG (Zhao et al., 2020): DLG with the labels restored before matching."""
    return GradientMatching(squared, rate=rate, signed=False, box=False)


def _repeat(t: Tensor, restarts: int) -> Tensor:
    """(K, ...) to (K * R, ...), each problem's restarts side by side; without a copy for one restart."""
    return t.unsqueeze(1).expand(-1, restarts, *t.shape[1:]).flatten(0, 1)
