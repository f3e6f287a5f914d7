"""How large a network may become, watched while it is built: one that is too large is refused long before it is complete."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

MOST_MODULES = 2**13  # ResNet-152 has some 500, GPT-2 XL some 700
_SLACK = 2  # times the bound that may be built meanwhile: a change of a network may copy it, and drop the original


class TooLarge(BaseException):
    """A network has more entries or layers than are allowed.

    Not an Exception: code that builds a network must not take it for a mistake of its own and go on.
    """


@dataclass(frozen=True)
class SizeBound:
    """The size that a network may have.

    Args:
        entries: of its parameters and buffers together, >= 1.
        modules: its layers, counted at every depth, >= 1.
    """

    entries: int
    modules: int = MOST_MODULES

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raise TooLarge inside this context as soon as modules register too much.

        On the meta device no memory is taken meanwhile. It counts what this process builds, so in one thread only.
        """
        entries = modules = 0
        met: dict[int, object] = {}  # by id, and kept alive: an id must not come back as another tensor's

        def count(tensor: Tensor | None) -> None:
            nonlocal entries
            if tensor is None or id(tensor) in met or is_lazy(tensor):
                return
            met[id(tensor)] = tensor
            entries += tensor.numel()
            if entries > _SLACK * self.entries or len(met) > _SLACK * self.modules:
                raise TooLarge

        def count_all(module: nn.Module | None) -> None:
            nonlocal modules
            # a copy has registered nothing by itself
            for part in () if module is None else module.modules():
                if id(part) in met:
                    continue
                met[id(part)] = part
                modules += 1
                if modules > _SLACK * self.modules:
                    raise TooLarge
                for tensor in (*part._parameters.values(), *part._buffers.values()):
                    count(tensor)

        hooks = [
            register_module_parameter_registration_hook(lambda module, name, parameter: count(parameter)),
            register_module_buffer_registration_hook(lambda module, name, buffer: count(buffer)),
            register_module_module_registration_hook(lambda module, name, part: count_all(part)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def check(self, model: nn.Module) -> None:
        """Raise TooLarge if a complete network is larger."""
        tensors = (*model.parameters(), *model.buffers())
        if sum(t.numel() for t in tensors) > self.entries or sum(1 for _ in model.modules()) > self.modules:
            raise TooLarge


def only_shapes() -> bool:
    """Whether networks are built without values now, to learn their sizes: on the meta device."""
    return torch.get_default_device().type == "meta"
