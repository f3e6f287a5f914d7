"""A wave's whole step, recorded: one graph from the images to objectives and gradients, including both derivatives.

torch.compile cannot trace a step that differentiates a derivative (AOT autograd refuses double backward). So make_fx first
records the step's operators while it runs, which leaves a plain function of tensors. On the CPU torch.compile makes kernels of
it; on a GPU a CUDA graph replays its calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fedgauge.attacks.engine.batch_limiter import BatchLimiter, raise_if_exhausted
from fedgauge.attacks.engine.computation import error_line
from fedgauge.attacks.engine.deadline import Variables
from fedgauge.attacks.matching.problems import ObservedUpdates, Problems
from fedgauge.client.components import own_line

ValueAndSlopes = tuple[Tensor, Variables]
Step = Callable[..., ValueAndSlopes]


class CompiledStep:
    """`Problems.value_and_slopes`, recorded for as many problems as the limiter allows.

    Fewer problems are padded with repetitions of the last one, since another size would need recording again. A step that
    cannot be recorded or compiled runs plain, and its results note the reason.
    """

    def __init__(self, problems: Problems, limiter: BatchLimiter) -> None:
        self.problems, self.limiter = problems, limiter
        self._steps: dict[int, Step] = {}
        self._keys: tuple[tuple[str, ...], ...] | None = None
        self._plain = False
        if problems.way.route == "loop":
            self._decline("problems are differentiated one after the other")

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
        given = () if labels is None else (labels,)
        tensors = (variables, forms, given, torch.as_tensor(likelihood_weight).to(variables["x"]))
        with torch.no_grad():
            if len(rows) in self._steps:
                return self._steps[len(rows)](*tensors)
            try:
                step = self._recorded(seen, *tensors)
                result = step(*tensors)  # torch.compile compiles now
            except Exception as error:  # a user's model may do anything, and a compiler may be missing
                raise_if_exhausted(error)
                self._decline(f"the step cannot be compiled ({error_line(error)}{own_line(error)})")
                return self.problems.value_and_slopes(variables, rows, likelihood_weight)
        self._steps[len(rows)] = step
        return result

    def _decline(self, why: str) -> None:
        way, self._plain = self.problems.way, True
        self.problems.way = replace(way, note="; ".join(filter(None, (way.note, f"compile has no effect: {why}"))))

    def _recorded(self, seen: ObservedUpdates, *tensors: Any) -> Step:
        """A faster function of the tensors that change between steps and problems; everything else is constant in it."""
        leaves, layout = tree_flatten(tensors)

        def step(*leaves: Tensor) -> list[Tensor]:
            variables, forms, given, likelihood_weight = tree_unflatten(list(leaves), layout)
            labels = given[0] if given else None
            value, slopes = self.problems.differentiated(variables, seen.with_forms(forms), labels, likelihood_weight)
            return [value, *slopes.values()]

        recorded = make_fx(step)(*leaves)
        fast = replayed(recorded, leaves) if leaves[0].is_cuda else torch.compile(recorded, dynamic=False)

        def run(*tensors: Any) -> ValueAndSlopes:
            value, *slopes = fast(*tree_leaves(tensors))
            return value, dict(zip(tensors[0], slopes, strict=True))

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
    held = recorded, kept, results  # the graph reads and writes their memory, and the constants that were recorded

    def run(*inputs: Tensor) -> list[Tensor]:
        _, kept, results = held
        for mine, given in zip(kept, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
        return [t.clone() for t in results]

    return run
