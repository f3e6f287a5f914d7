"""Limits the problems of a pass to the free memory: estimated by a dry run, halved when memory still runs out."""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")

SHARE = 0.5  # of the free memory: other workers measure it at the same time, and kernels need buffers


class BatchLimiter:
    """The number of problems that advance together.

    Args:
        count: at the start; halved permanently whenever memory runs out.
    """

    def __init__(self, count: int) -> None:
        self.count = max(1, count)

    @contextmanager
    def halve_on_out_of_memory(self, used: int) -> Iterator[None]:
        """Catch running out of memory in work on `used` problems, and halve the count for the next try.

        Raises:
            MemoryError: a single problem does not fit.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:  # torch reports exhausted host memory as a plain RuntimeError
            if not exhausted(error):
                raise
            if used == 1:
                raise MemoryError(f"a single problem does not fit into memory: {error}") from error
            self.count = max(1, used // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def each(self, work: Callable[[Tensor], Result], items: Tensor) -> list[Result]:
        """Apply work to all items, in parts that fit into memory; return the results in order."""
        results: list[Result] = []
        done = 0
        while done < len(items):
            part = items[done : done + self.count]
            with self.halve_on_out_of_memory(len(part)):
                results.append(work(part))
                done += len(part)
        return results


def exhausted(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def raise_if_exhausted(error: Exception) -> None:
    if exhausted(error):
        raise error


# ------------------------------------------------------------------------------------------------------ ahead of time


def largest_batch(work: Callable[[int], object], most: int, device: torch.device, held: int = 0) -> int:
    """Measure by a dry run how many of at most `most` problems fit into the free memory.

    The dry run computes two problems, since a single one may take another route. If the free memory is unknown, all fit.

    Args:
        work: computes this many problems.
        held: bytes that will be in use in addition to the work.
    """
    available = free_bytes(device)
    if most <= 2 or available is None:
        return most
    count = 1
    with BatchLimiter(2).halve_on_out_of_memory(2):
        need = peak_bytes(lambda: work(2), device)
        count = max(1, min(most, 2 * int(SHARE * available - held) // max(need, 1)))
    return count


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Peak memory of a piece of work, in bytes, without the memory that was in use before.

    On a GPU the allocator counts it; elsewhere the results of torch's operators are counted, without their inner buffers.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    counted = _Allocations()
    with counted:
        work()
    return counted.peak_bytes


class _Allocations(TorchDispatchMode):
    """Counts the bytes of the live storages that operators allocated, including those in autograd's graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tree_leaves((args, kwargs)):
            self._count(t, new=False)
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            self._count(t, new=True)
        return result

    def _count(self, t: Any, new: bool) -> None:
        if not isinstance(t, Tensor):
            return
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if new else 0
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak_bytes = max(self.peak_bytes, self.live)
        weakref.finalize(storage, self._dropped, key, size).atexit = False

    def _dropped(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def free_bytes(device: torch.device) -> int | None:
    """Free bytes on a device; None if the system does not report them."""
    if device.type == "cuda":
        outside, _ = torch.cuda.mem_get_info(device)
        return int(outside + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return host_memory() if device.type == "cpu" else None


def host_memory(root: Path = Path("/")) -> int | None:
    """Free bytes within the limits of the system and of a container (control group, version 2); None without a report."""
    limits, group = [], root / "sys/fs/cgroup"
    if (path := root / "proc/meminfo").is_file():
        limits += [int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if "MemAvailable" in line]
    if (path := group / "memory.max").is_file() and (most := path.read_text().strip()) != "max":
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])  # this part can be reclaimed
        limits.append(max(0, int(most) - used))
    return min(limits, default=None)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory: matching allocates the same large tensors in every iteration.

    Returning them to the system and faulting them in again takes a tenth of an attack's time. For processes that only attack.
    """
    trim_threshold, mmap_threshold = -1, -3  # mallopt(3)
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(mmap_threshold, 2**30)
        library.mallopt(trim_threshold, 2**31 - 1)
