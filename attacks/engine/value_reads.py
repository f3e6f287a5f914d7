"""Whether a computation reads a number out of a tensor that depends on its input, as `if x.max() > 1` and float(x) do.

What it then does holds for all examples at once: problems in one batch would share a branch that each takes for itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)
_LEAVING = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)


class ValueReads(TorchDispatchMode):
    """A context that notes whether a value that depends on some tensors is read.

    Args:
        inputs: whatever is computed from them depends on them; known by memory, so views do as well.
    """

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no modes
        self.found = False
        self._depending = {s for t in inputs for s in _storages(t)}
        self._calls = _Calls(self)

    def __enter__(self) -> "ValueReads":
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*raised)  # type: ignore[no-untyped-call]

    def depends(self, values: Any) -> bool:
        return any(s in self._depending for value in tree_leaves(values) for s in _storages(value))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.depends((args, kwargs)):
            self.found = self.found or func in _READING
            self._depending.update(s for value in tree_leaves(result) for s in _storages(value))
        return result


class _Calls(TorchFunctionMode):
    """Sees the methods by which numbers leave torch without an operation of it."""

    def __init__(self, reads: ValueReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _LEAVING and self._reads.depends(args[:1]):
            self._reads.found = True
        return func(*args, **(kwargs or {}))


def _storages(value: Any) -> list[StorageWeakRef]:
    """A tensor's memory, by a reference that keeps its address from being used again but not its numbers."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return []
    return [StorageWeakRef(value.untyped_storage())]
