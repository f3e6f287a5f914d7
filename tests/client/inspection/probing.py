"""A small network, and the results of one detector among all."""

import torch
from torch import Tensor, nn

from fedgauge.client.inspection.policy import InspectionPolicy
from fedgauge.client.inspection.results import DetectorResult, DetectorResults
from fedgauge.client.models.vision import mlp
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Params

SHAPE, CLASSES = (1, 12, 12), 5


def network(seed: int = 0, hidden: tuple[int, ...] = (40,)) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(SHAPE, CLASSES, hidden=list(hidden))


def with_(params: Params, **changed: Tensor) -> Params:
    names = {name.replace(".", "_"): name for name in params}
    return {**params, **{names[name.removeprefix("p")]: t for name, t in changed.items()}}


def inspect(
    model: nn.Module, params: Params, previous: Params | None, apart: int = 1, agreed: str | None = None
) -> DetectorResults:
    """A client's findings of weights some rounds after others, or in its first round."""
    policy, memory = InspectionPolicy("log", agreed), TransformState()
    if previous is not None:
        assert not policy.findings(model, previous, 1, memory).alarms
    return policy.findings(model, params, 1 + apart, memory)


def alarmed(found: DetectorResults) -> dict[str, DetectorResult]:
    return {f.detector: f for f in found.alarms}


def score(found: DetectorResults, detector: str) -> float:
    return next(f.score for f in found.results if f.detector == detector)
