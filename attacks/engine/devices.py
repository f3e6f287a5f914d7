"""The devices of attacks and their numerics: equal waves give equal bits on one device."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

CPU = torch.device("cpu")
Precision = Literal["ieee", "tf32"]
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS gives equal bits in workspaces of a fixed size only


def devices_of(wanted: str | Sequence[str]) -> list[torch.device]:
    """Parse a setting of devices.

    Args:
        wanted: "auto": every GPU, or the CPU where there is none; "cpu"; "cuda": every GPU; or names such as "cuda:1".

    Raises:
        ValueError: torch sees no such device here; the message names the remedy.
    """
    every = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    if wanted == "auto":
        return every or [CPU]
    found: list[torch.device] = []
    for name in [wanted] if isinstance(wanted, str) else wanted:
        own = every if name == "cuda" else [d for d in (CPU, *every) if str(d) == name]
        if not own:
            here = f"torch {torch.__version__} sees {len(every)} GPUs (check nvidia-smi and CUDA_VISIBLE_DEVICES)"
            raise ValueError(f'no device {name!r}; expected "auto", "cpu", "cuda" or "cuda:0" and so on; {here}')
        found += own
    return list(dict.fromkeys(found)) or [CPU]


def compute_on(device: torch.device, precision: Precision = "ieee", deterministic: bool = True) -> None:
    """Set how this process computes from now on.

    TF32 is torch's default for convolutions on a GPU; attention by fused kernels has no second derivative.

    Args:
        deterministic: refuse operators with results that vary in their last bits.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a check, which costs time
    for switch in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, switch)(False)


def described(device: torch.device, name: str, precision: Precision = "ieee", deterministic: bool = True) -> str:
    """Describe how results were computed, such as "cuda:0 NVIDIA H100, float32 (IEEE), torch 2.13.0".

    Args:
        name: of the device in results.
        deterministic: False if operators without a deterministic algorithm were allowed.
    """
    if device.type != "cuda":
        own = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, float32 (IEEE)"
    else:
        products = "float32 (IEEE)" if precision == "ieee" else "TF32 products"
        own = f"{torch.cuda.get_device_name(device)}, {products}"
    words = f"{name} {own}, torch {torch.__version__}"
    return words if deterministic else f"{words}, operators that may change the last bits"


def driver() -> str:
    """The NVIDIA driver's version; "" if there is none."""
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.is_file() else []
    return next((word for word in words if word[:1].isdigit() and "." in word), "")
