"""Records every use of a parameter while a model runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class Unsupported(Exception):
    """The model uses a parameter in an unknown way, or mixes examples: use vmap, which handles everything."""


class CallRecorder(TorchFunctionMode):
    """Runs a model and passes every use of a parameter to the method that knows its gradient.

    Args:
        names: of the parameters, by id.
        layers: the method for each function of torch; any other function raises Unsupported.
    """

    def __init__(self, names: Mapping[int, str], layers: Mapping[Any, Callable[..., Tensor]]) -> None:
        self.names, self.layers = names, layers

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self.among(args) and not self.among(kwargs.values()):
            return func(*args, **kwargs)
        if func in self.layers:
            return self.layers[func](self, *args, **kwargs)
        result = func(*args, **kwargs)
        if any(isinstance(part, Tensor) for part in tree_leaves(result)):  # not just a shape or a type
            raise Unsupported(f"a parameter goes into {getattr(func, '__name__', func)}")
        return result

    def among(self, values: Iterable[Any]) -> bool:
        """True if one of the values is a parameter, or a list that contains one, as for torch.cat."""
        return any(self.among(v) if isinstance(v, list | tuple) else id(v) in self.names for v in values)

    def name(self, t: Tensor | None) -> str | None:
        return None if t is None else self.names.get(id(t))
