"""Arrays from another machine: the header is checked before memory is allocated."""

import math
import re
from typing import Any, NamedTuple

import numpy as np

_MAGIC = b"\x93NUMPY"
_LENGTH = {(1, 0): 2, (2, 0): 4}  # bytes that give the header's length, by version
_LARGEST = 10_000  # bytes of a header, as NumPy's own reader
_FIELDS = [
    re.compile(rb"""['"]shape['"]\s*:\s*\(([\d\s,]*)\)"""),
    re.compile(rb"""['"]descr['"]\s*:\s*['"]([<>|=]?(?:[iu][1248]|f[248]|c(?:8|16)|b1|\?))['"]"""),
    re.compile(rb"""['"]fortran_order['"]\s*:\s*(True|False)"""),
]


class NpyHeader(NamedTuple):
    """The header of an npy file, and the offset of its data."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    by_columns: bool
    start: int


def npy_header(data: bytes) -> NpyHeader:
    """Read the header of one whole array of numbers.

    NumPy reads a header with `ast.literal_eval`, which in CPython 3.11 raises SystemError, in either thread, when two
    threads call it at once. A thread that runs next to a user's app must therefore not call it.

    Raises:
        ValueError: it is no npy file, not an array of numbers, or shorter than it claims.
    """
    version = (data[6], data[7]) if len(data) > 7 and data.startswith(_MAGIC) else None
    if version not in _LENGTH:
        raise ValueError("expected an npy file of version 1 or 2")
    first = 8 + _LENGTH[version]
    start = first + int.from_bytes(data[8:first], "little")
    found = [field.search(data[first : min(start, first + _LARGEST)]) for field in _FIELDS]
    if None in found:
        raise ValueError("expected the header of an array of numbers")
    sizes, name, by_columns = (field[1].decode() for field in found if field)
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    dtype = np.dtype(name)
    if (claimed := math.prod(shape) * dtype.itemsize) > (following := len(data) - start):
        raise ValueError(f"the header claims {claimed} bytes for shape {shape}, but {following} follow")
    return NpyHeader(shape, dtype, by_columns == "True", start)


def npy_array(data: bytes) -> np.ndarray[Any, np.dtype[Any]]:
    """Read one saved array of numbers.

    Raises:
        ValueError: as `npy_header`.
    """
    shape, dtype, by_columns, start = npy_header(data)
    values = np.frombuffer(data, dtype, math.prod(shape), start)
    return values.reshape(shape, order="F" if by_columns else "C").copy()
