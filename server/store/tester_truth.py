"""The truth that a tester hands in: the examples that a foreign app's clients trained on, by client and round."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgauge.attacks.modality.registry import modality_of
from fedgauge.client.components import SpecError, Table, build, coerce, with_absolute_paths
from fedgauge.client.data.images import Dataset, batch_of
from fedgauge.client.federation import DATASET
from fedgauge.client.files import read_file
from fedgauge.client.local_data import read_npz
from fedgauge.client.update import Batch
from fedgauge.server.store.run_files import MOST_TEXT
from fedgauge.server.store.scenario import component_of
from fedgauge.server.store.tape import most_bytes, tensors_of

_NAME = re.compile(r"(client|node)-(-?\d+)(?:-round-(\d+))?\.(npz|safetensors)")
LAYOUT = "client-0-round-1.npz (or client-0.npz for all rounds, node-ID by Flower's node id, .safetensors), each with x and y"


class TruthError(SpecError):
    """The truth cannot be read, or is not of the audit's examples; the message names it."""


@dataclass(frozen=True)
class TesterTruth:
    """Where the truth is.

    Args:
        folder: of files, one for each client and round; None: the truth are rows of a dataset.
        dataset: a component's table, as [data] names it.
        rows: a JSON file, {"client": [rows]} or {"client": {"round": [rows]}}; clients are numbers, or Flower's node ids.
    """

    folder: Path | None = None
    dataset: Table = field(default_factory=dict)
    rows: Path | None = None

    @classmethod
    def named(cls, text: str, rows: Path | None) -> "TesterTruth":
        """From the command line: a folder, or a dataset as 'NAME KEY=VALUE ...'.

        Raises:
            SpecError: nothing can be read there.
        """
        if (folder := Path(text)).is_dir():
            return cls(folder.absolute()).check()
        if rows is None:
            raise TruthError(f"--truth: {text!r} is no folder of {LAYOUT}; a dataset needs --truth-rows, too")
        located = with_absolute_paths(component_of(text, "--truth"), DATASET, Path.cwd())
        return cls(None, located, rows.absolute()).check()

    def to_json(self) -> str:
        """For the run's ledger."""
        return json.dumps({"folder": self.folder, "dataset": dict(self.dataset), "rows": self.rows}, default=str)

    @classmethod
    def from_json(cls, text: str) -> "TesterTruth":
        """The inverse of `to_json`; TruthError if it wrote no such text."""
        try:
            read = json.loads(text)
            paths = [coerce(read[key], Path | None, key) for key in ("folder", "rows")]
            return cls(paths[0], coerce(read["dataset"], dict, "dataset"), paths[1])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TruthError(f"what the run says of a tester's truth cannot be read: {error}") from error

    def __str__(self) -> str:
        return str(self.folder) if self.folder is not None else f"{self.dataset['use']}, rows of {self.rows}"

    def check(self) -> "TesterTruth":
        """Raise TruthError if nothing can be read from it."""
        if self.folder is None:
            _ = _rows(self.rows), _dataset(json.dumps(dict(self.dataset)))
        elif not _files(self.folder):
            raise TruthError(f"{self.folder} has no file of the truth; expected {LAYOUT}")
        return self

    def batch(self, round: int, client: int, like: Dataset, nodes: Mapping[int, str]) -> Batch | None:
        """The examples of a client in a round, pixels in [0, 1]; None if there are none.

        Args:
            like: the audit's dataset, whose shape the examples must have.
            nodes: Flower's node ids by client.

        Raises:
            TruthError: a file is damaged, or holds other examples.
        """
        if self.folder is None:
            rows, data = _of(_rows(self.rows), round, client, nodes), _dataset(json.dumps(dict(self.dataset)))
            if rows is None:
                return None
            if any(not 0 <= row < len(data.y) for row in rows):
                raise TruthError(
                    f"{self.rows}: {data.name} has {len(data.y)} training examples, and a row is none of them"
                )
            found = batch_of(data.x, data.y, torch.tensor(rows, dtype=torch.int64))
            return Batch(_arranged(found.x, like, str(self)), found.y)
        path = _file(_files(self.folder), round, client, nodes)
        if path is None:
            return None
        x, y = _read(path, path.stat().st_mtime_ns)
        return Batch(_arranged(x, like, str(path)), y)


def _files(folder: Path) -> dict[tuple[str, int, int | None], Path]:
    """The files by (client or node, its number, round)."""
    found = [(path, _NAME.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    return {(m[1], int(m[2]), int(m[3]) if m[3] else None): path for path, m in found if m and path.is_file()}


def _file(
    files: Mapping[tuple[str, int, int | None], Path], round: int, client: int, nodes: Mapping[int, str]
) -> Path | None:
    names = [("client", client), *([("node", int(nodes[client]))] if client in nodes else [])]
    return next((files[who, n, r] for r in (round, None) for who, n in names if (who, n, r) in files), None)


@lru_cache(maxsize=256)
def _read(path: Path, changed: int) -> Batch:
    try:
        if path.suffix == ".npz":
            arrays = {key: torch.from_numpy(array) for key, array in read_npz(path).items()}
        else:
            arrays = tensors_of(read_file(path, most_bytes()), path)
        x, y = arrays["x"], arrays["y"]
        if len(x) != len(y):
            raise ValueError(f"{len(x)} examples x and {len(y)} labels y")
    except Exception as error:  # a damaged archive raises BadZipFile, zlib.error, ValueError, TapeError and more
        raise TruthError(f"{path} cannot be read as the truth, examples x and labels y: {error}") from error
    return Batch(x, y.long())


def _arranged(x: Tensor, like: Dataset, where: str) -> Tensor:
    """Examples in the audit's layout."""
    try:
        x = modality_of(like).arranged(x)
    except ValueError as error:
        raise TruthError(f"{where}: {error}") from error
    if tuple(x.shape[1:]) != like.shape:
        raise TruthError(f"{where} has examples of shape {tuple(x.shape[1:])}; the audit's have {like.shape}")
    return x.contiguous()


def _rows(path: Path | None) -> Mapping[str, Any]:
    try:
        rows: Mapping[str, Any] = coerce(json.loads(read_file(path, MOST_TEXT)) if path else None, dict, "--truth-rows")
        return rows
    except (OSError, ValueError, RecursionError) as error:
        layout = '{"client": [rows]} or {"client": {"round": [rows]}}'
        raise TruthError(f"a dataset as the truth needs --truth-rows FILE.json with {layout}: {error}") from error


def _of(rows: Mapping[str, Any], round: int, client: int, nodes: Mapping[int, str]) -> Sequence[int] | None:
    own = rows.get(str(client), rows.get(nodes.get(client, "")))
    if isinstance(own, dict):
        own = own.get(str(round))
    chosen: Sequence[int] | None = coerce(own, tuple[int, ...] | None, f"the rows of client {client}")
    return chosen


@lru_cache(maxsize=2)
def _dataset(table: str) -> Dataset:
    built: Dataset = build(json.loads(table), "--truth", DATASET)
    return built
