"""The loop of the published attacks, one image at a time: the reference for the engine's speed.

It follows the code of Inverting Gradients (Geiping et al., NeurIPS 2020). It uses the model's own parameters, a graph of their
gradient, cosine and total variation, `backward()`, the sign of the image's gradient into torch's Adam, a schedule, a box.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F


def invert(
    model: nn.Module,
    seen: Sequence[Tensor],
    y: Tensor,
    start: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    iterations: int,
    tv: float,
    rate: float = 0.1,
    steps: int = 1,
    local: float = 0.1,
) -> Tensor:
    """Search the normalised image (1, C, H, W) by the direction of its gradient.

    Args:
        seen: the gradient, in the order of model.parameters().
        start: the first guess, normalised.
        steps, local: the client's local steps on the image, which are unrolled, and their rate; `seen` is then the change of
            the weights over -local.
    """
    x = start.clone().requires_grad_()
    low, high = ((v - torch.tensor(mean).to(x)[:, None, None]) / torch.tensor(std).to(x)[:, None, None] for v in (0, 1))
    optimizer = torch.optim.Adam([x], lr=rate)
    cuts = [math.ceil(iterations * cut) for cut in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, cuts, gamma=0.1)
    for _ in range(iterations):
        optimizer.zero_grad()
        model.zero_grad()
        gradient = unrolled(model, x, y, steps, local)
        objective = cosine_distance(gradient, seen) + tv * total_variation(x)
        objective.backward()
        assert x.grad is not None
        x.grad.sign_()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.data = torch.max(torch.min(x, high), low)
    return x.detach()


def unrolled(model: nn.Module, x: Tensor, y: Tensor, steps: int, local: float) -> Sequence[Tensor]:
    """The sum of the gradients of local steps, with its graph."""
    here: dict[str, Tensor] = dict(model.named_parameters())
    total: Sequence[Tensor] = ()
    for _ in range(steps):
        logits = functional_call(model, here, (x,)) if total else model(x)
        gradient = torch.autograd.grad(F.cross_entropy(logits, y), list(here.values()), create_graph=True)
        total = [t + g for t, g in zip(total, gradient, strict=True)] if total else gradient
        if steps > 1:
            here = {name: p - local * g for (name, p), g in zip(here.items(), gradient, strict=True)}
    return total


def cosine_distance(gradient: Sequence[Tensor], seen: Sequence[Tensor]) -> Tensor:
    """1 - cosine over all entries."""
    inner = ours = theirs = gradient[0].new_zeros(())
    for a, b in zip(gradient, seen, strict=True):
        inner = inner + (a * b).sum()
        ours = ours + a.pow(2).sum()
        theirs = theirs + b.pow(2).sum()
    return 1 - inner / ours.sqrt() / theirs.sqrt()


def total_variation(x: Tensor) -> Tensor:
    """Mean |dx| + mean |dy|."""
    dx = torch.mean(torch.abs(x[:, :, :, :-1] - x[:, :, :, 1:]))
    dy = torch.mean(torch.abs(x[:, :, :-1, :] - x[:, :, 1:, :]))
    return dx + dy
