"""The truth that a tester hands in: the examples that a foreign app's clients trained on, by client and round."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fedgauge.attacks.modality.registry import modality_of
from fedgauge.client.components import SpecError
from fedgauge.client.data.images import Dataset
from fedgauge.client.files import read_file
from fedgauge.client.local_data import read_npz
from fedgauge.client.update import Batch
from fedgauge.server.store.tape import most_bytes, tensors_of

_NAME = re.compile(r"(client|node)-(-?\d+)(?:-round-(\d+))?\.(npz|safetensors)")
LAYOUT = "client-0-round-1.npz (or client-0.npz for all rounds, node-ID by Flower's node id, .safetensors), each with x and y"


class TruthError(SpecError):
    """The truth cannot be read, or is not of the audit's examples; the message names it."""


@dataclass(frozen=True)
class TesterTruth:
    """A folder with a file of examples for each client and round."""

    folder: Path

    @classmethod
    def named(cls, text: str) -> "TesterTruth":
        """From the command line or a run's ledger; TruthError if nothing can be read there."""
        folder = Path(text).absolute()
        if not folder.is_dir() or not _files(folder):
            raise TruthError(f"--truth: {text} is no folder with a file of each client's examples, such as {LAYOUT}")
        return cls(folder)

    def __str__(self) -> str:
        return str(self.folder)

    def batch(self, round: int, client: int, like: Dataset, nodes: Mapping[int, str]) -> Batch | None:
        """The examples of a client in a round, pixels in [0, 1]; None if there are none.

        Args:
            like: the audit's dataset, whose shape the examples must have.
            nodes: Flower's node ids by client.

        Raises:
            TruthError: a file is damaged, or holds other examples.
        """
        path = _file(_files(self.folder), round, client, nodes)
        if path is None:
            return None
        x, y = _read(path, path.stat().st_mtime_ns)
        return Batch(_arranged(x, like, path), y)


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
    except Exception as error:  # a damaged archive raises BadZipFile, zlib.error, ValueError, TapeError and more
        raise TruthError(f"{path} cannot be read as the truth: {error}") from error
    if missing := [key for key in ("x", "y") if key not in arrays]:
        raise TruthError(f"{path} has no {missing[0]!r} (it has: {', '.join(sorted(arrays)) or 'nothing'})")
    x, y = arrays["x"], arrays["y"].long()
    if len(x) != len(y):
        raise TruthError(f"{path} has {len(x)} examples x and {len(y)} labels y")
    return Batch(x, y)


def _arranged(x: Tensor, like: Dataset, path: Path) -> Tensor:
    """Examples in the audit's layout."""
    try:
        x = modality_of(like).arranged(x)
    except ValueError as error:
        raise TruthError(f"{path}: {error}") from error
    if tuple(x.shape[1:]) != like.shape:
        raise TruthError(f"{path} has examples of shape {tuple(x.shape[1:])}; the audit's have {like.shape}")
    return x.contiguous()
