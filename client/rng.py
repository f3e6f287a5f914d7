"""Randomness: one generator for each purpose, derived from names and numbers by hashing."""

from hashlib import blake2b

import torch
from torch import Generator


def seed_of(*parts: str | int) -> int:
    """A 63-bit seed that depends on every part and on their order; equal parts give equal seeds on every machine."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: str | int) -> Generator:
    """A CPU generator of its own for one purpose, e.g. `generator(seed, "batch", client, round)`."""
    return torch.Generator().manual_seed(seed_of(*parts))
