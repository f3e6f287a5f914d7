"""The protocol: the part of a scenario that every party of the federation knows."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from fedgauge.client.collusion import check_threshold
from fedgauge.client.components import Checked, Count, Natural, Positive, Range, SpecError, Table, coerce, settings_of
from fedgauge.client.inspection.policy import InspectionPolicy
from fedgauge.client.models.losses import CROSS_ENTROPY
from fedgauge.client.rng import generator

MOST_ROUNDS, MOST_CLIENTS = 1_000_000, 100_000


@dataclass(frozen=True)
class SecureSumOptions(Checked):
    """A simulated, ideal secure sum: the server sees only the mean of the updates of each group, which are consecutive clients.

    Args:
        group: clients in a sum, at least 2; it divides the number of clients.
        threshold: the fewest clients in a deployment's sum, more than half of the group; default: all.
        colluders: clients helping the server that the threshold must resist; default: fewer than a third of the group.
        clip: the largest absolute value of an update's entry, above 0; only for a deployment, which needs it.
    """

    group: Annotated[int, Range("at least 2", lambda n: n >= 2)]
    threshold: int | None = None
    colluders: int | None = field(default=None, repr=False)
    clip: Positive | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_threshold(self.group, self.least, self.colluders)

    @property
    def least(self) -> int:
        """Smallest number of clients in a sum: `threshold`, or else the whole group."""
        return self.group if self.threshold is None else self.threshold

    @property
    def real(self) -> Table:
        """The terms of the real secure sum, as an owner's file has them; SpecError without a clip."""
        if self.clip is None:
            raise SpecError("[secure_sum]: a deployment needs clip, the largest absolute value of an update's entry")
        colluders = {} if self.colluders is None else {"colluders": self.colluders}
        return {"group": self.group, "threshold": self.least, "clip": self.clip, **colluders}


@dataclass(frozen=True)
class CanaryOptions(Checked):
    """An empirical measurement of how well the noise protects: clients that send fixed directions, or canary examples.

    Args:
        clients: number of canaries, the last clients. With examples = 0 they send random directions instead of updates: at
            least 2, and fewer than all. Otherwise their data hold canary examples: at least 1.
        examples: canary examples of each such client, at least 0; each is among its data or not, by a fair coin.
    """

    clients: Count
    examples: Natural = 0


LEAST_CANARIES = 6  # fewer, all guessed right by luck, refute no epsilon with the 95 % of one_run.py

_NUMBERS = {
    "seed": Natural,
    "rounds": Annotated[Count, Range(f"at most {MOST_ROUNDS}", lambda n: n <= MOST_ROUNDS)],
    "clients": Annotated[Count, Range(f"at most {MOST_CLIENTS}", lambda n: n <= MOST_CLIENTS)],
}
_OPTIONAL: Mapping[str, type] = {"secure_sum": SecureSumOptions, "canaries": CanaryOptions}


