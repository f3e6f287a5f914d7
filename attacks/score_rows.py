"""Rows of scores, as the ledger keeps them, and the names of what is in them."""

from dataclasses import dataclass

import torch
from torch import Tensor

# the metric of a row that holds the attack's own objective, where there is no truth to grade by
OBJECTIVE = "objective"
WHOLE_BATCH = -1  # the example number of a row about the whole batch
WRONG_CLIENT = "wrong_client("


@dataclass(frozen=True)
class ScoreRecord:
    """One score, as the ledger keeps it."""

    round: int
    client: int
    attack: str
    example: int
    metric: str
    value: float | None
    status: str
    seconds: float


def wrong_client(attack: str) -> str:
    """The name of the baseline that grades an attack's reconstruction against another client's truth."""
    return f"{WRONG_CLIENT}{attack})"


def came_back(x: Tensor | None) -> bool:
    """Return whether a reconstruction has anything to grade."""
    return x is not None and bool(torch.isfinite(x).all())
