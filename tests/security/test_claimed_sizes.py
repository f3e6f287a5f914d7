"""A small file from elsewhere that says that it is large: it is refused before memory or time is taken for what it says."""

import json
import os
import shutil
import sqlite3
import struct
import tomllib
import tracemalloc
from pathlib import Path

import pytest

from fedgauge.client import toml_text
from fedgauge.client.components import SpecError, Table
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError
from fedgauge.server.views.clients import clients, heat_map
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.scores import LARGEST, Scores
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reports.export import rows
from fedgauge.simulations.reports.figures.draw import draw_heat_map
from fedgauge.simulations.reports.report import write_report
from tests.server.dashboard.pages import Http
from tests.small_runs import scenario, taped

HEX = f"0x{'f' * 5000}"


@pytest.fixture
def theirs(attacked_run: Run, tmp_path: Path) -> Run:
    """A copy, to be changed, whose ledger is one file of pages of 512 bytes."""
    run = Run(Path(shutil.copytree(attacked_run.folder, tmp_path / "runs" / "theirs")))
    db = sqlite3.connect(run.folder / "ledger.sqlite")
    db.executescript("PRAGMA journal_mode = DELETE; PRAGMA page_size = 512; VACUUM; PRAGMA journal_mode = WAL")
    db.close()
    return run


