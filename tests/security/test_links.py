"""A run's folder that came from elsewhere: nothing in it leads a command to a file outside, or makes it wait."""

import os
import re
import shutil
import socket
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.server.dashboard.web import make_app
from fedgauge.server.store import run_files
from fedgauge.server.store.checkpoint import Checkpoint
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import TapeError
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.retention import prune
from tests.server.dashboard.pages import Http

ROUND = "round-00001-client-00000"
FILES = (
    "scenario.toml", "environment.json", "ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "checkpoint.json",
    "checkpoint-00001.safetensors", "model.safetensors", "weights.safetensors", "training.lock", "server.lock", "audit.lock",
    "report.html", "report.pdf", "audit-record.json", "scores.parquet", f"tape/{ROUND}.safetensors", "tape/round-00001.safetensors",
    f"reconstructions/{ROUND}-inverting_gradients.safetensors", f"memories/{ROUND}-a.safetensors", "logs/flower.log",
)  # fmt: skip
FOLDERS = ("tape", "reconstructions", "memories", "logs")
COMMANDS: dict[str, list[str]] = {
    "audit": ["audit", "--retry", "all", "--force"],
    "resume": ["run", "--in-memory", "--resume"],
    "prune": ["prune", "--days", "0"],
    "report": ["report"],
    "export": ["export", "--to", "parquet"],
    "stop": ["stop"],
    "verify": ["verify"],
    "gate": ["gate", "--fail-above", "psnr=20"],
    "compare": ["report"],  # with another run
}


@pytest.fixture
def theirs(attacked_run: Run, tmp_path: Path) -> Run:
    """A run with every kind of file that a run may have."""
    folder = tmp_path / "runs" / "theirs"
    shutil.copytree(attacked_run.folder, folder)
    Checkpoint(1, {"w": torch.ones(2)}, {}, {}, ()).write(folder)
    for name in FILES:
        path = folder / name
        if not path.exists() and not name.startswith("ledger"):
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(b"{}" if path.suffix == ".json" else b"private")
    (folder / "weights.safetensors").unlink()
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


