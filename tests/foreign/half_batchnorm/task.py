"""half_batchnorm: a network with batch normalisation, whose weights travel in half precision."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    def __init__(self, classes: int = 10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(inplace=True),
            nn.Conv2d(12, 12, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Linear(12 * 4 * 4, classes)

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


def to_half(state):
    return {k: v.half() if v.is_floating_point() else v for k, v in state.items()}


def examples_of(partition: int, partitions: int, count: int):
    digits = load_digits()
    mine = range(partition, len(digits.target), partitions)[:count]
    return torch.tensor(digits.images[mine, None], dtype=torch.float32) / 16, torch.tensor(digits.target[mine])


def fit(net, x, y, lr, batch_size):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    total = 0.0
    for xb, yb in zip(x.split(batch_size), y.split(batch_size), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(xb), yb)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(yb)
    return total / len(y)
