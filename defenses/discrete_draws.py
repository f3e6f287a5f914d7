"""Exact draws of whole numbers from the discrete normal and Laplace distributions (Canonne, Kamath & Steinke, NeurIPS 2020).

Every decision compares uniform bits with integers, so no probability is rounded, and the bits are a cipher's key stream.
"""

import secrets
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FINENESS = 24
STEPS = 2**FINENESS  # the normal distribution's standard deviation, and the Laplace distribution's scale
_CHUNK = 2**15  # proposals at a time: they stay in the processor's cache
Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]


class RandomBits:
    """Bits from a secret key of 32 bytes: ChaCha20's key stream (RFC 8439)."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        self._stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    @classmethod
    def secret(cls) -> "RandomBits":
        return cls(secrets.token_bytes(32))

    def below(self, exponent: int, count: int) -> Whole:
        """Uniform whole numbers in [0, 2^exponent), (count,); exponent at most 62."""
        size = next(size for size in (1, 2, 4, 8) if exponent <= 8 * size)
        words = np.frombuffer(self._stream.update(bytes(size * count)), f"<u{size}").astype(np.int64)
        found: Whole = words & (2**exponent - 1)
        return found

    def one_in(self, k: int, count: int) -> Flags:
        """True with probability 1 / k, (count,); k at most 256."""
        drawn, equal = self.below(8, count), 256 // k * k
        while (over := drawn >= equal).any():
            drawn[over] = self.below(8, int(over.sum()))
        found: Flags = drawn % k == 0
        return found

    def exp_minus(self, numerators: Whole, exponent: int) -> Flags:
        """True with probability exp(-numerator / 2^exponent), for each numerator in [0, 2^exponent] (algorithm 1)."""
        found = np.zeros(len(numerators), np.bool_)
        left, k = np.arange(len(numerators)), 1
        while len(left):
            goes_on = self.below(exponent, len(left)) < numerators[left]
            if k > 1:
                goes_on[goes_on] = self.one_in(k, int(goes_on.sum()))
            found[left[~goes_on]] = k % 2 == 1
            left, k = left[goes_on], k + 1
        return found

    def exp_minus_one(self, count: int) -> Flags:
        return self.exp_minus(np.ones(count, np.int64), 0)


def laplace_draws(bits: RandomBits, count: int) -> Whole:
    """n with probability ~ exp(-|n| / STEPS), (count,) (algorithm 2)."""
    return _gathered(count, lambda n: _laplace(bits, n))


def normal_draws(bits: RandomBits, count: int) -> Whole:
    """n with probability ~ exp(-n^2 / (2 STEPS^2)), (count,) (algorithm 3)."""
    return _gathered(count, lambda n: _normal(bits, n))


def _gathered(count: int, some: Callable[[int], Whole]) -> Whole:
    """The first `count` of what batches of proposals give."""
    parts, missing = [np.zeros(0, np.int64)], count
    while missing > 0:
        parts.append(some(min(_CHUNK, 3 * missing + 8))[:missing])
        missing -= len(parts[-1])
    return np.concatenate(parts)


def _laplace(bits: RandomBits, proposals: int) -> Whole:
    rest = bits.below(FINENESS, proposals)
    rest = rest[bits.exp_minus(rest, FINENESS)]
    turns, running = np.zeros(len(rest), np.int64), np.arange(len(rest))
    while len(running):
        running = running[bits.exp_minus_one(len(running))]
        turns[running] += 1
    sizes, negative = rest + STEPS * turns, bits.below(1, len(rest)) == 1
    twice = negative & (sizes == 0)  # zero has one sign
    found: Whole = np.where(negative, -sizes, sizes)[~twice]
    return found


def _normal(bits: RandomBits, proposals: int) -> Whole:
    found = _laplace(bits, proposals)
    # exp(-(|n| - STEPS)^2 / (2 STEPS^2)), as whole turns of exp(-1) and a rest
    exponent = 2 * FINENESS + 1
    square = (np.abs(found) - STEPS) ** 2
    kept = bits.exp_minus(square & (2**exponent - 1), exponent)
    found, turns = found[kept], square[kept] >> exponent
    while (open_ := turns > 0).any():
        kept = ~open_
        kept[open_] = bits.exp_minus_one(int(open_.sum()))
        found, turns = found[kept], turns[kept] - 1
    return found
