"""A wave's whole step, compiled: one graph from the images to objectives and gradients, including both derivatives.

torch.compile cannot trace a step that differentiates a derivative (AOT autograd refuses double backward). So make_fx first
records the step's operators while it runs, which leaves a plain function of tensors.
"""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fedgauge.attacks.engine.batch_limiter import BatchLimiter
from fedgauge.attacks.engine.deadline import Variables
from fedgauge.attacks.matching.problems import ObservedUpdates, Problems, SearchFails

ValueAndSlopes = tuple[Tensor, Variables]
Step = Callable[..., ValueAndSlopes]


def missing(device: torch.device) -> str:
    """Name the part that torch.compile lacks on this machine; empty if nothing is missing."""
    if device.type == "cuda":
        return "" if importlib.util.find_spec("triton") else "the package triton"
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        return "a C++ compiler (g++ or clang++, or the one that CXX names)"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if headers.is_file() else "Python's header files (Python.h; python3-dev in Debian)"


class CompiledStep:
    """`Problems.value_and_slopes`, compiled for as many problems as the limiter allows.

    Fewer problems are padded with repetitions of the last one, since another size would need compiling again.
    """

    def __init__(self, problems: Problems, limiter: BatchLimiter) -> None:
        if reason := missing(next(iter(problems.params.values())).device):
            raise SearchFails(f"compile needs {reason}, missing here; set compile = false: same result, slower")
        self.problems, self.limiter = problems, limiter
        self._steps: dict[int, Step] = {}
        self._keys: tuple[tuple[str, ...], ...] | None = None

    def value_and_slopes(self, variables: Variables, rows: Tensor, likelihood_weight: float = 1.0) -> ValueAndSlopes:
        count, units = len(rows), self.problems.units
        size = min(self.limiter.count, len(units)) * units.shape[1]
        if count < size:
            padding = torch.cat([torch.arange(count), torch.full((size - count,), count - 1)])
            variables, rows = {name: t[padding] for name, t in variables.items()}, rows[padding]
        value, slopes = self._full(variables, rows, likelihood_weight)
        return value[:count], {name: t[:count] for name, t in slopes.items()}

    def _full(self, variables: Variables, rows: Tensor, likelihood_weight: float) -> ValueAndSlopes:
        seen, labels = self.problems.chosen(rows)
        if self._keys is None:  # the first step decides how the model is differentiated, and which forms it needs
            result = self.problems.value_and_slopes(variables, rows, likelihood_weight)
            self._keys = tuple(seen.forms)
            return result
        forms = {key: seen.form(*key) for key in self._keys}
        tensors = (variables, forms, labels, torch.as_tensor(likelihood_weight).to(variables["x"]))
        if len(rows) not in self._steps:
            self._steps[len(rows)] = self._recorded(seen, *tensors)
        with torch.no_grad():
            return self._steps[len(rows)](*tensors)

    def _recorded(self, seen: ObservedUpdates, *tensors: Any) -> Step:
        """A compiled function of the tensors that change between steps and problems; everything else is constant in it."""
        leaves, layout = tree_flatten(tensors)
        names = list(tensors[0])

        def step(*leaves: Tensor) -> list[Tensor]:
            variables, forms, labels, likelihood_weight = tree_unflatten(list(leaves), layout)
            value, slopes = self.problems.differentiated(variables, seen.with_forms(forms), labels, likelihood_weight)
            return [value, *slopes.values()]

        compiled = torch.compile(make_fx(step)(*leaves), dynamic=False)

        def run(*tensors: Any) -> ValueAndSlopes:
            value, *slopes = compiled(*tree_leaves(tensors))
            return value, dict(zip(names, slopes, strict=True))

        return run
