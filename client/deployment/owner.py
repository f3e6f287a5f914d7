"""A client of a deployment does what its owner's file says: data, chain, grading and guard; the server only names the model.

The server's protocol is taken at its word for the seed, the number of rounds and clients, and the model. All else in it is
what the server assumes.
"""

import fcntl
import hashlib
import json
import os
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedgauge.client.components import (
    ComponentKind,
    SpecError,
    Table,
    allowing,
    build,
    call,
    check_arguments,
    coerce,
    is_own,
    with_absolute_paths,
)
from fedgauge.client.data.images import Dataset, Shards, batch_of, split
from fedgauge.client.files import replacing
from fedgauge.client.inspection import FIRST_NETWORK, InspectionPolicy, Mode
from fedgauge.client.local_data import may_download
from fedgauge.client.models.losses import CROSS_ENTROPY
from fedgauge.client.protocol import DATASET, MODEL, Federation, Protocol, build_model
from fedgauge.client.rng import secret_generator
from fedgauge.client.update import Batch, Params, TransformState, Update

MOST_PARAMETERS = 2**28  # of a model that a server may name: 1 GiB
MOST_CLIENTS = 100_000
MOST_TEXT = 2**16  # characters of a protocol
MOST_MODEL = 2**12  # of them of the model: a list of layers is built before it is measured
_TOP = ("client", "state", "allow", "data", "loss", "chain", "updates", "grading", "guard")
NO_FILE = "[model]: a server does not make a client read a file"
_SPLIT = ("partition", "alpha", "shards_per_client", "auxiliary")  # of a data set that several clients share


class RequestRefused(Exception):
    """What the server asked for is not done; the message is for the server, and tells nothing of the data."""


class DamagedState(Exception):
    """A file of the client's own folder cannot be read; the message names it, and is for the owner alone."""


# ---------------------------------------------------------------------------------------------------- the owner's file


@dataclass(frozen=True)
class GradingPolicy:
    """What the owner lets the server know of its success.

    Args:
        mode: off answers nothing; scores answers with the PSNR of each reconstruction.
        precision: PSNR is rounded to multiples of so many dB, > 0.
        queries: reconstructions of one batch of examples that are answered, at most, >= 1, in whatever rounds.
    """

    mode: Literal["off", "scores"] = "off"
    precision: float = 0.5
    queries: int = 8

    def __post_init__(self) -> None:
        if not self.precision > 0:
            raise ValueError(f"precision must be above 0 dB, got {self.precision}")
        if self.queries < 1:
            raise ValueError(f'queries must be at least 1, got {self.queries}; mode = "off" answers none')


@dataclass(frozen=True)
class GuardPolicy:
    """What an update must pass before it leaves; entries that are not finite never do.

    Args:
        max_norm: the largest Euclidean norm that is sent; None: any.
        audit: an attack that the client tries on its own update first; None: none.
        iterations, seconds: the most that it may spend.
        threshold: dB; an update is held back whose best reconstructed example has this PSNR, or more.
        inspect, architecture, examples: what is done about suspicious weights, as fedgauge.client.inspection's Watch says.
    """

    max_norm: float | None = None
    audit: str | None = None
    iterations: int = 100
    seconds: float = 20.0
    threshold: float = 20.0
    inspect: Mode = "off"
    architecture: str | None = None
    examples: bool = True

    def __post_init__(self) -> None:
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm must be above 0, got {self.max_norm}")
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")

    @property
    def inspection_policy(self) -> InspectionPolicy:
        """What is done about the weights that the server sends."""
        return InspectionPolicy(self.inspect, self.architecture, self.examples)


