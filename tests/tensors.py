"""What tests of tensors share: a seeded generator, and equality to the last bit."""

from collections.abc import Mapping

import torch
from torch import Generator, Tensor


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
