"""The app's task: a small network, a client's private digits, and one step of training on them."""

import torch
from torch import Tensor, nn

from fedgauge.client.data.images import batch_of, mnist5k

MEAN, STD = 0.1307, 0.3081


class Net(nn.Module):
    """Two fully connected layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(28 * 28, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(x.flatten(1)).relu())
        return logits


def private_digits(client: int, count: int) -> tuple[Tensor, Tensor]:
    """The digits of one client, in [0, 1], and their labels; the training part is left to the attacker as public data."""
    data = mnist5k()
    batch = batch_of(data.x_test, data.y_test, torch.arange(client * count, (client + 1) * count))
    return batch.x, batch.y


def train(model: Net, x: Tensor, y: Tensor, rate: float) -> float:
    """One step of SGD; returns the loss before it."""
    loss = nn.functional.cross_entropy(model((x - MEAN) / STD), y)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=rate).step()
    return float(loss.detach())
