"""Optimisers that advance many problems together: every operation is elementwise or along a problem's own axes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Variables = dict[str, Tensor]


@dataclass
class Adam:
    """Adam (Kingma & Ba, 2015) in place over named tensors; signed: on the gradient's sign (Inverting Gradients)."""

    signed: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    steps: int = 0
    first: Variables = field(default_factory=dict)
    second: Variables = field(default_factory=dict)

    def step(self, variables: Variables, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Move each variable against its gradient; gradients that are not finite move nothing."""
        self.steps += 1
        b1, b2 = self.betas
        for name, g in gradients.items():
            if name not in self.first:
                self.first[name], self.second[name] = torch.zeros_like(g), torch.zeros_like(g)
            g = torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0)
            g = g.sign() if self.signed else g
            m = self.first[name].lerp_(g, 1 - b1)
            v = self.second[name].mul_(b2).addcmul_(g, g, value=1 - b2)
            denominator = (v / (1 - b2**self.steps)).sqrt_().add_(self.eps)
            variables[name].addcdiv_(m, denominator, value=-rate / (1 - b1**self.steps))


def cut_rate(rate: float, iteration: int, iterations: int, cuts: tuple[float, ...], factor: float = 0.1) -> float:
    """The rate, times factor for each cut (a fraction of the iterations) that has passed.

    >>> [round(cut_rate(0.1, i, 8, (3 / 8, 5 / 8, 7 / 8)), 6) for i in range(8)]
    [0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001, 0.0001]
    """
    return rate * factor ** sum(iteration >= cut * iterations for cut in cuts)
