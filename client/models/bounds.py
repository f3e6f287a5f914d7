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
_SLACK = 8  # times the bound that may be built meanwhile: without values, with them, copied, and part by part


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
        """Raise TooLarge inside this context as soon as modules register too much; a shared layer counts each time.

        It counts what this process builds, so in one thread only.
        """
        entries = modules = 0

        def count(tensor: Tensor | None) -> None:
            nonlocal entries
            entries += 0 if tensor is None or is_lazy(tensor) else tensor.numel()
            if entries > _SLACK * self.entries:
                raise TooLarge

        def enter(module: nn.Module | None) -> None:
            nonlocal modules
            modules += 0 if module is None else sum(1 for _ in module.modules())
            if modules > _SLACK * self.modules:
                raise TooLarge

        hooks = [
            register_module_parameter_registration_hook(lambda module, name, parameter: count(parameter)),
            register_module_buffer_registration_hook(lambda module, name, buffer: count(buffer)),
            register_module_module_registration_hook(lambda module, name, part: enter(part)),
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
