"""Inspection: before a client trains on weights, it checks whether an honest server would have sent them.

It knows the network and the weights of its last round. Its examples take no part, so no result says anything about them.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, nn

from fedgauge.client.inspection.results import DetectorResult, DetectorResults
from fedgauge.client.inspection.weights import inspect_weights
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Params

WITHHELD = 111  # the error code of an answer that a guard withholds
MOST_APART = 5  # rounds that can explain a jump: the server says how many have passed
REASON = "withheld by the client's guard"  # the same for every cause
Mode = Literal["off", "log", "warn", "refuse"]


def fingerprint(model: nn.Module) -> str:
    """A digest of the tree of modules: their names, types, settings and shapes of tensors, but no values."""
    parts = []
    for name, module in model.named_modules():
        kind = type(module)
        parts.append(f"{name}|{kind.__module__}.{kind.__qualname__}|{module.extra_repr()}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parts += [f"{name}|{tuple(t.shape)}|{t.dtype}" for name, t in tensors.items()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class InspectionPolicy:
    """A client's policy for the weights that the server sends.

    Args:
        inspect: log: write down every result; warn: report alarms only; refuse: report alarms and withhold the update.
        architecture: `fingerprint` of the agreed network; default: that of the first round.
    """

    inspect: Mode = "off"
    architecture: str | None = None

    def findings(
        self, model: nn.Module, params: Params, round: int, memory: TransformState, rng: Generator | None = None
    ) -> DetectorResults:
        """Inspect a round's weights; `memory` is what the client keeps from round to round, and is updated.

        It keeps the first network's fingerprint and the last weights that raised no alarm: no more than a model.

        Args:
            rng: samples the rows of large matrices; None: the client's own entropy. A server that could predict the sample
                would put its rows elsewhere.
        """
        if self.inspect == "off":
            return DetectorResults(())
        previous = {k.removeprefix(_WEIGHTS): t for k, t in memory.items() if k.startswith(_WEIGHTS)}
        apart = min(max(round - int(memory.get(_ROUND, 0)), 1), MOST_APART)
        # of another network there is nothing to compare: the fingerprint reports it
        alike = {k: t.shape for k, t in previous.items()} == {k: t.shape for k, t in params.items()}
        met = fingerprint(model)
        first = memory.setdefault(FIRST_NETWORK, torch.tensor(list(met.encode()), dtype=torch.uint8))
        agreed = self.architecture or bytes(first.tolist()).decode()
        words = f"its fingerprint is {met}, the agreed one is {agreed}"
        network = DetectorResult("architecture", "", float(met != agreed) * 2, words)
        embeddings = nn.Embedding | nn.EmbeddingBag
        tables = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, embeddings)}
        weights = inspect_weights(params, previous if alike else None, apart, tables, rng)
        found = DetectorResults.of([network, *weights])
        if not found.alarms:
            for name in [k for k in memory if k.startswith(_WEIGHTS)]:
                del memory[name]
            memory.update({_WEIGHTS + k: t.detach().clone() for k, t in params.items()})
            memory[_ROUND] = torch.tensor(round)
        return found

    def withhold(self, results: DetectorResults) -> str:
        """Return the reasons not to answer, for the owner only; empty if the client may."""
        return results.reasons if self.inspect == "refuse" else ""

    def report(self, results: DetectorResults, round: int) -> str:
        """Return the owner's line on a round; empty where the mode keeps quiet."""
        if results.alarms:
            return f"round {round}: alarm, suspicion {results.suspicion:.3g}: {results.reasons}"
        return f"round {round}: suspicion {results.suspicion:.3g}" if self.inspect == "log" else ""


FIRST_NETWORK = "architecture"  # key of the first network's fingerprint in a memory
_ROUND, _WEIGHTS = "round", "params."
