"""The cryptography of a secure sum: Shamir's shares (1979), key agreement (X25519) and key streams (ChaCha20)."""

import secrets
from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

PRIME = 2**521 - 1  # a Mersenne prime, above every 256-bit secret
SECRET = 32  # bytes of keys, seeds and tags


def shamir_share(secret: int, threshold: int, count: int) -> list[int]:
    """The values at 1..count of a random polynomial of degree threshold - 1 that is the secret at 0."""
    drawn = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return [evaluate_polynomial([secret, *drawn], x) for x in range(1, count + 1)]


def evaluate_polynomial(coefficients: Sequence[int], x: int) -> int:
    """A polynomial at x modulo PRIME, its constant coefficient first."""
    return reduce(lambda value, c: (value * x + c) % PRIME, reversed(coefficients), 0)


def shamir_combine(shares: Mapping[int, int]) -> int:
    """The polynomial through (x, value) for all shares, at 0 (Lagrange); it needs as many shares as the threshold."""
    total = 0
    for x, value in shares.items():
        up = down = 1
        for other in shares:
            if other != x:
                up, down = up * other % PRIME, down * (other - x) % PRIME
        total += value * up * pow(down, -1, PRIME)
    return total % PRIME


def expand_seed(seed: bytes, size: int) -> NDArray[np.uint64]:
    """Uniform integers (size,) from a 32-byte seed: ChaCha20's key stream (RFC 8439)."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), "<u8").astype(np.uint64)


def public_key(key: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()


def agreed(key: bytes, other: bytes, info: bytes) -> bytes:
    """32 bytes that only the two owners of these X25519 keys can compute, for one purpose."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    common = X25519PrivateKey.from_private_bytes(key).exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(SHA256(), SECRET, salt=None, info=b"fedgauge secure sum " + info).derive(common)


def pair_seed(key: bytes, other: bytes, session: bytes) -> bytes:
    """The seed of two clients' mask, the same for both."""
    return agreed(key, other, b"mask" + session + b"".join(sorted([public_key(key), other])))
