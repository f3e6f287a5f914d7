"""The owner's file: the data, chain, grading and guard of a deployed client."""

import json
import tomllib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from fedgauge.client import toml_text
from fedgauge.client.components import (
    SpecError,
    Table,
    allowing,
    build,
    check_above_zero,
    check_at_least,
    coerce,
    settings_of,
    with_absolute_paths,
)
from fedgauge.client.data.images import Dataset, batch_of
from fedgauge.client.federation import DATASET
from fedgauge.client.files import read_file
from fedgauge.client.inspection.policy import InspectionPolicy, Mode
from fedgauge.client.models.losses import CROSS_ENTROPY
from fedgauge.client.pairing import PSNR_CAP
from fedgauge.client.protocol import MOST_CLIENTS
from fedgauge.client.update import Batch

MOST_PARAMETERS = 2**28  # of a network that a server may name, unless the owner says otherwise: 1 GiB
_TOP = (
    "client",
    "state",
    "allow",
    "data",
    "loss",
    "chain",
    "canary",
    "updates",
    "max_parameters",
    "secure_sum",
    "grading",
    "guard",
)
_SPLIT = ("partition", "alpha", "shards_per_client", "auxiliary")  # of a data set that several clients share


@dataclass(frozen=True)
class GradingPolicy:
    """What the owner lets the server learn about the quality of its reconstructions.

    Args:
        mode: off: no answer; scores: the PSNR of each reconstruction.
        precision: PSNR is rounded to steps of this, in dB, counted from 60 dB down, > 0 and at most 60.
        queries: the most answers about one batch of examples, >= 1, over all rounds.
    """

    mode: Literal["off", "scores"] = "off"
    precision: float = 0.5
    queries: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.precision <= PSNR_CAP:  # a coarser one would tell every reconstruction as exact
            raise ValueError(f"precision must be above 0 and at most {PSNR_CAP:g} dB, got {self.precision}")
        if self.queries < 1:
            raise ValueError(f'queries must be at least 1, got {self.queries}; mode = "off" answers none')


@dataclass(frozen=True)
class GuardPolicy:
    """What an update must pass before it leaves; an update with entries that are not finite never leaves.

    Args:
        max_norm: the largest Euclidean norm that is sent; None: any.
        audit: an attack that the client first tries on its own update; None: none.
        iterations, seconds: the budget of that attack.
        threshold: an update is withheld if its best reconstructed example reaches this PSNR (dB), or of text this ROUGE-1 (%);
            None: 20 dB or 50 %.
        inspect, architecture, examples: what to do about suspicious weights, as in `InspectionPolicy`.
    """

    max_norm: float | None = None
    audit: str | None = None
    iterations: int = 100
    seconds: float = 20.0
    threshold: float | None = None
    inspect: Mode = "off"
    architecture: str | None = None
    examples: bool | None = None

    def __post_init__(self) -> None:
        check_above_zero(self, "max_norm")
        check_at_least(self, 1, "iterations")
        check_above_zero(self, "seconds")

    def inspection_policy(self, private: bool) -> InspectionPolicy:
        """What to do about the weights that the server sends.

        Args:
            private: whether the chain promises differential privacy.
        """
        return InspectionPolicy(self.inspect, self.architecture, self.examples).beside(private)

    def check(self, private: bool) -> None:
        """SpecError if the examples would decide on a refusal although the chain promises differential privacy."""
        deciding = {"audit": self.audit is not None, "examples = true": self.examples is True}
        if private and (named := [key for key, decides in deciding.items() if decides]):
            raise SpecError(
                f"[guard]: with {named[0]} the examples decide whether the client answers, which the epsilon of a chain of clip "
                "and noise does not cover: remove it, or the chain's noise"
            )


