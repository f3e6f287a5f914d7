"""What this machine has: versions, hardware, data and weights; for `fedleak doctor` and a run's environment.json."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from attacks.metrics import lpips_weights
from client.components import SpecError, build
from client.data import cache_folder, data_folder
from client.protocol import DATASET

PACKAGES = (
    "fedleak", "flwr", "flwr-datasets", "ray", "torch", "torchvision", "transformers", "numpy", "scipy", "lpips",
    "rouge-score", "torchmetrics", "safetensors", "mlxtend", "plotly", "rich",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing looked at: whether it works (None: not checked), whether fedleak needs it, and a sentence."""

    name: str
    works: bool | None
    needed: bool
    words: str


def environment() -> dict[str, object]:
    """Versions and hardware, as kept beside a run's results."""
    import torch

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": _memory_gb(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def examine() -> list[Finding]:
    """Try everything that fedleak stands on; starting Ray takes some seconds."""
    findings = [_python()]
    for name in PACKAGES:
        version = _version(name)
        needed = name not in ("transformers", "rouge-score", "fedleak")
        findings.append(Finding(name, version is not None, needed, version or f"not installed: pip install {name}"))
    findings += [_attempt("torchvision import", _torchvision, True), _attempt("Ray", _ray, False)]
    beside = shutil.which(
        "flower-superlink", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    )
    findings.append(
        Finding("Flower's programs", beside is not None, True, beside or "flower-superlink is not on the path")
    )
    folder = data_folder()
    words = str(folder) if folder else "none (set FEDLEAK_DATA to a folder); public data is downloaded on first use"
    findings.append(Finding("local data", folder is not None, False, words))
    for name in DATASET.names():
        findings.append(_dataset(name, folder is not None))
    weights = lpips_weights()
    where = "weights/alexnet_features_torchvision.safetensors in the local data folder"
    findings.append(
        Finding("LPIPS weights", weights is not None, False, str(weights) if weights else f"missing: {where}")
    )
    findings.append(Finding("cache", True, False, str(cache_folder())))
    return findings


def _python() -> Finding:
    return Finding("Python", sys.version_info >= (3, 11), True, platform.python_version())


def _attempt(name: str, attempt: Callable[[], str], needed: bool) -> Finding:
    try:
        return Finding(name, True, needed, attempt())
    except Exception as error:  # whatever breaks it is what the user asked to see
        return Finding(name, False, needed, f"{type(error).__name__}: {error}")


def _torchvision() -> str:
    import torch
    import torchvision

    mended = torch.version.cuda is None
    return f"{torchvision.__version__} beside torch {torch.__version__}" + (
        ", operators declared by fedleak" if mended else ""
    )


def _ray() -> str:
    from server.pool import RayExecutor

    executor = RayExecutor(workers=1)
    try:
        return f"a worker started (process {executor.pids()[0]})"
    finally:
        executor.close()


def _dataset(name: str, local: bool) -> Finding:
    short = name.split(":")[1]
    if short != "mnist5k" and not local:
        return Finding(short, None, False, "downloaded on first use")
    try:
        dataset = build({"use": name}, f"dataset {short}", DATASET) if short == "mnist5k" or _has_local(short) else None
    except SpecError as error:
        return Finding(short, False, short == "mnist5k", str(error))
    if dataset is None:
        return Finding(short, None, False, "not in the local data folder; downloaded on first use")
    return Finding(short, True, short == "mnist5k", f"{len(dataset.y):,} + {len(dataset.y_test):,} images")


def _has_local(short: str) -> bool:
    folder = data_folder()
    return folder is not None and ((folder / short).is_dir() or any(folder.glob(f"{short}-train-*.npz")))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the code, and whether it was changed since; None where it stands in no repository of its own."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return told.stdout.strip() or None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None
