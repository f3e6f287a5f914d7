"""Networks of the kinds that Flower's examples and baselines train, written anew."""

from collections.abc import Callable

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


def two_convolutions() -> nn.Module:
    """McMahan's network for digits, as FedAvg's and FedProx's baselines train it."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 32), nn.ReLU(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def with_dropout() -> nn.Module:
    """The network of PyTorch's digits example, whose dropout is off in eval mode."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(),
        nn.Linear(16 * 12 * 12, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, CLASSES),
    )  # fmt: skip


def moon_like() -> nn.Module:
    """An encoder with a projection head before the classifier, as contrastive baselines (MOON) have."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(),
        nn.Linear(24, 24), nn.ReLU(inplace=True), nn.Linear(24, 16), nn.Linear(16, CLASSES),
    )  # fmt: skip


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
    "FedAvg's convolutions": (two_convolutions, (1, 28, 28)),
    "dropout in eval mode": (with_dropout, (1, 28, 28)),
    "MOON's projection head": (moon_like, (3, 32, 32)),
    "group norm resnet": (group_norm_resnet, (3, 16, 16)),
    "logistic regression": (logistic, (1, 28, 28)),
    "FedAvg's 2NN": (perceptron, (1, 28, 28)),
}
