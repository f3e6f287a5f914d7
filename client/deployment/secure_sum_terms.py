"""Interface of a secure sum, independent of the transport: plain values in, plain values out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgauge.client.collusion import Tolerance
from fedgauge.client.components import ComponentKind, Table, build

Value = int | str | bytes | list[int] | list[bytes] | NDArray[Any]
Record = dict[str, Value]  # a message, or what a client keeps
Vector = NDArray[np.float64]
Train = Callable[[], tuple[Vector, int]]  # -> a finished update, flat, and the number of its examples


class SecureSum(ABC):
    """Both sides of a secure sum; a frozen dataclass of the terms that all parties agree on.

    Each question names its session (bytes) and its step (text): a client answers a step of a session once.

    Attributes:
        group: the most clients in one sum.
    """

    group: int

    @property
    @abstractmethod
    def least(self) -> int:
        """The fewest clients in one sum."""

    @property
    @abstractmethod
    def tolerance(self) -> Tolerance:
        """Numbers of clients that may collude with the server, or drop out."""

    @abstractmethod
    def check(self, question: Mapping[str, Value]) -> None:
        """ValueError if it is no step under these terms; asked before anything is kept of a question."""

    @abstractmethod
    def answer(self, state: Mapping[str, Value], question: Mapping[str, Value], train: Train) -> tuple[Record, Record]:
        """The client's side: what it keeps from now on, and its answer; ValueError: it does not answer this question."""

    @abstractmethod
    def rounds(self, members: Sequence[int], size: int) -> Generator[dict[int, Record], Mapping[int, Record], Any]:
        """The server's side: yields questions by member, is sent the answers, and returns mean, examples and members."""


SECURE_SUM = ComponentKind("a secure sum", ("fedgauge.secure_sums",), SecureSum)
PAIRWISE = "PairwiseMasking"  # clients may not import defenses, so the registry finds it by name


def build_secure_sum(table: Table, where: str = "[secure_sum]") -> SecureSum:
    """The secure sum of a table's terms."""
    found: SecureSum = build({"use": PAIRWISE, **table}, where, SECURE_SUM)
    return found
