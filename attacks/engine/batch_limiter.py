"""As many problems together as memory holds: chosen ahead from what one needs, halved where that was too many after all."""

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")

SHARE = 0.5  # of the free memory: other workers look at the same memory at the same time, and kernels have buffers of their own


class BatchLimiter:
    """How many problems advance together.

    Args:
        count: at the start; halved whenever memory runs out, for good.
    """

    def __init__(self, count: int) -> None:
        self.count = max(1, count)

    @contextmanager
    def halve_on_out_of_memory(self, used: int) -> Iterator[None]:
        """Ends work on so many problems that memory does not hold, after which there are half as many places.

        Raises:
            MemoryError: a single problem does not fit.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:  # torch tells of exhausted host memory by a plain RuntimeError
            if not _exhausted(error):
                raise
            if used == 1:
                raise MemoryError(f"a single problem does not fit into memory: {error}") from error
            self.count = max(1, used // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def each(self, work: Callable[[Tensor], Result], items: Tensor) -> list[Result]:
        """Results of work on all items, in order: together, or in parts that memory holds."""
        found: list[Result] = []
        done = 0
        while done < len(items):
            part = items[done : done + self.count]
            with self.halve_on_out_of_memory(len(part)):
                found.append(work(part))
                done += len(part)
        return found


def _exhausted(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error)


# ------------------------------------------------------------------------------------------------------ ahead of time


def largest_batch(work: Callable[[int], object], most: int, device: torch.device, held: int = 0) -> int:
    """How many problems, at most so many, fit into the free memory, judged by a dry pass of two of them.

    Two, since one problem by itself may be computed in another way. Without a dry pass where there are no more than two, and
    all of them where the free memory is not known.

    Args:
        work: done on so many problems.
        held: bytes that will be taken beside the work.
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
    """Bytes that a piece of work holds at its height beyond what was there before it.

    On an accelerator the allocator's own count; else that of torch's operators' results, without what they take and drop
    again inside.
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
    """Counts the bytes of the storages that operators make, as long as anything, autograd's graph too, keeps them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for t in tree_leaves((args, kwargs)):
            self._meet(t, new=False)
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            self._meet(t, new=True)
        return found

    def _meet(self, t: Any, new: bool) -> None:
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
    """Bytes that can still be had on a device; None where the system does not tell."""
    if device.type == "cuda":
        outside, _ = torch.cuda.mem_get_info(device)
        return int(outside + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return host_memory() if device.type == "cpu" else None


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the system, and every control group that this process is in, still grant; None where they do not tell."""
    found = [*_available(root), *_granted(root)]
    return min(found) if found else None


def _available(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _granted(root: Path) -> Iterator[int]:
    """What is left of the limit of each memory control group (version 1 or 2), from this process's own to the root."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            yield from _left(folder, *names)
            if folder == base:
                break


def _left(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    most, used = _lines(folder / limit), _lines(folder / usage)
    if not most or not used or most[0] == "max":
        return
    statistics = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
    yield max(0, int(most[0]) - int(used[0]) + int(statistics.get(reclaimable, 0)))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


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