@dataclass(frozen=True)
class Protocol:
    """The public part of a scenario; clients get this and nothing else.

    Args:
        seed: determines all randomness of a simulation; at least 0.
        rounds: number of training rounds, at least 1.
        clients: number of clients, at least 1.
        data, model, chain: component tables; a chain table may say each = true (per example), the model's table
            weights = "a.safetensors": the initial weights, a path relative to the current folder.
        secure_sum: which updates the server sees only as a sum; None: it sees each.
        loss: component table of what clients minimise.
        guard: what every client does about the weights that the server sends.
        canaries: which clients send a random direction in place of what they would train, or hold canary examples; None: none.

    Raises:
        SpecError: too many canaries, or groups of a secure sum that do not divide the clients.

    Example:
        >>> tables = {"rounds": 1, "clients": 4, "data": {}, "model": {}, "chain": [], "secure_sum": {"group": 2}}
        >>> Protocol.from_tables(tables).group(client=3)
        range(2, 4)
    """

    seed: int
    rounds: int
    clients: int
    data: Table
    model: Table
    chain: tuple[Table, ...]
    secure_sum: SecureSumOptions | None = None
    loss: Table = field(default_factory=lambda: dict(CROSS_ENTROPY))
    guard: InspectionPolicy = field(default_factory=InspectionPolicy)
    canaries: CanaryOptions | None = None

    def __post_init__(self) -> None:
        if self.canaries is not None:
            # one direction has no spread; some client must train
            least, most = (1, self.clients) if self.canaries.examples else (2, self.clients - 1)
            if not least <= self.canaries.clients <= most:
                raise SpecError(f"[canaries]: clients must be in {least}..{most}, got {self.canaries.clients}")
            if 0 < (total := self.canaries.clients * self.canaries.examples) < LEAST_CANARIES:
                needed = math.ceil(LEAST_CANARIES / self.canaries.clients)
                why = f"{total} canaries show no epsilon with 95 % confidence"
                raise SpecError(f"[canaries]: {why}: set examples = {needed}")
        if self.secure_sum and self.clients % self.secure_sum.group:
            raise SpecError(f"[secure_sum]: group = {self.secure_sum.group} does not divide clients = {self.clients}")

    @classmethod
    def from_tables(cls, spec: Table) -> "Protocol":
        """Read the protocol's tables of a scenario.

        Args:
            spec: the tables, as `tomllib` parses them; those of other parts are ignored.

        Raises:
            SpecError: a key is missing, unknown or out of its range; the message names the table and the mistake.
        """
        for key in ("rounds", "clients", "data", "model", "chain"):
            if key not in spec:
                raise SpecError(f"the scenario needs {key!r}")
        numbers = {key: coerce(spec.get(key, 0), hint, key) for key, hint in _NUMBERS.items()}
        data, model = (coerce(spec[k], dict, f"[{k}]") for k in ("data", "model"))
        chain = tuple(coerce(t, dict, f"[[chain]] #{i}") for i, t in enumerate(coerce(spec["chain"], list, "chain"), 1))
        return cls(
            **numbers,
            data=data,
            model=model,
            chain=chain,
            loss=coerce(spec.get("loss", CROSS_ENTROPY), dict, "[loss]"),
            guard=settings_of(InspectionPolicy, spec.get("guard", {}), "[guard]"),
            **{key: settings_of(kind, spec[key], f"[{key}]") for key, kind in _OPTIONAL.items() if key in spec},
        )

    @classmethod
    def from_json(cls, text: str) -> "Protocol":
        return cls.from_tables(json.loads(text))

    def to_json(self) -> str:
        """Return one line of JSON, the form in which Flower's run-config carries it to every client.

        Without [model] weights: a path means nothing on another machine, and a server must not make a client read a file.
        Clients and attack workers get the weights and buffers themselves with each round.
        """
        table = vars(self) | {
            "model": {key: value for key, value in self.model.items() if key != "weights"},
            "secure_sum": self.secure_sum and asdict(self.secure_sum),
            "loss": None if self.loss == CROSS_ENTROPY else self.loss,
            "guard": None if self.guard == InspectionPolicy() else asdict(self.guard),
            "canaries": self.canaries and asdict(self.canaries),
        }
        return json.dumps({key: value for key, value in table.items() if value is not None})

    @property
    def canary_clients(self) -> range:
        """The clients that are canaries, or hold canary examples."""
        return range(self.clients - (self.canaries.clients if self.canaries else 0), self.clients)

    @property
    def canary_examples(self) -> int:
        """Number of canary examples of each canary client; 0: they send directions, or there are none."""
        return self.canaries.examples if self.canaries else 0

    @property
    def coins(self) -> Tensor:
        """(M,) bool: which of all canary examples, numbered client after client, are among their client's data."""
        count = len(self.canary_clients) * self.canary_examples
        return torch.rand(count, generator=generator(self.seed, "coins")) < 0.5

    @property
    def group_size(self) -> int:
        """Number of clients in a group; the server sees only their sum. 1 without [secure_sum]."""
        return self.secure_sum.group if self.secure_sum else 1

    @property
    def groups(self) -> list[range]:
        return [self.group(client) for client in range(0, self.clients, self.group_size)]

    def group(self, client: int) -> range:
        """Return the group of a client; a client that the protocol does not list forms its own group."""
        size = self.group_size if client < self.clients else 1
        first = client - client % size
        return range(first, first + size)
