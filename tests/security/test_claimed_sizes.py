"""A small file from elsewhere that says that it is large: it is refused before memory or time is taken for what it says."""

import json
import os
import shutil
import sqlite3
import tomllib
from pathlib import Path

import pytest

from fedgauge.client import toml_text
from fedgauge.client.components import SpecError
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError
from tests.server.dashboard.pages import Http

HEX = f"0x{'f' * 5000}"


@pytest.fixture
def theirs(attacked_run: Run, tmp_path: Path) -> Run:
    """A copy, to be changed, whose ledger is one file of pages of 512 bytes."""
    run = Run(Path(shutil.copytree(attacked_run.folder, tmp_path / "runs" / "theirs")))
    db = sqlite3.connect(run.folder / "ledger.sqlite")
    db.executescript("PRAGMA journal_mode = DELETE; PRAGMA page_size = 512; VACUUM; PRAGMA journal_mode = WAL")
    db.close()
    return run


@pytest.mark.parametrize("number", [HEX, f"-{2**64}", f"[[1, {2**64}]]", f"{{a = {2**64}}}", "9" * 5000])
def test_a_number_of_more_than_64_bits_is_no_setting(number: str, tmp_path: Path) -> None:
    if len(number) > 4300:  # Python refuses to write it
        with pytest.raises(tomllib.TOMLDecodeError):
            toml_text.parse(f"a = {number}".encode())
    (tmp_path / "s.toml").write_text("rounds = 1")
    with pytest.raises(SpecError):
        Scenario.load(tmp_path / "s.toml", [f"seed={number}"])


@pytest.mark.parametrize(
    "text",
    [
        "a." * 32 + "a = 1",
        " a\t. " * 32 + "a = 1",
        "b = 1\n[" + "a." * 400_000 + "a]",
        "[[" + "a." * 32 + "a]]",
        "b = {c = 1," + "a." * 32 + "a = 1}",
        '"a\\"b".' * 16 + "'c'." * 16 + "d = 1",
    ],
)
def test_a_key_of_many_names_is_not_even_parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of its names tomllib goes through those before it."""
    monkeypatch.setattr(tomllib, "loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(tomllib.TOMLDecodeError):
        toml_text.parse(text.encode())


def test_a_ledger_of_holes_is_refused_unchecked(theirs: Run) -> None:
    path = theirs.folder / "ledger.sqlite"
    data = bytearray(path.read_bytes())
    data[92:96] = bytes(4)
    path.write_bytes(data)
    with theirs.ledger(readonly=True) as ledger:
        assert ledger.rounds(), "without the hole it is as good as any"
    os.truncate(path, 1 << 40)
    with pytest.raises(LedgerError):
        theirs.ledger(readonly=True)


def test_a_reconstruction_of_holes_is_not_read(theirs: Run) -> None:
    size = 600_000 * 28 * 28 * 4
    head = json.dumps({"x": {"dtype": "F32", "shape": [600_000, 1, 28, 28], "data_offsets": [0, size]}}).encode()
    path = theirs.reconstruction(1, 0, "dlg")
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(path, 8 + len(head) + size)
    with pytest.raises(TapeError, match=str(1 << 30)):
        theirs.read_reconstruction(1, 0, "dlg")


# ------------------------------------------------------------------------------------------------------- extreme scores


@pytest.mark.parametrize("value", ["1.7e308", "-1.7e308", "9e999", "-9e999", "1.7e308 * (1 - 2 * (example % 2))"])
def test_no_score_makes_a_view_overflow(attacked_run: Run, tmp_path: Path, value: str) -> None:
    """Warnings are errors here: of a number too large, of infinity minus infinity."""
    run = Run(Path(shutil.copytree(attacked_run.folder, tmp_path / "run")))
    db = sqlite3.connect(run.folder / "ledger.sqlite")
    db.execute(f"UPDATE scores SET value = {value}")
    db.commit()
    db.close()
    with Http(make_app(tmp_path), base_url="http://localhost") as http:
        for address in ("", "/run/overview", "/run/clients"):
            assert http.get(f"/api/runs{address}").status_code == 200
