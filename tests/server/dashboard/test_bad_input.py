"""Bad queries, runs and ledgers are refused, and the page opens nothing outside its folder."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import Run
from tests.server.dashboard.pages import Get


@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "..",
        "%2e%2e",
        "..%2f..%2fetc",
        "complete%2f..",
        ".hidden",
        "link",
        "circle",
        "a%00b",
        "a" * 300,
        "%F0%9F%98%80" * 64,
        "complete\\..",
        "%ff",
    ],
)
def test_nothing_outside_the_folder_is_a_run(folder: Path, get: Get, name: str, attacked_run: Run) -> None:
    (folder / "link").symlink_to(attacked_run.folder)
    (folder / "circle").symlink_to(folder / "circle")
    shutil.copytree(folder / "complete", folder / ".hidden")
    for address in (f"/api/runs/{name}/overview", f"/api/runs/{name}/gallery", f"/run/{name}/gallery"):
        get(address, 404)
    assert [run["id"] for run in get("/api/runs")["runs"]] == ["complete"]


def test_a_reconstruction_behind_a_link_is_not_shown(folder: Path, get: Get, tmp_path: Path) -> None:
    run = Run(folder / "complete")
    path = run.reconstruction(1, 0, "inverting_gradients")
    path.rename(tmp_path / "elsewhere.safetensors")
    path.symlink_to(tmp_path / "elsewhere.safetensors")
    tiles = get("/api/runs/complete/gallery?round=1&client=0")["cards"][0]["tiles"]
    assert tiles[0]["image"] is None
    assert tiles[0]["note"].startswith("file damaged")


def test_a_ledger_cannot_name_a_file_elsewhere(folder: Path, get: Get, tmp_path: Path) -> None:
    """A ledger that somebody sent may call an attack what he likes."""
    with sqlite3.connect(folder / "complete" / "ledger.sqlite") as db:
        db.execute("UPDATE attacks SET name = '/../../../x' WHERE name = 'inverting_gradients'")
        db.execute("UPDATE scores SET attack = replace(attack, 'inverting_gradients', '/../../../x')")
    with pytest.raises(LedgerError):
        Run(folder / "complete").reconstruction(1, 0, "/../../../x")
    shutil.copy(Run(folder / "complete").reconstruction(1, 0, "inverting_gradients"), tmp_path / "x.safetensors")
    notes = [t["note"] for c in get("/api/runs/complete/gallery?round=1")["cards"] for t in c["tiles"]]
    assert [n for n in notes if n.startswith("file damaged")] == notes[::2]


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("runs/complete/gallery?round=one", "round"),
        ("runs/complete/gallery?client=-1", "client"),
        ("compare?metric=loss", "metric"),
    ],
)
def test_a_query_that_cannot_be_is_refused_by_name(get: Get, query: str, named: str) -> None:
    assert named in get(f"/api/{query}", 400)["error"]


def test_damaged_foreign_locked_and_newer_ledgers_are_named(folder: Path, get: Get) -> None:
    for name in ("foreign", "damaged", "newer", "locked"):
        shutil.copytree(folder / "complete", folder / name)
    foreign, damaged, newer, locked = (folder / n / "ledger.sqlite" for n in ("foreign", "damaged", "newer", "locked"))
    foreign.unlink()
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE theirs (x)")
    damaged.write_bytes(b"no database at all, but long enough to look at" * 100)
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    holder = sqlite3.connect(locked)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    # a file in which nobody writes is read without locks
    holder.execute("INSERT INTO meta VALUES ('written', 'by somebody')")
    holder.commit()
    holder.execute("BEGIN EXCLUSIVE")
    told = {name: get(f"/api/runs/{name}/overview", 503)["error"] for name in ("foreign", "damaged", "newer", "locked")}
    assert all(f"{name}/ledger.sqlite" in words for name, words in told.items())
    listed = {run["id"]: run.get("error", "") for run in get("/api/runs")["runs"]}
    assert listed == told | {"complete": ""}, "one that cannot be read hides no other"
    holder.close()
    assert get("/api/runs/locked/overview")["state"] == "complete", "and it is read once it can be"


def test_a_replaced_run_is_read_again_and_a_deleted_one_is_gone(folder: Path, get: Get) -> None:
    assert get("/api/runs/complete/overview")["progress"]["round"] == 2
    (folder / "complete").rename(folder / "other")
    get("/api/runs/complete/overview", 404)
    shutil.copytree(folder / "other", folder / "complete")
    with Run(folder / "complete").ledger() as ledger:
        ledger.record_round(7, 0.9, 1.0, 1.0)
    assert get("/api/runs/complete/overview")["progress"]["round"] == 7


def test_a_scenario_that_lacks_a_key_hides_no_other_run(folder: Path, get: Get) -> None:
    shutil.copytree(folder / "complete", folder / "broken")
    (folder / "broken" / "scenario.toml").write_text("seed = 1")
    told = "is not a scenario: the scenario needs 'rounds'"
    assert told in get("/api/runs/broken/overview", 503)["error"]
    assert [told in run.get("error", "") for run in get("/api/runs")["runs"]] == [False, True]
    assert get("/api/version")["version"] == get("/api/version")["version"]
    (folder / "complete" / "environment.json").write_text("{")
    assert "environment.json" in get("/api/runs/complete/overview")["environment"]


def test_a_run_without_its_data_shows_its_numbers(folder: Path, get: Get) -> None:
    scenario = folder / "complete" / "scenario.toml"
    scenario.write_text(scenario.read_text().replace("mnist5k", "gone"))
    page = get("/api/runs/complete/overview")
    assert 8 in page["summary"]["rows"][0]
    assert any("cannot be shown" in n["words"] for n in page["notices"])
    card = get("/api/runs/complete/gallery?round=1")["cards"][0]
    assert (card["truth"], card["label"]) == (None, None)
    assert card["tiles"][0]["image"] is not None
