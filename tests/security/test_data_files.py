"""Data that a scenario names, which may be anybody's: what is no file, or has no end, is a sentence and nobody waits for it."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedgauge.client.data import corpora, images
from fedgauge.client.data.corpora import csv
from fedgauge.client.data.own_images import image_folder, npz
from fedgauge.client.files import MOST_ARCHIVE, MOST_PICTURE, MOST_TABLE, MOST_WORDS, open_data, read_file


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


ENDLESS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": lambda path: (os.mkfifo(path.with_name("elsewhere")), path.symlink_to("elsewhere"))[0],
    "terabyte": lambda path: _sparse(path, 1 << 40),
}


def _picture(path: Path) -> Path:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    return path


def _pictures(folder: Path, bad: Callable[[Path], None]) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        _picture(folder / name / "1.png")
    bad(folder / "a" / "2.png")
    image_folder(folder, 8)


def _alone(name: str, read: Callable[[Path], Any]) -> Callable[[Path, Callable[[Path], None]], None]:
    def make(folder: Path, bad: Callable[[Path], None]) -> None:
        bad(folder / name)
        read(folder / name)

    return make


LOADERS: dict[str, Callable[[Path, Callable[[Path], None]], None]] = {
    "csv": _alone("own.csv", csv),
    "npz": _alone("own.npz", npz),
    "image_folder": _pictures,
    "lines of a corpus": _alone("train.tsv", lambda path: corpora._table(path, ("sentence", "label"))),
    "idx": _alone("train-images-idx3-ubyte.gz", images._read_idx),
    "cifar": _alone("cifar10-train-1.npz", images._read_npz),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("loader", LOADERS)
def test_no_loader_waits_for_or_swallows_what_has_no_end(loader: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no file|has 1099511627776 bytes, and no such file has more than") as error:
        LOADERS[loader](tmp_path, ENDLESS[kind])
    assert str(tmp_path) in str(error.value)


def test_a_file_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    for most in (MOST_TABLE, MOST_ARCHIVE, MOST_PICTURE, MOST_WORDS):
        _sparse(tmp_path / "file", most)
        open_data(tmp_path / "file", most).close()
        _sparse(tmp_path / "file", most + 1)
        with pytest.raises(OSError, match=f"has {most + 1} bytes, and no such file has more than {most}$"):
            open_data(tmp_path / "file", most)


def test_a_small_file_takes_little_memory_whatever_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"small")
    tracemalloc.start()
    assert read_file(tmp_path / "file", 1 << 28) == b"small"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