def test_a_link_in_place_of_any_file_is_refused(theirs: Run, tmp_path: Path) -> None:
    assert Run.open(theirs.folder).scenario_text()
    for name in (*FILES, *FOLDERS):
        here, own = theirs.folder / name, tmp_path / "own"
        if there := here.exists():
            here.rename(own)
        here.symlink_to(own)
        with pytest.raises(run_files.RefusedFile, match=f"{name} is a link where a run has a"):
            Run.open(theirs.folder)
        here.unlink()
        if there:
            own.rename(here)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_link_in_a_sentence(
    theirs: Run, attacked_run: Run, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = outside(theirs, "ledger.sqlite")
    put(theirs, "ledger.sqlite", lambda here: here.symlink_to(own))
    before = state(own.parent)
    further = [str(attacked_run.folder)] if command == "compare" else []
    assert main([*COMMANDS[command], str(theirs.folder), *further]) == 2
    said = capsys.readouterr().err
    assert "ledger.sqlite is a link where a run has a file" in said and "Traceback" not in said
    assert state(own.parent) == before


def _pipe(here: Path) -> None:
    os.mkfifo(here)


def _socket(here: Path) -> None:
    """A socket with the name, made where its path is short enough."""
    beside = os.open(here.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{beside}/{here.name}"[:107])
    os.close(beside)


KINDS: dict[str, Callable[[Path], None]] = {"a pipe": _pipe, "a socket": _socket, "a folder": Path.mkdir}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["scenario.toml", "ledger.sqlite", "tape/round-00001.safetensors", "audit.lock"])
def test_what_is_no_file_is_refused_and_nobody_waits_for_it(theirs: Run, name: str, kind: str) -> None:
    put(theirs, name, KINDS[kind])
    if kind != "a folder" or "/" not in name:
        with pytest.raises(run_files.RefusedFile, match=f"{name} is {kind} where a run has a file"):
            Run.open(theirs.folder)
    with pytest.raises(run_files.RefusedFile, match=f"{name} is {kind} where a run has a file"):
        run_files.read(theirs.folder / name)


def test_the_page_names_a_linked_run_and_shows_the_others(theirs: Run, attacked_run: Run) -> None:
    shutil.copytree(attacked_run.folder, theirs.folder.parent / "good")
    own = outside(theirs, "scenario.toml")
    put(theirs, "scenario.toml", lambda here: here.symlink_to(own))
    with Http(make_app(theirs.folder.parent), base_url="http://localhost") as http:
        lines = {line["id"]: line for line in http.get("/api/runs").json()["runs"]}
        assert "error" not in lines["good"] and "is a link where a run has a file" in lines["theirs"]["error"]
        assert http.get("/api/runs/theirs/overview").status_code == 503


def test_every_opening_refuses_links_by_itself(theirs: Run) -> None:
    home = theirs.folder.parent.parent / "home"
    for part in ("tape", "reconstructions", "memories"):
        shutil.copytree(theirs.folder / part, home / part)
        shutil.rmtree(theirs.folder / part)
        (theirs.folder / part).symlink_to(home / part)
    before = state(home)
    with pytest.raises(run_files.RefusedFile, match="is a link where a run has a folder"):
        theirs.sweep(0)
    with pytest.raises(run_files.RefusedFile):
        theirs.tape().forget(1, [0, 1])
    with pytest.raises(TapeError, match="is a link"):
        theirs.tape().read(1, 0)
    with pytest.raises(run_files.RefusedFile):
        theirs.write_reconstruction(1, 0, "a", {"x": torch.ones(1)})
    with pytest.raises(run_files.RefusedFile):
        theirs.write_memory(1, 0, "a", {"x": torch.ones(1)})
    with pytest.raises(run_files.RefusedFile):
        prune(theirs, 0, 1e12)
    assert state(home) == before


def test_a_run_may_be_named_by_a_dot(theirs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for here, name in ((theirs.folder, "."), (theirs.folder / "tape", "..")):
        monkeypatch.chdir(here)
        assert (Run(Path(name)).name, Run(Path(name)).folder) == ("theirs", theirs.folder)


def test_names_that_are_no_text_or_steer_a_terminal_hide_no_run(
    theirs: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's name, or that of a link in it, in bytes that are no UTF-8, or with control codes."""
    runs = theirs.folder.parent
    for name in (b"no\xfftext", b"\x1b[31mred\x07", b"linked"):
        shutil.copytree(theirs.folder, runs / os.fsdecode(name))
    (runs / "linked" / os.fsdecode(b"\xff\x1b[31m.json")).symlink_to("/etc/hosts")
    assert main(["runs", "--runs", str(runs)]) == 0
    listed, said = capsys.readouterr()
    assert re.search(r"theirs +complete", listed) and re.search(r"\[31mred +complete", listed)
    assert "has a name that is no text (UTF-8): rename the folder" in said and ".json is a link where" in said
    assert main(["prune", "--days", "100000", "--runs", str(runs)]) == 2
    kept, told = capsys.readouterr()
    assert kept.count("cannot be read") == 2 and kept.count("younger than") == 2
    assert main(["report", str(runs / os.fsdecode(b"no\xfftext"))]) == 2
    assert not set("\x1b\x07") & set(listed + said + kept + told + capsys.readouterr().err)
    with Http(make_app(runs), base_url="http://localhost") as http:
        lines = http.get("/api/runs").json()["runs"]
        assert len(lines) == 4 and sum("error" in line for line in lines) == 2
        assert http.get("/api/compare").status_code in (404, 503)
        assert http.get("/api/runs/linked/overview").status_code == 503
        assert http.get("/api/runs/theirs/overview").status_code == 200


@pytest.mark.parametrize("named", [["--runs", "RUNS"], ["RUNS"], ["RUNS/linked", "RUNS/good"]])
def test_one_bad_run_keeps_no_other_from_being_pruned(
    theirs: Run, named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder of runs, in a sweep, and named one by one; a folder that is a link itself is said, not passed over."""
    runs = theirs.folder.parent
    for name in ("linked", "good"):
        shutil.copytree(theirs.folder, runs / name)
    shutil.rmtree(theirs.folder)
    (runs / "linked" / "note.json").symlink_to("/etc/hosts")
    (runs / "elsewhere").symlink_to(runs / "good")
    if named == ["RUNS"]:
        (runs / "sweep.toml").touch()
    assert main(["prune", "--days", "0", *(word.replace("RUNS", str(runs)) for word in named)]) == 2
    done, said = capsys.readouterr()
    assert "linked: kept, as it cannot be read" in done and "good: " in done and " files deleted" in done
    assert "note.json is a link where a run has a file" in said
    assert ("elsewhere is a link and left out: name the run that it points to" in said) == ("RUNS/good" not in named)
    assert not list((runs / "good" / "tape").iterdir()) and list((runs / "linked" / "tape").iterdir())


def test_a_journal_that_names_a_file_to_delete_is_not_played_back(theirs: Run) -> None:
    """SQLite deletes what a rollback journal names as its super-journal."""
    victim = theirs.folder.parent / "victim"
    victim.write_bytes(b"mine")
    path = theirs.folder / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    db.close()
    (theirs.folder / "ledger.sqlite-journal").write_bytes(_journal(path, victim))
    for readonly in (True, False):
        with pytest.raises(LedgerError, match=r"ledger\.sqlite-journal is not of fedgauge, which keeps no such file"):
            theirs.ledger(readonly)
    assert victim.read_bytes() == b"mine"
    # the control: SQLite itself, without our check, deletes the file
    with sqlite3.connect(path) as db:
        db.execute("SELECT count(*) FROM meta").fetchone()
    db.close()
    assert not victim.exists()


def _journal(database: Path, victim: Path) -> bytes:
    """A hot journal of one page, as the file format describes it, with a super-journal's name at its end."""
    data = database.read_bytes()
    size = int.from_bytes(data[16:18], "big")
    page = data[:size]
    nonce = 7
    check = (nonce + sum(page[i] for i in range(size - 200, 0, -200))) % 2**32
    header = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + b"".join(
        n.to_bytes(4, "big") for n in (1, nonce, len(data) // size, 512, size)
    )
    records = (1).to_bytes(4, "big") + page + check.to_bytes(4, "big")
    name = str(victim).encode()
    pointer = (2**30 // size + 1).to_bytes(4, "big") + name + len(name).to_bytes(4, "big")
    pointer += (sum(name) % 2**32).to_bytes(4, "big") + header[:8]
    return header.ljust(512, b"\0") + records + pointer


def test_a_folder_with_two_names_for_one_run_is_named_by_its_user(theirs: Run) -> None:
    """Whoever names a run by a link of his own means what it points to."""
    latest = theirs.folder.parent.parent / "latest"
    latest.symlink_to(theirs.folder)
    assert Run.open(latest).folder == theirs.folder
    assert isinstance(Run.open(latest).ledger(readonly=True), Ledger)
