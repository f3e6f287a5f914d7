"""A small network, its gradient by autograd, and examples for it."""

import copy
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedgauge.client.update import Batch, Params, Update


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def params_of(model: nn.Module) -> Params:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def examples(n: int, seed: int = 0) -> Batch:
    rng = Generator().manual_seed(seed)
    return Batch(
        torch.rand(n, 1, 3, 4, generator=rng, dtype=torch.float64), torch.randint(3, (n,), generator=rng)
    )  # fmt: skip


def autograd(model: nn.Module, params: Params, batch: Batch, loss: Callable[..., Tensor] = F.cross_entropy) -> Update:
    own = copy.deepcopy(model)
    own.load_state_dict(params, strict=False)
    loss(own(batch.x), batch.y).backward()
    return {k: p.grad for k, p in own.named_parameters() if p.grad is not None}


def largest_difference(a: Update, b: Update) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)
