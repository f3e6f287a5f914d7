"""Data that a scenario names, which may be anybody's: what is no file, or has no end, is a sentence and nobody waits for it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedgauge.client.files import read_file
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run


def test_a_file_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"small")
    assert read_file(tmp_path / "file", 5) == b"small"
    os.mkfifo(tmp_path / "pipe")
    for path, most in ((tmp_path / "file", 4), (tmp_path / "pipe", 4)):
        with pytest.raises(OSError, match=str(path)):
            read_file(path, most)


# ------------------------------------------------------------------------------------------------- data in a run's folder


@pytest.fixture
def theirs(attacked_run: Run, tmp_path: Path) -> Run:
    """A run whose scenario names pictures in its own folder."""
    return Run(Path(shutil.copytree(attacked_run.folder, tmp_path / "runs" / "theirs")))


@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [
        (".part-x", lambda path: path.symlink_to("/etc/passwd"), "a link"),
        (".part-x", os.mkfifo, "a pipe"),
        ("tape/.part-x", lambda path: path.symlink_to("/etc"), "a link"),
        ("tape/.part-x", os.mkfifo, "a pipe"),
    ],
)
def test_an_unfinished_name_excuses_no_link_and_no_pipe(
    theirs: Run, name: str, make: Callable[[Path], None], kind: str
) -> None:
    make(theirs.folder / name)
    with pytest.raises(run_files.RefusedFile, match=rf"{name} is {kind} where a run has a file"):
        Run.open(theirs.folder)


def test_what_is_unfinished_keeps_no_run_from_being_read(theirs: Run) -> None:
    """A report that is printed keeps a browser's folder here, with links and sockets; a killed process leaves what it wrote."""
    (theirs.folder / ".part-browser").mkdir()
    (theirs.folder / ".part-browser" / "SingletonLock").symlink_to("host-1")
    for name in (".part-1", "tape/.part-1"):
        (theirs.folder / name).write_bytes(b"half")
    assert Run.open(theirs.folder).scenario_text()
    assert torch.is_tensor(Run.open(theirs.folder).scenario().federation.shards.dataset.x)
