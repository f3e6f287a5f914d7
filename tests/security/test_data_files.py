"""Data that a scenario names, which may be anybody's: what is no file, or has no end, is a sentence and nobody waits for it."""

import os
from pathlib import Path

import pytest

from fedgauge.client.files import read_file


def test_a_file_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"small")
    assert read_file(tmp_path / "file", 5) == b"small"
    os.mkfifo(tmp_path / "pipe")
    for path, most in ((tmp_path / "file", 4), (tmp_path / "pipe", 4)):
        with pytest.raises(OSError, match=str(path)):
            read_file(path, most)
