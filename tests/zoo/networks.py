"""A zoo of networks as people bring them: common architectures at their smallest sizes, and every kind of layer.

Each name stands for a constructor without weights from elsewhere. `networks()` lists them; `build` makes one from a seed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from tests.zoo import flower, layers, libraries, odd

Family = Literal["flower", "torchvision", "timm", "hugging face", "layers", "odd"]
CLASSES = 4


@dataclass(frozen=True)
class Network:
    """One network of the zoo.

    Args:
        make: builds it for images of `shape` and CLASSES classes.
        train: in train mode; else in eval mode.
        declined: words of the sentence why matching cannot attack it; empty: it can.
        quick: looked at in every run of the tests, not only in the full ones.
        package: what must be installed beside torch.
    """

    name: str
    family: Family
    make: Callable[[], nn.Module] = field(repr=False)
    shape: tuple[int, int, int] = (3, 32, 32)
    train: bool = False
    declined: str = ""
    quick: bool = True
    package: str = "torch"

    def build(self, seed: int = 0) -> nn.Module:
        """The network, its weights drawn from a seed, in the dtype that is torch's default."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
        return model.to(torch.get_default_dtype()).train(self.train)

    def examples(self, problems: int, size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Random images (P, B, ...) in [0, 1] and labels (P, B)."""
        rng = torch.Generator().manual_seed(seed)
        x = torch.rand(problems, size, *self.shape, generator=rng)
        return x, torch.randint(CLASSES, (problems, size), generator=rng)


def networks() -> Mapping[str, Network]:
    """All networks by name."""
    found = [
        *(Network(n, "flower", make, shape) for n, (make, shape) in flower.NETWORKS.items()),
        *(
            Network(n, "torchvision", m, s, q, d, k, "torchvision")
            for n, (m, s, q, d, k) in libraries.TORCHVISION.items()
        ),
        *(Network(n, "timm", m, s, q, d, k, "timm") for n, (m, s, q, d, k) in libraries.TIMM.items()),
        *(
            Network(n, "hugging face", m, s, q, d, k, "transformers")
            for n, (m, s, q, d, k) in libraries.HUGGING_FACE.items()
        ),
        *(Network(n, "layers", make, layers.SHAPE) for n, make in layers.NETWORKS.items()),
        *(Network(f"{n} in train mode", "layers", make, layers.SHAPE, True) for n, make in layers.NORMS.items()),
        *(Network(f"{n} in eval mode", "layers", make, layers.SHAPE) for n, make in layers.NORMS.items()),
        *(Network(n, "odd", make, layers.SHAPE, train, words) for n, (make, train, words) in odd.NETWORKS.items()),
    ]
    by_name = {network.name: network for network in found}
    assert len(by_name) == len(found), "two networks have one name"
    return by_name
