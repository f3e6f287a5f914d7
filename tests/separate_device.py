"""A device that computes on the CPU and refuses to mix with it, as a GPU does: for machines that have none."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import adam
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)  # a type that torch knows, for which it starts nothing
aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default)
# operators that take tensors of two devices: copies, and indices on the CPU
MIXING = {aten.copy_.default, aten._to_copy.default, aten._index_put_impl_.default, *INDEXING}


class SeparateTensor(Tensor):
    """A tensor on the separate device."""

    held: Tensor  # its values, on the CPU

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> "SeparateTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
            requires_grad=held.requires_grad,
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SeparateTensor({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"a tensor of {DEVICE} cannot be converted to numpy: copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


class _Calls(TorchDispatchMode):
    """Sees the operators that make a tensor on the device out of none."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


@contextmanager
def separate_device() -> Iterator[torch.device]:
    """A context in which there is a device beside the CPU."""
    before = torch._C._only_lift_cpu_tensors()
    checked = adam._device_dtype_check_for_fused
    adam._device_dtype_check_for_fused = lambda *_, **__: None  # it lists the types of devices with a fused Adam
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(...) copies to a device by an operator
    try:
        with _Calls():
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
        adam._device_dtype_check_for_fused = checked


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    wanted = kwargs.get("device")
    to = None if wanted is None else torch.device(wanted).type
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    there = [t for t in tensors if isinstance(t, SeparateTensor)]
    if to == DEVICE.type:
        kwargs["device"] = "cpu"
    if kwargs.get("generator") is not None and (there or to == DEVICE.type):
        raise RuntimeError(f"{func}: expected a generator of {DEVICE}, but found one of the CPU")
    if there and func not in MIXING and any(t.dim() > 0 for t in tensors if not isinstance(t, SeparateTensor)):
        raise RuntimeError(f"{func}: expected all tensors on the same device, but found {DEVICE} and the CPU")
    if there and func in INDEXING and not isinstance(args[0], SeparateTensor):
        raise RuntimeError(f"{func}: a tensor of the CPU cannot be indexed by one of {DEVICE}")
    result = func(*_within(args), **_within(kwargs))
    if func is aten.copy_.default:
        return args[0]
    if func is aten._local_scalar_dense.default or not (to == DEVICE.type or (there and to is None)):
        return result
    wrapped = tree_map(lambda t: SeparateTensor(t) if isinstance(t, Tensor) else t, result)
    return return_and_correct_aliasing(func, tuple(args), kwargs, wrapped) if there else wrapped


def _within(tree: Any) -> Any:
    return tree_map(lambda t: t.held if isinstance(t, SeparateTensor) else t, tree)
