"""Randomness: one generator for each purpose, derived from names and numbers by hashing."""

import secrets
import struct
from hashlib import blake2b

import torch
from torch import Generator


def seed_of(*parts: str | int) -> int:
    """A 63-bit seed that depends on every part and on their order; equal parts give equal seeds on every machine.

    torch's CPU generator reads the lower 32 bits of it.
    """
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: str | int) -> Generator:
    """A separate CPU generator for one purpose, e.g. `generator(seed, "batch", client, round)`."""
    return torch.Generator().manual_seed(seed_of(*parts))


def secret_generator() -> Generator:
    """A generator with its whole state from the operating system's entropy.

    From a seed, torch's CPU generator takes 32 bits only: a server that knows one entry of the noise could try all seeds.

    Raises:
        RuntimeError: this torch keeps the state in an unknown form.
    """
    generator = Generator().manual_seed(1)
    state = bytearray(generator.get_state().numpy().tobytes())
    # MT19937 as torch keeps it: seed, words left, whether seeded, next word; then 624 words of 32 bits in 64 each
    if len(state) != 5056 or struct.unpack_from("<QIIQQ", state) != (1, 1, 1, 0, 1):
        raise RuntimeError("this version of torch keeps its generator's state in an unknown form: no secret noise")
    words = struct.unpack("<624I", secrets.token_bytes(4 * 624))
    struct.pack_into("<624Q", state, 24, *words)
    struct.pack_into("<Q", state, 0, secrets.randbits(63))
    return generator.set_state(torch.frombuffer(state, dtype=torch.uint8).clone())