@dataclass(frozen=True, eq=False)
class OwnerConfig:
    """An owner's file, checked.

    Args:
        client: the number under which the server knows this client.
        state: the client's own folder.
        allow: packages outside fedgauge's from which components may be loaded.
        data: the dataset's table; split: how one that several clients share is dealt out; batch_size: examples a round.
        whole: all of the training images are this client's own.
        sampling: secret draws a round's examples by the operating system's entropy, agreed by the protocol's seed.
        loss: what is minimised; chain: what is applied.
        updates: the most that are computed for servers, all runs together; None: any number.
        guard: None: none.
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
    updates: int | None
    grading: GradingPolicy
    guard: GuardPolicy | None

    @classmethod
    def load(cls, path: Path) -> "OwnerConfig":
        """Read and check a file; SpecError names it, the table, the value and what is allowed."""
        try:
            return cls.parse(path.read_text(), path)
        except FileNotFoundError as error:
            raise SpecError(f"{path}: there is no such file") from error
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{path}: not a readable TOML file: {error}") from error

    @classmethod
    def parse(cls, text: str, path: Path) -> "OwnerConfig":
        """From the text of the file at path."""
        try:
            return cls._checked(tomllib.loads(text), path)
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
            raise SpecError(f"[data]: {next(iter(shared))} deals out what clients share; whole = true is all one's own")
        updates = coerce(tables["updates"], int, "updates") if "updates" in tables else None
        if updates is not None and updates < 1:
            raise SpecError(f"updates must be at least 1, got {updates}")
        chain = coerce(tables["chain"], list, "[[chain]]")
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
            updates=updates,
            grading=_options(GradingPolicy, tables.get("grading", {}), "[grading]"),
            guard=_options(GuardPolicy, tables["guard"], "[guard]") if "guard" in tables else None,
        )

    @cached_property
    def dataset(self) -> Dataset:
        """The images."""
        beside = ("batch_size", "whole", "sampling", *_SPLIT)
        with self.allowing():  # paths are relative to the owner's file
            found: Dataset = build(
                with_absolute_paths(self.data, DATASET, self.path.parent), "[data]", DATASET, beside=beside
            )
        return found

    def allowing(self) -> AbstractContextManager[None]:
        """Let components be loaded from the packages that this owner allows, and no others."""
        return allowing(self.allow, [self.path.absolute().parent], plug_ins=False)

    def batch(self, rows: Sequence[int]) -> Batch:
        """The examples of these rows of the training images."""
        return batch_of(self.dataset.x, self.dataset.y, torch.tensor(rows, dtype=torch.int64))


def _options(kind: Any, value: Any, where: str) -> Any:
    table = coerce(value, dict, where)
    if unknown := sorted(table.keys() - {f.name for f in fields(kind)}):
        names = ", ".join(f.name for f in fields(kind))
        raise SpecError(f"{where}: unknown key {unknown[0]!r} (it has: {names})")
    return call(kind, check_arguments(kind, table, where), where)


# ------------------------------------------------------------------------------------------------ the server's protocol


@dataclass(frozen=True)
class ServerTerms:
    """What a client takes from the server's protocol."""

    seed: int
    rounds: int
    clients: int
    model: Table

    @classmethod
    def parse(cls, text: str) -> "ServerTerms":
        """From the protocol's JSON; Refused with the reason."""
        if len(text) > MOST_TEXT:
            raise RequestRefused(f"the protocol has {len(text)} characters, more than {MOST_TEXT}")
        try:
            spec = coerce(json.loads(text), dict, "the protocol")
            numbers = {key: coerce(spec.get(key), int, key) for key in ("seed", "rounds", "clients")}
            model = coerce(spec.get("model"), dict, "[model]")
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"the protocol cannot be read: {error}") from error
        for key, least, most in (("seed", 0, 2**63 - 1), ("rounds", 1, 2**31), ("clients", 1, MOST_CLIENTS)):
            if not least <= numbers[key] <= most:
                raise RequestRefused(f"{key} must lie in {least}..{most}, got {numbers[key]}")
        if len(json.dumps(model)) > MOST_MODEL:
            raise RequestRefused(f"[model] has more than {MOST_MODEL} characters")
        if "weights" in model:
            raise RequestRefused(NO_FILE)
        return cls(**numbers, model=model)


