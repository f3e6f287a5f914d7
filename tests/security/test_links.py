"""A run's folder that came from elsewhere: nothing in it leads a command to a file outside, or makes it wait."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.server.dashboard.web import make_app
from fedgauge.server.store import run_files
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import TapeError
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.retention import prune
from tests.server.dashboard.pages import Http

ROUND = "round-00001-client-00000"
COMMANDS: dict[str, list[str]] = {
    "audit": ["audit", "--retry", "all", "--force"],
    "resume": ["run", "--in-memory", "--resume"],
    "prune": ["prune", "--days", "0"],
    "report": ["report"],
    "export": ["export"],
    "stop": ["stop"],
    "gate": ["gate", "--fail-above", "psnr=20"],
    "compare": ["report"],  # with another run
}


@pytest.fixture
def theirs(attacked_run: Run, tmp_path: Path) -> Run:
    folder = tmp_path / "runs" / "theirs"
    shutil.copytree(attacked_run.folder, folder)
    for name in ("report.html", f"tape/{ROUND}.safetensors", f"memories/{ROUND}-a.safetensors", "audit.lock"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"private")
    return Run(folder)


def outside(theirs: Run, name: str) -> Path:
    """A file or folder of the user's own, which looks like the run's, and takes its place."""
    own = theirs.folder.parent.parent / "home" / Path(name).name
    own.parent.mkdir()
    here = theirs.folder / name
    if here.is_dir():
        shutil.copytree(here, own)
    else:
        own.write_bytes(here.read_bytes() if here.exists() else b"4711 and more words that nobody may touch")
    return own


def state(place: Path) -> dict[str, tuple[Any, ...]]:
    """All that can be changed of a folder: names, bytes, modes, times."""
    found = {}
    for path in [place, *sorted(place.rglob("*"))]:
        at = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(at.st_mode) else None
        found[str(path.relative_to(place))] = (at.st_mode, at.st_mtime_ns, at.st_size, data)
    return found


def put(theirs: Run, name: str, make: Callable[[Path], None]) -> None:
    here = theirs.folder / name
    shutil.rmtree(here) if here.is_dir() else here.unlink(missing_ok=True)
    make(here)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_link_in_a_sentence(
    theirs: Run, attacked_run: Run, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = {"stop": "audit.lock", "verify": "audit-record.json"}.get(command, "ledger.sqlite")
    own = outside(theirs, name)
    put(theirs, name, lambda here: here.symlink_to(own))
    before = state(own.parent)
    further = [str(attacked_run.folder)] if command == "compare" else []
    assert main([*COMMANDS[command], str(theirs.folder), *further]) == 2
    said = capsys.readouterr().err
    assert f"{name} is a link" in said and "Traceback" not in said
    assert state(own.parent) == before


def _pipe(here: Path) -> None:
    os.mkfifo(here)


KINDS: dict[str, Callable[[Path], None]] = {"a pipe": _pipe, "a folder": Path.mkdir}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["scenario.toml", "ledger.sqlite", "tape/round-00001.safetensors", "audit.lock"])
def test_special_files_are_refused_without_waiting(theirs: Run, name: str, kind: str) -> None:
    put(theirs, name, KINDS[kind])
    with pytest.raises(run_files.RefusedFile):
        run_files.read(theirs.folder / name)


def test_the_page_names_a_linked_run_and_shows_the_others(theirs: Run, attacked_run: Run) -> None:
    shutil.copytree(attacked_run.folder, theirs.folder.parent / "good")
    own = outside(theirs, "scenario.toml")
    put(theirs, "scenario.toml", lambda here: here.symlink_to(own))
    with Http(make_app(theirs.folder.parent), base_url="http://localhost") as http:
        lines = {line["id"]: line for line in http.get("/api/runs").json()["runs"]}
        assert "error" not in lines["good"] and "is a link" in lines["theirs"]["error"]
        assert http.get("/api/runs/theirs/overview").status_code == 503


def test_every_opening_refuses_links_by_itself(theirs: Run) -> None:
    home = theirs.folder.parent.parent / "home"
    for part in ("tape", "reconstructions", "memories"):
        shutil.copytree(theirs.folder / part, home / part)
        shutil.rmtree(theirs.folder / part)
        (theirs.folder / part).symlink_to(home / part)
    before = state(home)
    with pytest.raises(run_files.RefusedFile):
        theirs.sweep(0)
    with pytest.raises(run_files.RefusedFile):
        theirs.tape().forget(1, [0, 1])
    with pytest.raises(TapeError):
        theirs.tape().read(1, 0)
    with pytest.raises(run_files.RefusedFile):
        theirs.write_reconstruction(1, 0, "a", {"x": torch.ones(1)})
    with pytest.raises(run_files.RefusedFile):
        theirs.write_memory(1, 0, "a", {"x": torch.ones(1)})
    with pytest.raises(run_files.RefusedFile):
        prune(theirs, 0, 1e12)
    assert state(home) == before


def test_a_journal_is_not_played_back(theirs: Run) -> None:
    """SQLite deletes what a rollback journal names as its super-journal."""
    (theirs.folder / "ledger.sqlite-journal").write_bytes(b"x")
    for readonly in (True, False):
        with pytest.raises(LedgerError):
            theirs.ledger(readonly)
