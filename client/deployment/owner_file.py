"""The owner's file: the data, chain, grading and guard of a deployed client."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import torch

from fedgauge.client import toml_text
from fedgauge.client.components import (
    Checked,
    Count,
    Positive,
    Range,
    SpecError,
    Table,
    allowing,
    build,
    call,
    coerce,
    errors_in,
    settings_of,
    with_absolute_paths,
)
from fedgauge.client.data.batches import batch_of
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.federation import DATASET
from fedgauge.client.files import read_file
from fedgauge.client.inspection.policy import InspectionPolicy
from fedgauge.client.models.losses import CROSS_ENTROPY
from fedgauge.client.protocol import MOST_CLIENTS
from fedgauge.client.psnr import PSNR_CAP
from fedgauge.client.update import Batch

MOST_PARAMETERS = 2**28  # of a network that a server may name, unless the owner says otherwise: 1 GiB
# a coarser one would report every reconstruction as exact
Precision = Annotated[float, Range(f"above 0 and at most {PSNR_CAP:g} dB", lambda v: 0 < v <= PSNR_CAP)]
Number = Annotated[int, Range(f"in 0..{MOST_CLIENTS - 1}", lambda n: 0 <= n < MOST_CLIENTS)]
_DRAW = ("batch_size", "whole", "sampling")
_SPLIT = ("partition", "alpha", "shards_per_client", "auxiliary")  # of a data set that several clients share


@dataclass(frozen=True)
class GradingPolicy(Checked):
    """Limits on the grades of reconstructions that the server may request.

    Args:
        mode: off: no answer; scores: the PSNR of each reconstruction.
        precision: PSNR is rounded to steps of this, in dB, counted from 60 dB down, > 0 and at most 60.
        queries: the most answers about one batch of examples, >= 1, over all rounds.
    """

    mode: Literal["off", "scores"] = "off"
    precision: Precision = 0.5
    queries: Count = 8


@dataclass(frozen=True)
class GuardPolicy(Checked, InspectionPolicy):
    """Checks of the weights that come, and of an update before it is sent; one with entries that are not finite never is.

    Args:
        max_norm: the largest Euclidean norm that is sent; None: any.
    """

    max_norm: Positive | None = None


@dataclass(frozen=True)
class Draw(Checked):
    """The draw of a round's examples."""

    batch_size: Count = 1
    whole: bool = False  # all training images are this client's own
    sampling: Literal["secret", "agreed"] = "secret"  # by the operating system's entropy, or by the protocol's seed


@dataclass(frozen=True, eq=False)
class OwnerConfig(Checked):
    """An owner's file, checked."""

    path: Path
    client: Number  # the server's number for this client
    state: Path
    data: Table
    split: Table  # how a dataset that several clients share is divided
    draw: Draw
    chain: tuple[Table, ...]
    grading: GradingPolicy
    guard: GuardPolicy | None
    allow: Sequence[str] = ()  # packages outside fedgauge that may provide components
    loss: Table = field(default_factory=lambda: CROSS_ENTROPY)
    canary: bool = False  # it sends a fixed random direction in place of an update, which measures the noise
    updates: Count | None = None  # the most for servers, over all runs; None: any number
    max_parameters: Count = MOST_PARAMETERS  # the most entries, buffers included, of a network that a server may name
    secure_sum: Table | None = None  # terms of the sum that updates must be part of; None: single updates are allowed

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.canary and self.secure_sum is not None:
            raise ValueError("canary = true and [secure_sum] exclude each other: remove one")

    @classmethod
    def load(cls, path: Path) -> "OwnerConfig":
        """Read and check a file; SpecError names it, the table, the value and what is allowed."""
        with errors_in(path, OSError, UnicodeDecodeError):
            text = read_file(path, toml_text.MOST).decode()
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: Path) -> "OwnerConfig":
        with errors_in(path, ValueError):
            tables = toml_text.parse(text.encode())
            if taken := tables.keys() & {"path", "split", "draw"}:
                raise SpecError(f"unknown key {min(taken)!r}")
            data, guard = coerce(tables.get("data", {}), dict, "[data]"), tables.get("guard")
            split = {key: data[key] for key in _SPLIT if key in data}
            draw = settings_of(Draw, {key: data[key] for key in _DRAW if key in data}, "[data]")
            if draw.whole and split:
                raise SpecError(f"[data]: {', '.join(split)} divides shared data: remove it, or whole = true")
            checked = {
                "path": path,
                "state": path.absolute().parent / coerce(tables.get("state", "state"), str, "state"),
                "data": {key: value for key, value in data.items() if key not in (*_DRAW, *_SPLIT)},
                "split": split,
                "draw": draw,
                "grading": settings_of(GradingPolicy, tables.get("grading", {}), "[grading]"),
                "guard": None if guard is None else settings_of(GuardPolicy, guard, "[guard]"),
            }
            return settings_of(cls, {**tables, **checked}, "the owner's file")

    @cached_property
    def dataset(self) -> Dataset:
        with self.allowing():  # paths start from the owner's file
            table = with_absolute_paths(self.data, DATASET, self.path.parent)
            found: Dataset = build(table, "[data]", DATASET, more_keys=(*_DRAW, *_SPLIT))
            call(found.check, {}, "[data]")
        return found

    def allowing(self) -> AbstractContextManager[None]:
        """Allow components of the packages that this owner lists, and no others."""
        return allowing(self.allow, [self.path.absolute().parent], plug_ins=False)

    def batch(self, rows: Sequence[int]) -> Batch:
        return batch_of(self.dataset.x, self.dataset.y, torch.tensor(rows, dtype=torch.int64))