@dataclass(frozen=True, eq=False)
class DeployedClient(Federation):
    """The federation as one client of a deployment computes it: its owner's data and chain, the server's model."""

    owner: OwnerConfig

    @classmethod
    def of(cls, owner: OwnerConfig, terms: ServerTerms) -> "DeployedClient":
        """Built and checked; Refused where the server's part is at fault, SpecError where the owner's is."""
        if owner.client >= terms.clients:
            raise RequestRefused(f"this is client {owner.client}, the protocol has {terms.clients} clients")
        protocol = Protocol(
            terms.seed, terms.rounds, terms.clients, owner.data, terms.model, owner.chain, loss=owner.loss
        )
        own = cls(protocol, owner)
        try:
            _ = own.shards, own.model
            with owner.allowing():
                _ = own.loss, own.chain, self_audit(owner.guard) if owner.guard else None
        except SpecError as error:
            raise SpecError(f"{owner.path}: {error}") from error
        return own

    @cached_property
    def shards(self) -> Shards:
        """The owner's images: all of them, or the part that the protocol's seed deals out to this client."""
        owner, clients, data = self.owner, self.protocol.clients, self.owner.dataset
        if not owner.whole:
            fixed = {"dataset": data, "clients": clients, "seed": self.protocol.seed}
            table = {**owner.split, "batch_size": owner.batch_size}
            dealt: Shards = call(split, check_arguments(split, table, "[data]", fixed), "[data]")
            return dealt
        if len(data.y) < owner.batch_size:
            raise SpecError(f"[data]: {data.name} has {len(data.y)} images, fewer than batch_size {owner.batch_size}")
        none = torch.zeros(0, dtype=torch.int64)
        indices = tuple(torch.arange(len(data.y)) if c == owner.client else none for c in range(clients))
        return Shards(data, indices, none, owner.batch_size, self.protocol.seed)

    @cached_property
    def model(self) -> nn.Module:
        """The network that the server names, if it is small enough to be held, and here, of a place that the owner allows."""
        table = dict(self.protocol.model)
        offered = self.shards.dataset.offered
        allowed = may_download.set(False)  # a server names what a client has, and makes it fetch nothing
        try:
            mode = coerce(table.pop("mode", "eval"), Literal["train", "eval"], "[model]: mode")
            with self.owner.allowing():
                if with_absolute_paths(table, MODEL, Path(os.sep)) != table:
                    raise RequestRefused(NO_FILE)
                if is_own(table, MODEL):  # a package that the owner allows is the owner's to trust
                    self._check_size(table, offered)
                return build_model(table, "[model]", offered, self.protocol.seed, beside=("mode",)).train(
                    mode == "train"
                )
        except SpecError as error:
            raise RequestRefused(str(error)) from error
        finally:
            may_download.reset(allowed)

    def _check_size(self, table: Table, offered: Mapping[str, Any]) -> None:
        with torch.device("meta"):  # shapes alone, before any memory is taken
            shadow = build_model(table, "[model]", offered, self.protocol.seed, beside=("mode",))
        size = sum(t.numel() for t in (*shadow.parameters(), *shadow.buffers()))
        if size > MOST_PARAMETERS:
            raise RequestRefused(f"[model]: it has {size} parameters, more than {MOST_PARAMETERS}")

    def draw(self, round: int) -> list[int]:
        """The rows of the training images that a round trains on."""
        if self.owner.sampling == "agreed":
            return self.shards.rows_at(self.owner.client, round).tolist()
        mine = self.shards.indices[self.owner.client]
        drawn = mine[torch.randperm(len(mine), generator=secret_generator())]
        return drawn[: self.owner.batch_size].tolist()

    def compute(self, params: Params, buffers: Mapping[str, Tensor], batch: Batch, memory: TransformState) -> Update:
        """What leaves the client, with noise that nobody else can draw again."""
        self.load_buffers(buffers)
        return self.update_fn(memory)(params, batch, secret_generator())


class SelfAudit(ABC):
    """What a client tries on its own update before it leaves; a frozen dataclass of an attack's name and its budget."""

    @abstractmethod
    def leak(
        self, own: Federation, params: Params, buffers: Mapping[str, Tensor], update: Update, batch: Batch
    ) -> float:
        """PSNR in dB of the best reconstructed example; -inf where the attack got none.

        Raises:
            ValueError: the attack does not apply, so that nothing can be said.
        """


SELF_AUDIT = ComponentKind("an audit of one's own update", ("fedgauge.audits",), SelfAudit)
INVERSION = "invert_own"  # attacks stand above clients: it is found by its name, where an owner asks for it


def self_audit(guard: GuardPolicy) -> SelfAudit | None:
    """The audit that an owner asks for."""
    if guard.audit is None:
        return None
    table = {"use": INVERSION, "attack": guard.audit, "iterations": guard.iterations, "seconds": guard.seconds}
    found: SelfAudit = build(table, "[guard]", SELF_AUDIT)
    return found


# ------------------------------------------------------------------------------------------------- the client's own folder


