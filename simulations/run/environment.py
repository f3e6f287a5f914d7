"""The environment of a result: versions, hardware, and the commit of the code."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from fedgauge.attacks.engine.batch_limiter import keep_freed_memory

PACKAGES = (
    "fedgauge", "flwr", "flwr-datasets", "ray", "torch", "torchvision", "transformers", "numpy", "scipy", "lpips",
    "rouge-score", "safetensors", "mlxtend", "plotly", "rich",
)  # fmt: skip


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, as in a worker, so that speeds are per core."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def environment() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
        "packages": {name: version for name in PACKAGES if (version := package(name)) is not None},
    }


@cache  # of the code that this process runs
def package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def _commit() -> str | None:
    """The commit of the code, and whether the code was changed since; None if it has no repository of its own."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    described = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return described.stdout.strip() or None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
