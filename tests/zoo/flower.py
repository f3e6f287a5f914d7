"""Networks of the kinds that Flower's examples and baselines train, written anew."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 4


class Quickstart(nn.Module):
    """conv-pool-conv-pool and three linear layers, `view` between them, as in the PyTorch quickstart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class TwoConvolutions(nn.Module):
    """McMahan's network for digits, as FedAvg's and FedProx's baselines train it."""

    def __init__(self, first: int = 8, second: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, first, 5, padding="same")
        self.conv2 = nn.Conv2d(first, second, 5, padding="same")
        self.fc1 = nn.Linear(second * 7 * 7, hidden)
        self.fc2 = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


class WithDropoutInEval(nn.Module):
    """The network of PyTorch's digits example, whose dropout is off in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(16 * 12 * 12, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = torch.flatten(self.dropout1(x), 1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


class MoonLike(nn.Module):
    """An encoder with a projection head before the classifier, as contrastive baselines (MOON) have."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.encoder = nn.Sequential(nn.Linear(400, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(24, 24), nn.ReLU(inplace=True), nn.Linear(24, 16))
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(self.features(x).view(x.size(0), -1))
        return self.classifier(self.head(hidden))


class Block(nn.Module):
    """A residual block with group norms, as baselines put them in the place of batch norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(2, width), nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += x
        return F.relu(out, inplace=True)


def group_norm_resnet() -> nn.Module:
    """A small residual network with group norms."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )


def logistic() -> nn.Module:
    """Logistic regression, as FedProx's synthetic baseline."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, CLASSES))


def perceptron() -> nn.Module:
    """The two hidden layers of FedAvg's 2NN."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, CLASSES)
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "Flower's quickstart": (Quickstart, (3, 32, 32)),
    "FedAvg's convolutions": (TwoConvolutions, (1, 28, 28)),
    "dropout in eval mode": (WithDropoutInEval, (1, 28, 28)),
    "MOON's projection head": (MoonLike, (3, 32, 32)),
    "group norm resnet": (group_norm_resnet, (3, 16, 16)),
    "logistic regression": (logistic, (1, 28, 28)),
    "FedAvg's 2NN": (perceptron, (1, 28, 28)),
}
