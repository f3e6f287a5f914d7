"""The tape: recorded updates as safetensors files."""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedgauge.attacks.base import Observation
from fedgauge.server.store import run_files
from fedgauge.server.store.run_files import replacing

Keep = Literal["all", "attacked", "none"]
Of = TypeVar("Of")
_BUFFER = "buffer/"
_PARAM = "param/"
_PIECE = 1 << 19  # bytes: small enough to stay in a core's cache between writing and hashing
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class TapeError(Exception):
    """A file of the tape is missing, truncated or changed; the message names it."""


@dataclass(frozen=True)
class Tape:
    """Folder with a file of weights for each round, and one for each update; altered weights have a file for each client."""

    folder: Path

    def write_round(
        self, round: int, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], client: int | None = None
    ) -> str:
        """Write the weights of a round, for all clients or one, and return their digest."""
        named = {_PARAM + k: t for k, t in params.items()} | {_BUFFER + k: t for k, t in buffers.items()}
        return write_tensors(self._round(round) if client is None else self._sent(round, client), named)

    def write_update(
        self,
        round: int,
        client: int,
        update: Mapping[str, Tensor],
        returned: Mapping[str, Tensor] | None = None,
    ) -> str:
        """Write an upload, and return its digest.

        Args:
            update: of a user's app the arrays as uploaded, weights or differences.
            returned: buffers.
        """
        named = {_BUFFER + k: t for k, t in (returned or {}).items()}
        return write_tensors(self._update(round, client), {**update, **named})

    def read(self, round: int, client: int, digest: str | None = None) -> Observation:
        """Read one observation.

        Args:
            digest: the ledger's, "<digest of the round's weights>:<digest of the update>"; None: no check.

        Raises:
            TapeError: a file is missing, damaged, or differs from the digest.
        """
        of_round, _, of_update = (digest or "").rpartition(":")
        taped = read_tensors(self._update(round, client), of_update or None)
        update = {k: t for k, t in taped.items() if not k.startswith(_BUFFER)}
        returned = {k.removeprefix(_BUFFER): t for k, t in taped.items() if k.startswith(_BUFFER)}
        own = self._sent(round, client)
        sent = read_tensors(own if run_files.look(own) else self._round(round), of_round or None)
        params = {k.removeprefix(_PARAM): t for k, t in sent.items() if k.startswith(_PARAM)}
        buffers = {k.removeprefix(_BUFFER): t for k, t in sent.items() if k.startswith(_BUFFER)}
        return Observation(round, client, params, update, buffers, returned=returned)

    def forget(self, round: int, clients: Collection[int]) -> None:
        """Delete updates of a round; with the last update, also the round's weights."""
        for client in clients:
            run_files.delete(self._update(round, client))
            run_files.delete(self._sent(round, client))
        if not any(name.startswith(f"round-{round:05d}-client-") for name in run_files.names(self.folder)):
            run_files.delete(self._round(round))

    def _round(self, round: int) -> Path:
        return self.folder / f"round-{round:05d}.safetensors"

    def _sent(self, round: int, client: int) -> Path:
        return self.folder / f"round-{round:05d}-sent-{client:05d}.safetensors"

    def _update(self, round: int, client: int) -> Path:
        return self.folder / f"round-{round:05d}-client-{client:05d}.safetensors"


def by_weights(of_round: Iterable[Of], digest: Callable[[Of], str | None]) -> list[list[Of]]:
    """Group items of one round by the weights of their clients, as a wave shares its weights.

    Args:
        digest: of an item's update, as for `Tape.read`.
    """
    alike: dict[str, list[Of]] = {}
    for one in of_round:
        alike.setdefault((digest(one) or "").rpartition(":")[0], []).append(one)
    return list(alike.values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to a safetensors file atomically, and return the digest of its bytes."""
    # in pieces from the tensors' memory: safetensors' save() takes six times as long
    digest = xxhash.xxh3_128()
    with replacing(path) as file:
        for piece in _pieces(tensors):
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: header length, header, then the tensors, wide types first."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header, end = {}, 0
    for name, t in ordered:
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, t in ordered:
        if not t.numel():  # torch cannot view an empty NumPy array, which has no strides
            continue
        data = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]


def read_tensors(path: Path, digest: str | None = None, most: int | None = None) -> dict[str, Tensor]:
    """Read the tensors of a run's file.

    Args:
        most: bytes; default: the limit of this machine.

    Raises:
        TapeError: the file is missing, damaged or changed.
    """
    try:
        # at most half of the memory, as tensors are in it twice
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        data = run_files.read(path, memory // 2 if most is None else most)
    except OSError as error:
        missing = "is missing: was it deleted by [tape] keep, or is the run incomplete?"
        why = missing if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise TapeError(f"{path} {why}") from error
    if digest is not None and xxhash.xxh3_128_hexdigest(data) != digest:
        raise TapeError(
            f"{path} is damaged: its digest differs from the one that the ledger recorded when it was written"
        )
    try:
        tensors: dict[str, Tensor] = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, RecursionError) as error:
        raise TapeError(f"{path} is damaged: {error}") from error
    # load() has a random order, and noise is drawn in the order of the names
    return {name: tensors[name] for name in header if name in tensors}
