"""As many problems together as memory holds: a wave that does not fit is halved and tried again."""

import ctypes
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def halving(work: Callable[[Tensor], Result], items: Tensor) -> list[Result]:
    """Results of work on all items, in order: together, or in halves where memory runs out.

    Raises:
        MemoryError: a single item does not fit.
    """
    try:
        return [work(items)]
    except (RuntimeError, MemoryError) as error:  # torch tells of exhausted host memory by a plain RuntimeError
        if not _exhausted(error):
            raise
        if len(items) == 1:
            raise MemoryError(f"a single problem does not fit into memory: {error}") from error
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = len(items) // 2
    return halving(work, items[:half]) + halving(work, items[half:])


def _exhausted(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error)


def keep_freed_memory() -> None:
    """Tell the C library to keep what is freed: matching makes and drops the same large tensors in every iteration.

    Handing them back to the system and faulting them in again takes a tenth of an attack's time. For processes that attack
    and do nothing else; without effect where the C library is not glibc.
    """
    trim_threshold, mmap_threshold = -1, -3  # mallopt(3)
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(mmap_threshold, 2**30)
        library.mallopt(trim_threshold, 2**31 - 1)
