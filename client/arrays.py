"""Arrays from another machine: the header is checked before memory is allocated."""

import io
import math
from typing import Any, NamedTuple

import numpy as np

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_LARGEST = 2**14  # bytes of a header: NumPy itself reads none beyond 10,000


class NpyHeader(NamedTuple):
    """What the header of an npy file says, and where its numbers begin."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    by_columns: bool
    start: int


def npy_header(data: bytes) -> NpyHeader:
    """The header of one whole array of numbers.

    Raises:
        Exception: hostile bytes may raise anything: ValueError, MemoryError, RecursionError.
    """
    file = io.BytesIO(data[:_LARGEST])
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"npy version {version}, expected one of {', '.join(map(str, _HEADERS))}")
    shape, by_columns, dtype = _HEADERS[version](file)
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"expected numbers, got {dtype} of shape {shape}")
    if (claimed := math.prod(shape) * dtype.itemsize) > (following := len(data) - file.tell()):
        raise ValueError(f"the header claims {claimed} bytes for shape {shape}, but {following} follow")
    return NpyHeader(shape, dtype, by_columns, file.tell())
