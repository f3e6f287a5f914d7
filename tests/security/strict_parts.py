"""A network and a loss that raise over what is not finite, as torch's own classes do, instead of passing it on."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Strict(nn.Module):
    """Fully connected layers whose logits torch validates."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        widths = [inputs, *[32] * 24]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.last = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        logits: Tensor = torch.distributions.Categorical(logits=self.last(x)).logits
        return logits


def net(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A deep network whose Categorical refuses logits that are not numbers."""
    return _Strict(torch.Size(shape).numel(), classes)


def bce(logits: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy of each class by itself: BCELoss refuses probabilities that are not numbers."""
    loss: Tensor = nn.BCELoss()(logits.sigmoid(), F.one_hot(y, logits.shape[1]).to(logits.dtype))
    return loss
