"""The tape: every update that the server kept, as safetensors files that outlive the run."""

import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from attacks.base import Observation

Keep = Literal["all", "scored", "none"]
_BUFFER = "buffer/"
_PARAM = "param/"


class TapeError(Exception):
    """A file of the tape is missing, truncated or changed; the message names it."""


@dataclass(frozen=True)
class Tape:
    """A folder with one file of weights a round and one file of the update for each client kept."""

    folder: Path

    def write_round(self, round: int, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> str:
        """Keep what the server sent in a round; returns its digest."""
        named = {_PARAM + k: t for k, t in params.items()} | {_BUFFER + k: t for k, t in buffers.items()}
        return write_tensors(self._round(round), named)

    def write_update(self, round: int, client: int, update: Mapping[str, Tensor]) -> str:
        """Keep what a client answered; returns its digest."""
        return write_tensors(self._update(round, client), update)

    def read(self, round: int, client: int, digest: str | None = None) -> Observation:
        """One observation; TapeError when a file is missing, damaged, or not what the digest says.

        Args:
            digest: the ledger's, "<of the round's weights>:<of the update>"; None checks nothing.
        """
        of_round, _, of_update = (digest or "").rpartition(":")
        update = read_tensors(self._update(round, client), of_update or None)
        sent = read_tensors(self._round(round), of_round or None)
        params = {k.removeprefix(_PARAM): t for k, t in sent.items() if k.startswith(_PARAM)}
        buffers = {k.removeprefix(_BUFFER): t for k, t in sent.items() if k.startswith(_BUFFER)}
        return Observation(round, client, params, update, buffers)

    def forget(self, round: int, clients: Collection[int]) -> None:
        """Delete the updates of some clients in a round, and the round's weights with the last of them."""
        for client in clients:
            self._update(round, client).unlink(missing_ok=True)
        if not any(self.folder.glob(f"round-{round:05d}-client-*")):
            self._round(round).unlink(missing_ok=True)

    def _round(self, round: int) -> Path:
        return self.folder / f"round-{round:05d}.safetensors"

    def _update(self, round: int, client: int) -> Path:
        return self.folder / f"round-{round:05d}-client-{client:05d}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to a file atomically; returns the digest of its bytes."""
    data = save({k: t.detach().contiguous() for k, t in tensors.items()})
    write_bytes(path, data)
    return digest_of(data)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that a reader or a crash sees the old file or the whole new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as scratch:
        try:
            scratch.write(data)
            scratch.flush()
            os.replace(scratch.name, path)
        except BaseException:  # a full disk, say: what was written may be private
            os.unlink(scratch.name)
            raise


def read_tensors(path: Path, digest: str | None = None) -> dict[str, Tensor]:
    """Tensors of a file; TapeError names the file when it is missing, damaged or changed."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise TapeError(f"{path} is missing: was it deleted by [tape] keep, or is the run incomplete?") from error
    except OSError as error:
        raise TapeError(f"{path} cannot be read: {error}") from error
    if digest is not None and digest_of(data) != digest:
        raise TapeError(f"{path} is damaged: its digest is not the one that the ledger recorded when it was written")
    try:
        tensors: dict[str, Tensor] = load(data)
    except (SafetensorError, ValueError) as error:
        raise TapeError(f"{path} is damaged: {error}") from error
    return tensors


def digest_of(data: bytes) -> str:
    """A fast digest against damage (not against malice): at 44 MB an update, a cryptographic one would cost a round's 5 %."""
    return xxhash.xxh3_128_hexdigest(data)


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Plain arrays, the form in which tensors travel to workers."""
    return {k: t.numpy() for k, t in tensors.items()}


def as_tensors(arrays: Mapping[str, object]) -> dict[str, Tensor]:
    """Tensors of plain arrays; copied, as what travelled is read-only."""
    return {k: torch.tensor(a) for k, a in arrays.items()}
