"""The zoo's networks and real digits of any shape, as a scenario names them."""

from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.client.data.images import Dataset, mnist5k
from tests.zoo.networks import CLASSES, networks


def digits(channels: int = 3, size: int = 32) -> Dataset:
    """Digits on their flat, black background."""
    data = mnist5k()

    def shaped(x: Tensor) -> Tensor:
        x = x[:, :, :size, :size]
        return F.pad(x, (0, size - x.shape[3], 0, size - x.shape[2])).expand(-1, channels, -1, -1).contiguous()

    mean = (0.5,) * channels
    return Dataset(
        "digits", shaped(data.x), data.y % CLASSES, shaped(data.x_test), data.y_test % CLASSES, CLASSES, mean, mean
    )


def network(name: str) -> nn.Module:
    """A network of the zoo, by its name."""
    return networks()[name].make()