@dataclass(frozen=True)
class DrawnBatch:
    """What a client trained on in a round.

    Args:
        run: Flower's number of the run.
        digest: of the examples; else rows would mean others where the owner's data has changed.
        sent: whether the update left: of one that the owner's guard held back nothing is told, not even its leak.
    """

    run: int
    rows: tuple[int, ...]
    digest: str
    sent: bool = False


@dataclass(frozen=True)
class ClientFolder:
    """The client's own folder: what it drew, what it answered, and its log; nothing in it ever travels."""

    folder: Path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder alone: counts must not be read by two at the same time."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _private(self.folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def drawn(self, run: int, round: int) -> DrawnBatch | None:
        """What was trained on in a round of one of the server's runs; None where that round never came."""
        table = _read(self._round(run, round))
        if table is None:
            return None
        try:
            return DrawnBatch(
                int(table["run"]), tuple(map(int, table["rows"])), str(table["digest"]), table["sent"] is True
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedState(f"{self._round(run, round)} is damaged: {error!r}") from error

    def draws(self) -> int:
        """How often a round's examples were drawn, in all runs."""
        return sum(1 for _ in (self.folder / "rounds").glob("run-*.json"))

    def keep_drawn(self, round: int, drawn: DrawnBatch) -> None:
        """Write a round's draw down."""
        _write(self._round(drawn.run, round), asdict(drawn))

    def answers(self, digest: str) -> dict[str, Any]:
        """What was answered on a batch, by round and attack."""
        return _read(self._answers(digest)) or {}

    def keep_answers(self, digest: str, answers: Mapping[str, Any]) -> None:
        """Write down what will be answered: before it leaves, so that a crash forgets no answer."""
        _write(self._answers(digest), answers)

    def protocol(self) -> str | None:
        """The server's last protocol; None before the first."""
        try:
            return (self.folder / "protocol.json").read_text()
        except FileNotFoundError:
            return None

    def keep_protocol(self, text: str) -> None:
        """Write the server's protocol down, for the owner's own account."""
        with replacing(self.folder / "protocol.json") as file:
            file.write(text.encode())

    @contextmanager
    def met(self, run: int) -> Iterator[TransformState]:
        """What an inspection remembers of the weights of one of the server's runs; what is changed in it is kept.

        The network that was met first is that of all runs: an owner who agrees to another one deletes the file, or names it.
        Weights are not compared between runs.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load, save

        path, mine = self.folder / "inspected.safetensors", torch.tensor(list(str(run).encode()), dtype=torch.uint8)
        try:
            memory: TransformState = load(path.read_bytes())
        except FileNotFoundError:
            memory = {}
        except (OSError, SafetensorError) as error:
            raise DamagedState(f"{path} is damaged: {error}") from error
        if not torch.equal(memory.pop("run", mine), mine):
            memory = {k: t for k, t in memory.items() if k == FIRST_NETWORK}
        yield memory
        with replacing(path, durable=True) as file:
            file.write(save({**{k: t.contiguous() for k, t in memory.items()}, "run": mine}))

    @property
    def log(self) -> Path:
        """A line of JSON for each thing that was done, answered or refused."""
        return self.folder / "log.jsonl"

    def note(self, event: str, **facts: object) -> None:
        """Append to the log."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        line = json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n"
        with _private(self.log) as file:
            os.write(file, line.encode())  # at once: two writers' lines do not mix

    def _round(self, run: int, round: int) -> Path:
        return self.folder / "rounds" / f"run-{run}-round-{round:05d}.json"

    def _answers(self, digest: str) -> Path:
        # by batch, not by round: a server that has the same examples trained on again has spent its questions on them
        return self.folder / "answers" / f"{digest}.json"


def digest_of(batch: Batch) -> str:
    """Tells batches apart, whatever the order of their examples."""
    each = sorted(hashlib.sha256(x.contiguous().numpy().tobytes()).digest() for x in batch.x)
    return hashlib.sha256(b"".join(each)).hexdigest()[:32]


@contextmanager
def _private(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DamagedState(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise DamagedState(f"{path} is damaged: it holds no table")
    return found


def _write(path: Path, table: Mapping[str, Any]) -> None:
    with replacing(path, durable=True) as file:  # a count that a power cut forgets is one that a server can reset
        file.write(json.dumps(table).encode())
