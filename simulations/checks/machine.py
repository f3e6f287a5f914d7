"""Examine this machine: versions, hardware, local data, weights."""

import platform
import sys
from collections.abc import Iterator
from functools import partial

import torch

from fedgauge.attacks.engine.devices import devices_of, driver
from fedgauge.attacks.modality.image_metrics import BACKBONES, lpips_weights
from fedgauge.client.data_folder import cache_folder, data_folder
from fedgauge.simulations.checks.check_result import CheckResult, attempt
from fedgauge.simulations.run.environment import PACKAGES, package


def examine() -> list[CheckResult]:
    """Try everything that fedgauge depends on; starting Ray takes some seconds."""
    results = [CheckResult("Python", sys.version_info >= (3, 11), True, platform.python_version())]
    for name in PACKAGES:
        version = package(name)
        needed = name not in ("transformers", "rouge-score", "fedgauge")
        results.append(CheckResult(name, version is not None, needed, version or f"not installed: pip install {name}"))
    results += [*gpus(), attempt("Ray", _ray, needed=False)]
    folder = data_folder()
    message = str(folder or "not set (FEDGAUGE_DATA names the folder); public data is downloaded on first use")
    results.append(CheckResult("local data", folder is not None, False, message))
    for net, backbone in BACKBONES.items():
        weights = lpips_weights(net)
        missing = f"missing: weights/{backbone.local} in the local data, or {backbone.cached} in torchvision's cache"
        results.append(CheckResult(f"LPIPS weights, {net}", weights is not None, False, str(weights or missing)))
    return [*results, CheckResult("cache", True, False, str(cache_folder()))]


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


def _ray() -> str:
    from fedgauge.server.pool.ray_executor import RayExecutor

    executor = RayExecutor(workers=1)
    try:
        return f"a worker started (process {executor.pids()[0]})"
    finally:
        executor.close()