@dataclass(frozen=True, eq=False)
class OwnerConfig:
    """An owner's file, checked.

    Args:
        client: the server's number for this client.
        state: the client's own folder.
        allow: packages outside fedgauge that may provide components.
        data: the dataset's table.
        split: how a dataset that several clients share is divided.
        batch_size: examples a round.
        whole: whether all training images are this client's own.
        sampling: secret: the operating system's entropy draws a round's examples; agreed: the protocol's seed does.
        loss: what is minimised.
        chain: what is applied.
        canary: it sends a fixed random direction in place of an update of its data, which measures how much the noise protects.
        updates: the most updates for servers, over all runs; None: any number.
        max_parameters: the most entries (parameters and buffers) of a network that a server may name.
        secure_sum: the terms of the sum in which alone an update may leave; None: it may leave by itself.
        guard: None: no guard.
    """

    path: Path
    client: int
    state: Path
    allow: frozenset[str]
    data: Table
    split: Table
    batch_size: int
    whole: bool
    sampling: Literal["secret", "agreed"]
    loss: Table
    chain: tuple[Table, ...]
    canary: bool
    updates: int | None
    max_parameters: int
    secure_sum: Table | None
    grading: GradingPolicy
    guard: GuardPolicy | None

    @classmethod
    def load(cls, path: Path) -> "OwnerConfig":
        """Read and check a file; SpecError names it, the table, the value and what is allowed."""
        try:
            return cls.parse(read_file(path, toml_text.MOST).decode(), path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SpecError(f"{path}: there is no such file") from error
        except IsADirectoryError as error:
            raise SpecError(f"{path} is a folder: name the file in it, such as {path / 'client.toml'}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{path}: not a readable TOML file: {error}") from error

    @classmethod
    def parse(cls, text: str, path: Path) -> "OwnerConfig":
        """From the text of the file at path."""
        try:
            return cls._checked(toml_text.parse(text.encode()), path)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{path}: not a readable TOML file: {error}") from error
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from error

    @classmethod
    def _checked(cls, tables: Table, path: Path) -> "OwnerConfig":
        if unknown := sorted(tables.keys() - set(_TOP)):
            raise SpecError(f"unknown key {unknown[0]!r} (an owner's file has: {', '.join(_TOP)})")
        for key in ("client", "data", "chain"):
            if key not in tables:
                raise SpecError(f"the owner's file needs {key!r}")
        client = coerce(tables["client"], int, "client")
        if not 0 <= client < MOST_CLIENTS:
            raise SpecError(f"client must lie in 0..{MOST_CLIENTS - 1}, got {client}")
        data = dict(coerce(tables["data"], dict, "[data]"))
        batch_size = coerce(data.pop("batch_size", 1), int, "[data]: batch_size")
        whole = coerce(data.pop("whole", False), bool, "[data]: whole")
        sampling = coerce(data.pop("sampling", "secret"), Literal["secret", "agreed"], "[data]: sampling")
        shared = {key: data.pop(key) for key in _SPLIT if key in data}
        if batch_size < 1:
            raise SpecError(f"[data]: batch_size must be at least 1, got {batch_size}")
        if whole and shared:
            raise SpecError(
                f"[data]: {next(iter(shared))} divides data that clients share; whole = true means that all are this client's"
            )
        updates = coerce(tables["updates"], int, "updates") if "updates" in tables else None
        if updates is not None and updates < 1:
            raise SpecError(f"updates must be at least 1, got {updates}")
        max_parameters = coerce(tables.get("max_parameters", MOST_PARAMETERS), int, "max_parameters")
        if max_parameters < 1:
            raise SpecError(f"max_parameters must be at least 1, got {max_parameters}")
        chain = coerce(tables["chain"], list, "[[chain]]")
        canary = coerce(tables.get("canary", False), bool, "canary")
        if canary and "secure_sum" in tables:
            raise SpecError(
                "canary = true sends an update that is looked at by itself, and [secure_sum] hides it: remove one of them"
            )
        folder = path.absolute().parent
        return cls(
            path=path,
            client=client,
            state=folder / coerce(tables.get("state", "state"), str, "state"),
            allow=frozenset(coerce(tables.get("allow", []), Sequence[str], "allow")),
            data=data,
            split=shared,
            batch_size=batch_size,
            whole=whole,
            sampling=sampling,
            loss=coerce(tables.get("loss", CROSS_ENTROPY), dict, "[loss]"),
            chain=tuple(coerce(t, dict, f"[[chain]] #{i}") for i, t in enumerate(chain, 1)),
            canary=canary,
            updates=updates,
            max_parameters=max_parameters,
            secure_sum=coerce(tables["secure_sum"], dict, "[secure_sum]") if "secure_sum" in tables else None,
            grading=settings_of(GradingPolicy, tables.get("grading", {}), "[grading]"),
            guard=settings_of(GuardPolicy, tables["guard"], "[guard]") if "guard" in tables else None,
        )

    @property
    def terms(self) -> dict[str, Any]:
        """What the epsilon of an update depends on in this file, as JSON; secret: whether the draw of its examples amplifies it."""
        chain = json.loads(json.dumps(self.chain, default=str))
        # of shared data the server chooses how much is this client's, which in another run may have been one batch
        return {"chain": chain, "batch_size": self.batch_size, "secret": self.sampling == "secret" and self.whole}

    @cached_property
    def dataset(self) -> Dataset:
        """The images."""
        beside = ("batch_size", "whole", "sampling", *_SPLIT)
        with self.allowing():  # paths start from the owner's file
            found: Dataset = build(
                with_absolute_paths(self.data, DATASET, self.path.parent), "[data]", DATASET, beside=beside
            )
        return found

    def allowing(self) -> AbstractContextManager[None]:
        """Allow components of the packages that this owner lists, and no others."""
        return allowing(self.allow, [self.path.absolute().parent], plug_ins=False)

    def batch(self, rows: Sequence[int]) -> Batch:
        """The examples of these rows of the training images."""
        return batch_of(self.dataset.x, self.dataset.y, torch.tensor(rows, dtype=torch.int64))
