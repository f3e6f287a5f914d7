"""A run's folder that came from elsewhere: nothing in it leads a command to a file outside, or makes it wait."""

import errno
import os
import re
import shutil
import socket
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedgauge.client import toml_text
from fedgauge.client.components import SpecError
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.store import run_files
from fedgauge.server.store.checkpoint import Checkpoint
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import TapeError
from fedgauge.simulations.cli import housekeeping_commands
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reports import export, pdf, report
from fedgauge.simulations.reports.figures.write import write_figures
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
READ_FIRST = ("audit-record.json", "ledger.sqlite", "scenario.toml")
COMMANDS: dict[str, list[str]] = {
    "audit": ["audit", "--retry", "all", "--force"],
    "resume": ["run", "--in-memory", "--resume"],
    "prune": ["prune", "--days", "0"],
    "report": ["report"],
    "export": ["export", "--to", "parquet"],
    "stop": ["stop"],
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


def refused(theirs: Run, other: Run, command: str, capsys: pytest.CaptureFixture[str]) -> str:
    further = [str(other.folder)] if command == "compare" else []
    status = main([*COMMANDS[command], str(theirs.folder), *further])
    said = capsys.readouterr().err
    assert status == 2, said
    assert said.startswith("fedgauge: ") or command == "prune"
    assert "Traceback" not in said and str(theirs.folder) in said
    return said


@pytest.mark.product
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_link_in_place_of_any_file_is_refused_by_every_command(
    theirs: Run, attacked_run: Run, name: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = outside(theirs, name)
    put(theirs, name, lambda here: here.symlink_to(own))
    before = state(own.parent)
    said = refused(theirs, attacked_run, command, capsys)
    assert f"{theirs.folder / name} is a link where a run has a" in said
    assert state(own.parent) == before


@pytest.mark.parametrize(
    "name",
    [name if name in READ_FIRST else pytest.param(name, marks=pytest.mark.full) for name in (*FILES, *FOLDERS)],
)
def test_nor_is_it_followed_where_a_record_is_verified_or_a_gate_judges(
    theirs: Run, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = outside(theirs, name)
    put(theirs, name, lambda here: here.symlink_to(own))
    before = state(own.parent)
    for command in (["verify"], ["gate", "--fail-above", "psnr=20"]):
        if command == ["verify"] or name != "audit-record.json":  # which a gate does not read
            assert main([*command, str(theirs.folder)]) == 2
            assert f"{theirs.folder / name} is a link where a run has a" in capsys.readouterr().err
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


@pytest.mark.product
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_and_nobody_waits_for_it(
    theirs: Run, attacked_run: Run, name: str, kind: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(theirs, name, KINDS[kind])
    said = refused(theirs, attacked_run, command, capsys)
    deep = "/" in name and kind == "a folder"  # its being empty or not is nobody's matter
    assert deep or f"{theirs.folder / name} is {kind} where a run has a file" in said


def test_lists_and_the_page_name_each_linked_run_and_show_the_others(
    theirs: Run, attacked_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, homes = theirs.folder.parent, theirs.folder.parent.parent / "home"
    names = {name.replace("/", "+"): name for name in (*FILES, *FOLDERS)}
    for run, name in names.items():
        moved = Run(Path(shutil.copytree(theirs.folder, runs / f"{run}.run")))
        own = homes / run / Path(name).name
        own.parent.mkdir(parents=True)
        here = moved.folder / name
        if here.is_dir():
            shutil.copytree(here, own)
        else:
            own.write_bytes(here.read_bytes() if here.exists() else b"mine")
        put(moved, name, lambda here, own=own: here.symlink_to(own))  # type: ignore[misc]
    shutil.rmtree(theirs.folder)
    shutil.copytree(attacked_run.folder, runs / "good")
    before = state(homes)
    assert main(["runs", "--runs", str(runs)]) == 0
    listed, said = capsys.readouterr()
    assert "good" in listed and "Traceback" not in said
    with Http(make_app(runs), base_url="http://localhost") as http:
        lines = {line["id"]: line for line in http.get("/api/runs").json()["runs"]}
        assert "error" not in lines["good"]
        for run, name in names.items():
            if "/" not in name:
                assert "is a link where a run has a" in lines[f"{run}.run"]["error"]
            shown = [http.get(f"/api/runs/{run}.run/{part}").status_code for part in ("overview", "gallery", "clients")]
            assert set(shown) == ({200} if "/" in name else {503})
    assert main(["prune", "--days", "0", "--runs", str(runs)]) == 2
    done, said = capsys.readouterr()
    assert done.count("kept, as it cannot be read") == len(names) == said.count("is a link") and "good: " in done
    assert state(homes) == before


@pytest.mark.parametrize("name", ["training.lock", "audit.lock", "server.lock", "logs/flower.log", "ledger.sqlite"])
def test_a_file_with_two_names_is_not_changed_in_place(theirs: Run, name: str) -> None:
    """A hard link is another name of a file outside: locks are emptied, logs and ledgers written in place."""
    own = outside(theirs, name)
    put(theirs, name, lambda here: here.hardlink_to(own))
    before = state(own.parent)
    with (
        pytest.raises(LedgerError, match=r"a file with 2 names \(hard links\).*: copy the run, and open the copy"),
        theirs.lock(name.removesuffix(".lock")) if name.endswith(".lock") else nullcontext(),
    ):
        _ = theirs.log("flower.log") if name.startswith("logs") else theirs.ledger()
    assert state(own.parent) == before


def test_what_becomes_a_link_after_the_check_is_not_followed_either(theirs: Run) -> None:
    """Every opening stands for itself: the check of the whole folder is there for the message."""
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


def test_a_scenario_that_becomes_a_link_after_it_was_looked_at_is_not_read(
    theirs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, home, look = theirs.folder / "scenario.toml", theirs.folder.parent.parent / "home.toml", run_files.look

    def swapped(*args: Any, **kwargs: Any) -> Any:
        found = look(*args, **kwargs)
        if not path.is_symlink():
            path.rename(home)
            path.symlink_to(home)
        return found

    monkeypatch.setattr(run_files, "look", swapped)
    with pytest.raises(run_files.RefusedFile, match="is a link"):
        theirs.scenario()
    monkeypatch.undo()
    assert path.is_symlink()


@pytest.mark.parametrize("name", ["weights.safetensors", "data"])
def test_weights_and_data_in_a_run_that_become_a_link_after_it_was_looked_at_are_not_read(
    theirs: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What is opened while the scenario is read: the file that root may read, of a run that its owner goes on changing."""
    (theirs.folder / "data").mkdir()
    np.savez(
        theirs.folder / "data" / "own.npz",
        x=np.arange(600 * 784).reshape(600, 28, 28).astype(np.uint8),
        y=np.arange(600) % 10,
    )
    initial, _ = theirs.scenario().federation.initial()
    save_file(initial, theirs.folder / "weights.safetensors")
    settings = ["data.use=npz", f"data.path={theirs.folder / 'data' / 'own.npz'}"]
    assert theirs.scenario(settings).protocol.data["use"] == "npz", "as it is it is read"
    path, home, parse = theirs.folder / name, theirs.folder.parent.parent / "home", toml_text.parse

    def swapped(data: bytes) -> Any:
        if not path.is_symlink():
            path.rename(home)
            path.symlink_to(home)
        return parse(data)

    monkeypatch.setattr(toml_text, "parse", swapped)
    with pytest.raises(SpecError, match=f"{name} is a link where a run has a f"):
        theirs.scenario(settings)
    assert path.is_symlink()


def test_a_run_that_becomes_a_link_leads_nowhere(theirs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruned, read or written: a run that its user has opened is that folder and no other."""
    own = Path(shutil.copytree(theirs.folder, theirs.folder.parent.parent / "home" / "own"))
    before = state(own)
    _when_deleting(monkeypatch, theirs.folder, own)
    with pytest.raises(run_files.RefusedFile, match="theirs is a link where a run has a folder"):
        prune(theirs, 0, 1e12)
    with pytest.raises(run_files.RefusedFile):
        theirs.write_reconstruction(1, 0, "a", {"x": torch.ones(1)})
    with pytest.raises(run_files.RefusedFile):
        theirs.log("flower.log")
    with pytest.raises(TapeError, match="is a link"):
        theirs.tape().read(1, 0)
    assert state(own) == before
    shutil.rmtree(own / "tape")
    with pytest.raises(run_files.RefusedFile):
        theirs.tape().write_update(1, 0, {"w": torch.ones(1)})
    assert not (own / "tape").exists()


def test_another_run_that_takes_the_place_by_a_link_above_is_not_pruned(
    theirs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose folder of runs it is replaces that by a link to another user's, with a run of the same name; root would be let in."""
    runs = theirs.folder.parent
    own = Path(shutil.copytree(runs, runs.parent / "home"))
    before = state(own)
    _when_deleting(monkeypatch, runs, own)
    with pytest.raises(run_files.RefusedFile, match="theirs was replaced while it was at work: copy the run"):
        prune(theirs, 0, 1e12)
    assert runs.is_symlink() and state(own) == before
    assert Run.open(theirs.folder).scenario_text(), "named anew it is opened"


def test_the_age_at_which_a_run_is_pruned_is_its_own(
    theirs: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of the run in whose place it has come."""
    runs = theirs.folder.parent
    own = Path(shutil.copytree(runs, runs.parent / "home"))
    before = state(own)

    def swapped(run: Run) -> dict[str, Any]:
        runs.rename(runs.with_name("moved"))
        runs.symlink_to(own)
        return {"tape": {"retention_days": 0}}

    monkeypatch.setattr(housekeeping_commands, "tables_of", swapped)
    assert main(["prune", str(theirs.folder)]) == 2
    assert "theirs was replaced while it was at work" in capsys.readouterr().err
    assert state(own) == before


@pytest.mark.parametrize("words", [["report"], ["export", "--to", "parquet"]])
def test_a_report_or_export_does_not_go_into_a_run_that_a_link_above_leads_to(
    theirs: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    runs = theirs.folder.parent
    own = Path(shutil.copytree(runs, runs.parent / "home"))
    before, replacing = state(own), run_files.replacing

    def swapped(path: Path) -> Any:
        runs.rename(runs.with_name("moved"))
        runs.symlink_to(own)
        return replacing(path)

    monkeypatch.setattr(run_files, "replacing", swapped)
    assert main([*words, str(theirs.folder)]) == 2
    assert "theirs was replaced while it was at work" in capsys.readouterr().err
    assert state(own) == before


def test_a_comparison_shows_no_run_that_one_has_become_a_link_to(
    theirs: Run, attacked_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's own folder is resolved where its user names it, and not again once others may have put a link there."""
    private = Path(shutil.copytree(theirs.folder, theirs.folder.parent.parent / "home" / "private"))
    compare, figures = report.write_comparison, theirs.folder.parent.parent / "figures"

    def swapped(*words: Any) -> Path:
        theirs.folder.rename(theirs.folder.with_name("moved"))
        theirs.folder.symlink_to(private)
        return compare(*words)

    monkeypatch.setattr(report, "write_comparison", swapped)
    assert main(["report", str(theirs.folder), str(attacked_run.folder), "--figures", str(figures)]) == 2
    assert "theirs is a link where a run has a folder" in capsys.readouterr().err
    with pytest.raises(LedgerError, match="theirs is a link where a run has a folder"):
        write_figures([theirs], figures)
    assert theirs.name == "theirs" and not (theirs.folder.parent / "comparison.html").exists() and not figures.exists()


def test_a_run_may_be_named_by_a_dot(theirs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for here, name in ((theirs.folder, "."), (theirs.folder / "tape", "..")):
        monkeypatch.chdir(here)
        assert (Run(Path(name)).name, Run(Path(name)).folder) == ("theirs", theirs.folder)


def test_a_folder_that_was_a_link_for_a_moment_is_refused_like_one(
    theirs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system found no folder where there is one when we ask what it is."""

    def no_folder(name: Any, *flags: Any, **at: Any) -> int:
        if name == theirs.folder:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return opened(name, *flags, **at)

    opened = os.open
    monkeypatch.setattr(run_files.os, "open", no_folder)
    with pytest.raises(run_files.RefusedFile, match="theirs was replaced while it was at work"):
        theirs.scenario_text()


def test_a_report_is_written_into_the_folder_that_was_read(theirs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(shutil.copytree(theirs.folder, theirs.folder.parent.parent / "home" / "own"))
    (own / "report.html").write_text("mine")
    content = report._content

    def swapped(reading: Any) -> Any:
        found = content(reading)
        theirs.folder.rename(theirs.folder.with_name("moved"))
        theirs.folder.symlink_to(own)
        return found

    monkeypatch.setattr(report, "_content", swapped)
    with pytest.raises((run_files.RefusedFile, LedgerError), match="is a link where a run has a folder"):
        report.write_report(theirs)
    assert (own / "report.html").read_text() == "mine"


def _what_a_browser_prints(theirs: Run) -> None:
    theirs.folder.joinpath("report.html").write_text("<p>theirs</p>")
    pdf.write_pdf(theirs)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (export.write_parquet, "scores.parquet"),
        (_what_a_browser_prints, "report.pdf"),
    ],
    ids=["parquet", "pdf"],
)
def test_what_others_write_by_path_stays_in_the_folder_that_was_opened(
    theirs: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write: Callable[[Run], object], name: str
) -> None:
    """Its owner swaps the run for a link before the first byte is written; what is being written has its name there, too."""
    own = Path(shutil.copytree(theirs.folder, theirs.folder.parent.parent / "home" / "own"))
    before, moved = state(own), theirs.folder.with_name("moved")

    def swap() -> None:
        if not theirs.folder.is_symlink():
            for made in theirs.folder.glob(".part-*/**"):
                (own / made.relative_to(theirs.folder)).mkdir(parents=True)
            theirs.folder.rename(moved)
            theirs.folder.symlink_to(own)
            before.update(state(own))

    if name == "report.pdf":
        browser = tmp_path / "chromium"
        browser.write_text(
            '#!/bin/sh\nfor word; do case "$word" in --print-to-pdf=*) printf %%PDF > "${word#*=}";; esac; done\n'
        )
        browser.chmod(0o755)
        monkeypatch.setattr(pdf, "find_browser", lambda: str(browser))
        start = pdf.processes.start
        monkeypatch.setattr(pdf.processes, "start", lambda *words: [swap(), start(*words)][1])
    else:
        of_run = export.rows
        monkeypatch.setattr(export, "rows", lambda *given: [swap(), of_run(*given)][1])
    with suppress(LedgerError):  # what is read, or written, after that is refused
        write(theirs)
    assert theirs.folder.is_symlink() and state(own) == before


def test_a_run_is_created_in_its_own_folder(theirs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    own, scenario = theirs.folder.parent.parent / "home", theirs.scenario()
    own.mkdir()
    text = type(scenario).to_toml

    def swapped(self: Any) -> str:
        made = theirs.folder.with_name("new")
        made.rename(theirs.folder.with_name("moved"))
        made.symlink_to(own)
        return text(self)

    monkeypatch.setattr(type(scenario), "to_toml", swapped)
    with pytest.raises(run_files.RefusedFile, match="new is a link where a run has a folder"):
        Run.create(theirs.folder.with_name("new"), scenario)
    assert not list(own.iterdir())


def test_a_folder_that_is_swapped_while_it_is_made_is_not_written_into(
    theirs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def theirs_instead(name: str, *words: Any, **at: Any) -> None:
        make(name, *words, **at)
        os.chown(theirs.folder / name, 12345, 12345)

    make = os.mkdir
    monkeypatch.setattr(run_files.os, "mkdir", theirs_instead)
    if os.getuid() != 0:
        pytest.skip("only root may give folders away")
    with (
        pytest.raises(run_files.RefusedFile, match="was replaced while it was made"),
        run_files.new_folder(theirs.folder),
    ):
        pass
    assert not list(theirs.folder.glob(".part-*"))


def _when_deleting(monkeypatch: pytest.MonkeyPatch, folder: Path, target: Path) -> None:
    """Replace a folder by a link as soon as the first file has been deleted."""

    def unlink(*names: Any, **at: Any) -> None:
        deleted(*names, **at)
        if not folder.is_symlink():
            folder.rename(folder.parent / "old")
            folder.symlink_to(target)

    deleted = os.unlink
    monkeypatch.setattr(run_files.os, "unlink", unlink)


def test_a_run_that_becomes_a_link_after_it_was_listed_is_not_pruned(
    theirs: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Path(shutil.copytree(theirs.folder, theirs.folder.parent.parent / "home" / "own"))
    before = state(own)

    def listed(folder: Path) -> list[Run]:
        found = all_runs(folder)
        theirs.folder.rename(theirs.folder.parent.parent / "old")
        theirs.folder.symlink_to(own)
        return found

    all_runs = housekeeping_commands.all_runs
    monkeypatch.setattr(housekeeping_commands, "all_runs", listed)
    assert main(["prune", "--days", "0", "--runs", str(theirs.folder.parent)]) == 2
    assert "is a link where a run has a folder" in capsys.readouterr().err
    assert state(own) == before


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


def test_another_users_run_is_refused_with_what_to_do(
    theirs: Run, attacked_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_files.os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(run_files, "_owner_of_ours", lambda device, folder: None)  # a folder in which we may not write
    for command in COMMANDS:
        said = refused(theirs, attacked_run, command, capsys)
        assert "belongs to another user" in said and "copy the run, which makes it yours" in said


def test_a_file_of_root_is_refused_by_anybody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "_owners", {})
    us = os.geteuid()
    if not us:
        os.seteuid(12345)
    try:
        with pytest.raises(run_files.RefusedFile, match=r"belongs to another user \(number 0\)"):
            run_files.read(Path("/etc/passwd"))
    finally:
        os.seteuid(us)


def test_where_every_file_has_one_owner_that_owner_is_ours(theirs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS with squashed users: what we make there belongs to somebody else."""
    monkeypatch.setattr(run_files, "_owners", {})
    monkeypatch.setattr(run_files.os, "geteuid", lambda: os.getuid() + 1)
    before = sorted(theirs.folder.rglob("*"))
    with Run.open(theirs.folder).ledger(readonly=True) as ledger:
        assert ledger.progress().total
    assert sorted(theirs.folder.rglob("*")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_root_reads_whosever_run_it_is_and_follows_no_link_in_it_either(theirs: Run) -> None:
    for path in [theirs.folder, *theirs.folder.rglob("*")]:
        os.chown(path, 12345, 12345)
    assert Run.open(theirs.folder).scenario_text()
    (theirs.folder / "note.json").symlink_to("/etc/passwd")
    with pytest.raises(run_files.RefusedFile, match="is a link"):
        Run.open(theirs.folder)


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


def test_a_reader_of_a_run_at_rest_leaves_no_file(theirs: Run) -> None:
    before = sorted(theirs.folder.iterdir())
    with theirs.ledger(readonly=True) as reader:
        assert reader.progress().total
        assert not reader.stale
    assert sorted(theirs.folder.iterdir()) == before
    with Http(make_app(theirs.folder.parent), base_url="http://localhost") as http:
        assert http.get("/api/runs").json()["runs"][0]["id"] == "theirs"
        assert http.get("/api/runs/theirs/overview").status_code == 200
    assert sorted(theirs.folder.iterdir()) == before


def test_a_reader_notices_who_begins_to_write(theirs: Run) -> None:
    with closing(theirs.ledger(readonly=True)) as reader, theirs.ledger() as writer:
        assert not reader.stale
        writer.set_meta(state="failed")
        assert reader.stale
        with theirs.ledger(readonly=True) as again:
            assert again.meta()["state"] == "failed"


def test_a_folder_with_two_names_for_one_run_is_named_by_its_user(theirs: Run) -> None:
    """Whoever names a run by a link of his own means what it points to."""
    latest = theirs.folder.parent.parent / "latest"
    latest.symlink_to(theirs.folder)
    assert Run.open(latest).folder == theirs.folder
    assert isinstance(Run.open(latest).ledger(readonly=True), Ledger)
