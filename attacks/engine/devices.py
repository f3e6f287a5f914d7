"""The devices of attacks and their numerics: equal waves give equal bits on one device."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

CPU = torch.device("cpu")
Precision = Literal["ieee", "tf32"]
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS gives equal bits in workspaces of a fixed size only


@dataclass(frozen=True)
class Numerics:
    """Settings and versions that decide the last digits of a result.

    Args:
        device: "cpu", "cuda:0" and so on; name: its model's.
        precision: ieee: float32 throughout; tf32: products of 10 bits of mantissa, sums in float32.
        deterministic: True if every operator gave equal bits for equal inputs.
        torch: version; driver: the GPU's, "" without one.
    """

    device: str
    name: str
    precision: Precision
    deterministic: bool
    torch: str
    driver: str


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


def numerics(device: torch.device, precision: Precision = "ieee", deterministic: bool = True) -> Numerics:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return Numerics(str(device), name, precision, deterministic, torch.__version__, driver())
    name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return Numerics(str(device), name, "ieee", True, torch.__version__, "")


def driver() -> str:
    """The NVIDIA driver's version; "" if there is none."""
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.is_file() else []
    return next((word for word in words if word[:1].isdigit() and "." in word), "")
