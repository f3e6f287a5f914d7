"""A wave's whole step, recorded: one graph from the images to objectives and gradients, including both derivatives.

torch.compile cannot trace a step that differentiates a derivative (AOT autograd refuses double backward). So make_fx first
records the step's operators while it runs, which leaves a plain function of tensors. On the CPU torch.compile makes kernels of
it; on a GPU a CUDA graph replays its calls, to the same bits.
"""

import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fedgauge.attacks.engine.batch_limiter import BatchLimiter, raise_if_exhausted
from fedgauge.attacks.engine.computation import error_line
from fedgauge.attacks.engine.deadline import Variables
from fedgauge.attacks.matching.problems import ObservedUpdates, Problems, SearchFails
from fedgauge.client.components import own_line

ValueAndSlopes = tuple[Tensor, Variables]
Step = Callable[..., ValueAndSlopes]


def missing(device: torch.device) -> str:
    """Name the part that torch.compile lacks on this machine; empty if nothing is missing, or on a GPU."""
    if device.type == "cuda":
        return ""
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        return "a C++ compiler (g++ or clang++, or the one that CXX names)"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if headers.is_file() else "Python's header files (Python.h; python3-dev in Debian)"


class CompiledStep:
    """`Problems.value_and_slopes`, recorded for as many problems as the limiter allows.

    Fewer problems are padded with repetitions of the last one, since another size would need recording again. A step that
    cannot be recorded, such as one that reads values on the host, runs unrecorded; its results note the reason.
    """

    def __init__(self, problems: Problems, limiter: BatchLimiter) -> None:
        self.problems, self.limiter = problems, limiter
        self._steps: dict[int, Step] = {}
        self._keys: tuple[tuple[str, ...], ...] | None = None
        self._plain = problems.way.route == "loop"
        if self._plain:
            self._decline("problems are differentiated one after the other")
        elif reason := missing(next(iter(problems.params.values())).device):
            raise SearchFails(f"compile needs {reason}, missing here; set compile = false: same result, slower")

    def value_and_slopes(self, variables: Variables, rows: Tensor, likelihood_weight: float = 1.0) -> ValueAndSlopes:
        if self._plain:
            return self.problems.value_and_slopes(variables, rows, likelihood_weight)
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
        with torch.no_grad():
            if len(rows) not in self._steps:
                try:
                    self._steps[len(rows)] = self._recorded(seen, *tensors)
                except Exception as error:  # a user's model may do anything, and a graph takes less than a step
                    raise_if_exhausted(error)
                    self._decline(f"the step cannot be recorded ({error_line(error)}{own_line(error)})")
                    return self.problems.value_and_slopes(variables, rows, likelihood_weight)
            return self._steps[len(rows)](*tensors)

    def _decline(self, why: str) -> None:
        way, self._plain = self.problems.way, True
        self.problems.way = replace(way, note="; ".join(filter(None, (way.note, f"compile has no effect: {why}"))))

    def _recorded(self, seen: ObservedUpdates, *tensors: Any) -> Step:
        """A compiled function of the tensors that change between steps and problems; everything else is constant in it."""
        leaves, layout = tree_flatten(tensors)
        names = list(tensors[0])

        def step(*leaves: Tensor) -> list[Tensor]:
            variables, forms, labels, likelihood_weight = tree_unflatten(list(leaves), layout)
            value, slopes = self.problems.differentiated(variables, seen.with_forms(forms), labels, likelihood_weight)
            return [value, *slopes.values()]

        recorded = make_fx(step)(*leaves)
        fast = replayed(recorded, leaves) if leaves[0].is_cuda else torch.compile(recorded, dynamic=False)

        def run(*tensors: Any) -> ValueAndSlopes:
            value, *slopes = fast(*tree_leaves(tensors))
            return value, dict(zip(names, slopes, strict=True))

        return run


def replayed(recorded: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
    """A function of tensors on a GPU as a CUDA graph: all its calls at once, for inputs of the same shapes.

    Raises:
        RuntimeError: it waits for the host, or copies from it.
    """
    kept, beside = [t.clone() for t in inputs], torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # libraries allocate their workspaces in the first call
        recorded(*kept)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = recorded(*kept)

    def run(*inputs: Tensor) -> list[Tensor]:
        for mine, given in zip(kept, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
        return [t.clone() for t in results]

    return run
