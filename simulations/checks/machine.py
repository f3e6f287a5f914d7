"""What this machine has: versions, hardware, local data, weights."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from functools import partial

import torch

from fedgauge.attacks.engine.devices import devices_of, driver
from fedgauge.attacks.modality.image_metrics import BACKBONES, lpips_weights
from fedgauge.client.cache_folder import cache_folder
from fedgauge.client.components import SpecError, build
from fedgauge.client.data import images
from fedgauge.client.federation import DATASET
from fedgauge.client.local_data import data_folder, has_images
from fedgauge.simulations.checks.check_result import CheckResult, attempt
from fedgauge.simulations.run.environment import PACKAGES, package

EMBEDDED = ("mnist5k", "phrases", "census")  # datasets that need no file


def examine() -> list[CheckResult]:
    """Try everything that fedgauge depends on; starting Ray takes some seconds."""
    results = [_python()]
    for name in PACKAGES:
        version = package(name)
        needed = name not in ("transformers", "rouge-score", "fedgauge")
        results.append(CheckResult(name, version is not None, needed, version or f"not installed: pip install {name}"))
    results += [attempt("torchvision import", _torchvision), *gpus(), attempt("Ray", _ray, needed=False)]
    search_path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    program = shutil.which("flower-superlink", path=search_path)
    message = program or "flower-superlink is not on the path"
    results.append(CheckResult("Flower's programs", program is not None, True, message))
    folder = data_folder()
    message = str(folder) if folder else "none (set FEDGAUGE_DATA to a folder); public data is downloaded on first use"
    results.append(CheckResult("local data", folder is not None, False, message))
    results += [_dataset(e.name, folder is not None) for e in DATASET.entries() if e.module == images.__name__]
    for net, backbone in BACKBONES.items():
        weights = lpips_weights(net)
        missing = f"missing: weights/{backbone.local} in the local data folder, or FEDGAUGE_LPIPS=download"
        results.append(CheckResult(f"LPIPS weights, {net}", weights is not None, False, str(weights or missing)))
    results.append(CheckResult("cache", True, False, str(cache_folder())))
    return results


def gpus() -> Iterator[CheckResult]:
    """Each GPU that torch can use; else why there is none."""
    try:
        found = devices_of("cuda")
    except ValueError as error:
        if version := driver():
            yield CheckResult("GPU", False, False, f"driver {version}, but {error}")
        else:
            yield CheckResult("GPU", None, False, "none: attacks run on the CPU")
        return
    yield from (attempt(f"GPU {device}", partial(_gpu, device), needed=False) for device in found)


def _gpu(device: torch.device) -> str:
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
    torch.ones(1, device=device).add(1).item()  # torch may be built for other models of GPUs
    return f"{torch.cuda.get_device_name(device)}, {free:.1f} of {total:.1f} GiB free, driver {driver() or 'unknown'}"


def _python() -> CheckResult:
    return CheckResult("Python", sys.version_info >= (3, 11), True, platform.python_version())


def _torchvision() -> str:
    import torchvision

    declared = ", operators declared by fedgauge" if torch.version.cuda is None else ""
    return f"{torchvision.__version__} beside torch {torch.__version__}{declared}"


def _ray() -> str:
    from fedgauge.server.pool.ray_executor import RayExecutor

    executor = RayExecutor(workers=1)
    try:
        return f"a worker started (process {executor.pids()[0]})"
    finally:
        executor.close()


def _dataset(short: str, local: bool) -> CheckResult:
    embedded = short in EMBEDDED
    if not embedded and not local:
        return CheckResult(short, None, False, "downloaded on first use")
    try:
        dataset = build({"use": short}, f"dataset {short}", DATASET) if embedded or _has_local(short) else None
    except SpecError as error:
        return CheckResult(short, False, short == "mnist5k", str(error))  # text is an extra
    if dataset is None:
        return CheckResult(short, None, False, "not in the local data folder; downloaded on first use")
    return CheckResult(short, True, short == "mnist5k", f"{len(dataset.y):,} + {len(dataset.y_test):,} examples")


def _has_local(short: str) -> bool:
    folder = data_folder()
    places = [] if folder is None else [folder / part / short for part in ("", "text", "tables")]
    return folder is not None and (any(p.is_dir() for p in places) or has_images(short))
