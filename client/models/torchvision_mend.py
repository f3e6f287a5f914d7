"""Make torchvision importable with a CPU build of torch.

torchvision's PyPI wheel is built for CUDA. Beside a CPU-only torch its compiled operators do not load, and
`import torchvision` then raises "operator torchvision::nms does not exist"; so does transformers, which imports
torchvision wherever it is installed. Only the declarations of two operators are missing for the import to succeed, so
they are declared here. Still unavailable: `ops.nms`, `ops.deform_conv2d` and torchvision's own image codecs.
"""

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_OPERATORS = ("nms", "qnms")


@cache  # the declarations live as long as this reference
def mend_torchvision() -> Any:
    """Declare torchvision's missing operators; does nothing where they load, or where torch has CUDA."""
    import torch  # a second, which a command that only prints its help does not pay

    spec = importlib.util.find_spec("torchvision")
    if torch.version.cuda is not None or spec is None or spec.origin is None:
        return None
    for compiled in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(compiled)
        except OSError:  # built for CUDA: its libraries are not here
            continue
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class _BeforeTorchvision:
    """Stands before Python's own finders, and mends torchvision when it is first looked for."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Leaves the finding to those behind it."""
        if name == "torchvision" and cls in sys.meta_path:
            sys.meta_path.remove(cls)
            mend_torchvision()


def mend_when_imported() -> None:
    """Mend torchvision as soon as anything imports it."""
    if "torchvision" not in sys.modules and _BeforeTorchvision not in sys.meta_path:
        sys.meta_path.insert(0, _BeforeTorchvision)