@pytest.mark.parametrize("key", ["seed", "rounds", "data.batch_size"])
def test_a_number_of_thousands_of_digits_hides_no_run(
    theirs: Run, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """Python reads it where it is hexadecimal, and refuses to write it."""
    shutil.copytree(theirs.folder, theirs.folder.parent / "good")
    path = theirs.folder / "scenario.toml"
    lines = path.read_text().splitlines()
    name = key.rpartition(".")[2]
    assert any(line.startswith(f"{name} = ") for line in lines)
    path.write_text("\n".join(f"{name} = {HEX}" if line.startswith(f"{name} = ") else line for line in lines))
    for command in (["report", str(theirs.folder)], ["audit", str(theirs.folder)], ["prune", str(theirs.folder)]):
        assert main(command) == 2, command
        assert "a whole number has more than 64 bits" in capsys.readouterr().err
    assert main(["runs", "--runs", str(theirs.folder.parent)]) == 0
    told = capsys.readouterr()
    assert "unreadable" in told.out and "good" in told.out and "more than 64 bits" in told.err


@pytest.mark.parametrize("number", [HEX, f"-{2**64}", f"[[1, {2**64}]]", f"{{a = {2**64}}}", "9" * 5000])
def test_a_number_of_more_than_64_bits_is_no_setting(number: str, tmp_path: Path) -> None:
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
    with pytest.raises(tomllib.TOMLDecodeError, match="more than 32 names are joined by dots"):
        toml_text.parse(text.encode())


@pytest.mark.parametrize(
    "text",
    ["a." * 30 + "a = 1", f"a = [{'0.1, ' * 1000}]", "a = '''" + "A sentence. " * 1000 + "'''", "# " + ". " * 99],
)
def test_other_dots_are_read(text: str) -> None:
    assert toml_text.parse(text.encode()) == tomllib.loads(text)


def _sums(data: bytes, first: int, second: int) -> tuple[int, int]:
    """The checksum of SQLite's write-ahead log, as it goes on."""
    words = struct.unpack(f"<{len(data) // 4}I", data)
    for i in range(0, len(words), 2):
        first = first + words[i] + second & 0xFFFFFFFF
        second = second + words[i + 1] + first & 0xFFFFFFFF
    return first, second


@pytest.mark.parametrize("readonly", [True, False])
def test_a_log_that_claims_two_terabytes_of_pages_is_refused_unchecked(theirs: Run, readonly: bool) -> None:
    """SQLite's check takes a bit for each page that a file claims: 512 MB for a file of 35 KB."""
    path, pages = theirs.folder / "ledger.sqlite", 2**32 - 2
    page = bytearray(path.read_bytes()[:512])
    page[92:96] = bytes(4)  # the number of pages in the file's own head does not count then
    head = struct.pack(">6I", 0x377F0682, 3007000, 512, 0, 1, 2)
    sums = _sums(head, 0, 0)
    log = head + struct.pack(">2I", *sums)
    frame = struct.pack(">2I", 1, pages)
    sums = _sums(bytes(page), *_sums(frame, *sums))
    log += frame + struct.pack(">4I", 1, 2, *sums) + page
    (theirs.folder / "ledger.sqlite-wal").write_bytes(log)
    with pytest.raises(
        LedgerError, match=f"is damaged: it claims {pages} pages of 512 bytes, and holds [0-9]{{5,6}} bytes"
    ):
        theirs.ledger(readonly=readonly)


def test_a_ledger_of_holes_is_refused_unchecked(theirs: Run) -> None:
    path = theirs.folder / "ledger.sqlite"
    data = bytearray(path.read_bytes())
    data[92:96] = bytes(4)
    path.write_bytes(data)
    with theirs.ledger(readonly=True) as ledger:
        assert ledger.rounds(), "without the hole it is as good as any"
    os.truncate(path, 1 << 40)
    with pytest.raises(LedgerError, match=f"is damaged: it claims {2**31} pages of 512 bytes"):
        theirs.ledger(readonly=True)


def test_a_reconstruction_of_holes_is_not_read(theirs: Run) -> None:
    size = 600_000 * 28 * 28 * 4
    head = json.dumps({"x": {"dtype": "F32", "shape": [600_000, 1, 28, 28], "data_offsets": [0, size]}}).encode()
    path = theirs.reconstruction(1, 0, "dlg")
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(path, 8 + len(head) + size)
    with pytest.raises(TapeError, match=f"no such file has more than {1 << 30}"):
        theirs.read_reconstruction(1, 0, "dlg")


NOISY = [
    {"use": "clip", "max_norm": 1.0, "each": True},
    {"use": "gaussian", "sigma": 0.5},
    {"use": "local_sgd", "rate": 0.1},
]
SHIFTED = "; ".join(f"UPDATE {table} SET client = client + 7" for table in ("scores", "jobs", "observations"))


@pytest.mark.parametrize("together", [{}, {"secure_sum": {"group": 2}}], ids=["alone", "summed"])
def test_a_ledger_may_name_clients_that_its_scenario_does_not_have(tmp_path: Path, together: Table) -> None:
    chosen = scenario(clients=4, chain=NOISY, attack=[{"use": "dlg", "iterations": 1, "tune": "off"}], **together)
    run = taped(tmp_path / "runs" / "run", chosen)
    serve(run, LocalExecutor())
    with sqlite3.connect(run.folder / "ledger.sqlite") as db:
        db.executescript(SHIFTED)
    db.close()
    with Http(make_app(run.folder.parent), base_url="http://localhost") as http:
        for view in ("overview", "gallery", "clients", "clients/7"):
            assert http.get(f"/api/runs/run/{view}").status_code == 200, view
    write_report(run)
    assert {row[2] for row in rows(run)} == {7, 8, 9}


def test_a_ledger_may_have_updates_of_groups_whose_clients_all_miss_the_round(tmp_path: Path) -> None:
    """The scenario says who came too late, the ledger who answered, and each may be somebody else's."""
    tables: Table = {"clients": 4, "chain": NOISY, "secure_sum": {"group": 2}, "rounds": 1}
    attack = {"attack": [{"use": "dlg", "iterations": 1, "tune": "off"}]}
    late = scenario(**tables, **attack, stragglers={"probability": 0.6})
    assert all(late.protocol.misses(c, 1) for c in (0, 1)), "or nothing is tested"
    run = taped(tmp_path / "runs" / "run", scenario(**tables, **attack), 1)
    serve(run, LocalExecutor())
    (run.folder / "scenario.toml").write_text(late.to_toml())
    with Http(make_app(run.folder.parent), base_url="http://localhost") as http:
        for view in ("overview", "gallery", "clients", "clients/0"):
            assert http.get(f"/api/runs/run/{view}").status_code == 200, view
    write_report(run)
    assert 0 in {row[2] for row in rows(run)}
    assert main(["audit", "--force", "--log", "quiet", str(run.folder)]) in (0, 1, 2)


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


def test_of_infinite_values_only_an_exact_hit_is_one() -> None:
    values = (2.0, LARGEST, -LARGEST, 2 * LARGEST, float("inf"), float("-inf"))
    read = Scores.empty().extended(
        (1, 0, "dlg", example, metric, "converged", value)
        for metric in ("psnr", "mse")
        for example, value in enumerate(values)
    )
    known = [repr(v) for v in read.of_metric("psnr").value.tolist()]
    assert known == ["2.0", "1e+100", "-1e+100", "nan", "inf", "nan"]
    assert [repr(v) for v in read.of_metric("mse").value.tolist()] == [*known[:4], "nan", "nan"]


MANY = 2000  # clients, and rounds: a table of all would have four million cells


def test_no_heat_map_has_as_many_cells_as_a_ledgers_clients_times_its_rounds(attacked_run: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(attacked_run.folder, tmp_path / "run")))
    db = sqlite3.connect(run.folder / "ledger.sqlite")
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 3 UNION ALL SELECT i + 1 FROM n WHERE i < {MANY})"
    names = [row[1] for row in db.execute("PRAGMA table_info(observations)")]
    own = ", ".join("n.i" if name == "client" else name for name in names)
    db.execute(f"INSERT INTO observations {numbers} SELECT {own} FROM observations, n WHERE round = 2 AND client = 0")
    db.execute(
        f"INSERT INTO scores {numbers} SELECT job_id, attack, client, n.i, metric, n.i, n.i / 100.0, status, seconds"
        " FROM scores, n WHERE round = 1 AND client = 0 AND example = 0"
    )
    db.commit()
    db.close()
    reading = Reading(run)
    tracemalloc.start()
    try:
        with reading.now():
            found, heat = clients(reading, "psnr", None), heat_map(reading, "psnr")
            assert heat is not None
            draw_heat_map(heat)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        reading.close()
    assert (len(heat.clients), len(heat.rounds)) == (len(heat.values), len(heat.values[0])) == (100, 500)
    assert f"{MANY + 1 - 100} clients" in heat.meaning and f"{MANY - 500} rounds" in heat.meaning
    assert len(found["table"]) == MANY + 1 and found["table"][0]["client"] in heat.clients
    assert heat.rounds[0] == 1 and heat.rounds[-1] == MANY
    assert peak < 64 << 20
