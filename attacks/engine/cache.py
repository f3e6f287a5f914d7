"""A size-bounded disk cache of expensive tensors, keyed by the digest of their inputs."""

import fcntl
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import FunctionType

import torch
from torch import Tensor

from fedgauge.attacks.engine.devices import CPU
from fedgauge.client.data_folder import cache_folder
from fedgauge.client.files import replacing

BOUND = 8 * 2**30  # bytes; the least recently read files go first
# digests seed random streams: renamed classes keep the names that they had in them, so that kept figures stay reproducible
FORMER_NAMES = {
    "CarriedInputNetwork": "Carried",
    "GeneratorTraining": "Generators",
    "GroupMean": "Summed",
    "OmittedParameters": "Unseen",
    "ReversibleNetwork": "Reversible",
    "SeparateNetworks": "Separate",
    "UpdateFeatures": "View",
    "_ResNetBlock": "_Block",
    "_ResNetBottleneck": "_Bottleneck",
    "_TransformerBlock": "_Block",
    "_VariationalBottleneck": "_Bottleneck",
    "learning_to_invert_text": "learning_to_invert",
}
_RENAMED = re.compile(rf"\b({'|'.join(FORMER_NAMES)})\b")


def digest(*parts: object) -> str:
    """Hash every part: tensors, mappings and sequences by value, other objects by repr."""
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
        elif isinstance(part, FunctionType):  # its repr contains a memory address
            found.update(f"{part.__module__.removeprefix('fedgauge.')}:{part.__qualname__}".encode())
        else:
            found.update(_RENAMED.sub(lambda match: FORMER_NAMES[match[0]], repr(part)).encode())
        found.update(b";")
    return found.hexdigest()[:32]


@dataclass(frozen=True)
class TensorCache:
    """A folder of safetensors files.

    Args:
        bound: bytes of all files together; larger entries are not cached.
        device: of the tensors that are returned.
    """

    folder: Path
    bound: int = BOUND
    device: torch.device = CPU

    @classmethod
    def own(cls) -> "TensorCache":
        return cls(cache_folder() / "learned")

    def get(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors of a name; if they are missing, one process computes them and the others wait."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the process dies
            if (kept := self.read(name)) is None:
                kept = make()
                self.put(name, kept)
        return {name: t.to(self.device) for name, t in kept.items()}

    def read(self, name: str) -> dict[str, Tensor] | None:
        """The tensors of a name; None if there are none, or the file is damaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self._path(name)
        try:
            kept: dict[str, Tensor] = load_file(path)
            os.utime(path)
        except (FileNotFoundError, SafetensorError, ValueError):
            return None
        return {name: t.to(self.device) for name, t in kept.items()}

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors, and evict the least recently read ones to make room."""
        from safetensors.torch import save

        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if size > self.bound:
            return
        self._make_room(size, name)
        try:
            with replacing(self._path(name)) as scratch:
                scratch.write(save({k: t.detach().cpu().contiguous() for k, t in tensors.items()}))
        except OSError as error:  # such as a full disk: the computed tensors are still usable
            warnings.warn(f"{self._path(name)} is not cached: {error}", stacklevel=2)

    def _make_room(self, size: int, name: str) -> None:
        others = [path for path in self.folder.glob("*.safetensors") if path != self._path(name)]
        with suppress(FileNotFoundError):  # another process made room at the same time
            kept = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in others)
            held = sum(there for _, there, _ in kept)
            for _, there, path in kept:
                if held + size <= self.bound:
                    return
                path.unlink()
                held -= there

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"
