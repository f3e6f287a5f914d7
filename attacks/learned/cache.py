"""The shelf: tensors that took long to compute, kept on disk by what they were computed from, up to a size."""

import fcntl
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import FunctionType

import torch
from torch import Tensor

from fedgauge.client.files import replacing
from fedgauge.client.local_data import cache_folder

BOUND = 8 * 2**30  # bytes; what was not read for longest goes first


def digest(*parts: object) -> str:
    """A name that depends on every part: tensors (alone, in mappings or in sequences) by their values, others by repr."""
    found = sha256()
    for part in parts:
        if isinstance(part, Tensor):
            found.update(repr((tuple(part.shape), part.dtype)).encode())
            found.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, Mapping):
            for key in sorted(part):
                found.update(digest(key, part[key]).encode())
        elif isinstance(part, tuple | list):
            found.update(f"{len(part)}:".encode() + "".join(map(digest, part)).encode())
        elif isinstance(part, FunctionType):  # whose repr is a place in memory
            found.update(f"{part.__module__}:{part.__qualname__}".encode())
        else:
            found.update(repr(part).encode())
        found.update(b";")
    return found.hexdigest()[:32]


@dataclass(frozen=True)
class TensorCache:
    """A folder of safetensors files.

    Args:
        bound: bytes of all files together; a larger table is not kept at all.
    """

    folder: Path
    bound: int = BOUND

    @classmethod
    def own(cls) -> "TensorCache":
        """In the user's cache folder."""
        return cls(cache_folder() / "learned")

    def get(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What is kept under a name, made where there is nothing; of several processes one makes it, and the others wait."""
        with self.alone(name):
            if (kept := self.read(name)) is not None:
                return kept
            made = make()
            self.put(name, made)
        return made

    def read(self, name: str) -> dict[str, Tensor] | None:
        """What is kept under a name; None where there is nothing, or nothing whole."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self._path(name)
        try:
            found: dict[str, Tensor] = load_file(path)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (SafetensorError, ValueError) as error:
            warnings.warn(f"{path} is damaged ({error}) and is made again", stacklevel=2)
            return None
        return found

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors, in the place of what was kept for longest without being read."""
        from safetensors.torch import save

        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if size > self.bound:
            return
        self._make_room(size, name)
        try:
            with replacing(self._path(name)) as scratch:
                scratch.write(save({k: t.detach().cpu().contiguous() for k, t in tensors.items()}))
        except OSError as error:  # a full disk, say: what was computed is worth more than its copy
            warnings.warn(f"{self._path(name)} is not kept: {error}", stacklevel=2)

    def drop(self, name: str) -> None:
        """Keep it no longer."""
        self._path(name).unlink(missing_ok=True)

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """While others, in whatever process, wait who want the same name; a process that dies lets go of it."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _make_room(self, size: int, name: str) -> None:
        others = [p for p in self.folder.glob("*.safetensors") if p != self._path(name)]
        seen = []
        for path in others:
            try:
                seen.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:  # another process made room at the same time
                continue
        held = sum(s for _, s, _ in seen)
        for _, there, path in sorted(seen):
            if held + size <= self.bound:
                return
            path.unlink(missing_ok=True)
            held -= there

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"
