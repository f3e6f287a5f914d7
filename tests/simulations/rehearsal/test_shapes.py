"""Apps as their authors write them, each observed without a change: its draft gives its update, or one note says why not."""

import shutil
import time
from pathlib import Path

import pytest
from rich.console import Console

from fedgauge.client.components import SpecError
from fedgauge.simulations.rehearsal.rehearse import Rehearsal, observe, rehearse
from fedgauge.simulations.run.retention import prune

SHAPES = Path(__file__).parents[2] / "foreign" / "shapes"
PROJECT = """
[project]
name = "theirs"
version = "1.0.0"

[tool.flwr.app.components]
serverapp = "{name}:server"
clientapp = "{name}:client"

[tool.flwr.app.config]
num-server-rounds = 1
"""


def app_of(name: str, tmp_path: Path) -> Path:
    """The folder of an app."""
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(SHAPES / f"{name}.py", folder)
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name))
    (folder / "rate.txt").write_text("0.1")
    return folder


def rehearsed(name: str, tmp_path: Path) -> Rehearsal:
    """An app, run and drafted."""
    folder = app_of(name, tmp_path)
    run, observed = observe(folder, tmp_path / "runs", {}, 1, Console(quiet=True))
    found = rehearse(run, observed, folder, 1)
    assert sorted(path.name for path in folder.iterdir()) == sorted([f"{name}.py", "pyproject.toml", "rate.txt"])
    return found


FULL = pytest.mark.full  # each starts a process that imports torch and Flower


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=FULL) if name not in ("factory", "epochs") else name
        for name in (
            "plain", "epochs", "accumulated", "factory", "files", "batch_norm", "own_loop", "frozen", "library",
        )
    ],
)  # fmt: skip
def test_the_draft_gives_the_update(name: str, tmp_path: Path) -> None:
    found = rehearsed(name, tmp_path)
    assert found.draft.notes == []
    assert "exact to rounding" in found.proof, found.proof


@pytest.mark.full
@pytest.mark.parametrize(("name", "code"), [("groups", "groups"), ("private", "noise")])
def test_what_a_scenario_cannot_say_is_a_note(name: str, code: str, tmp_path: Path) -> None:
    found = rehearsed(name, tmp_path)
    assert [note.code for note in found.draft.notes] == [code]
    assert not found.draft.fatal and "differs by" in found.proof


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("multi_label", "labels", marks=FULL),
        pytest.param("autoencoder", "labels", marks=FULL),
        pytest.param("rows", "inputs", marks=FULL),
        ("trees", "network"),
        pytest.param("arrays", "network", marks=FULL),
    ],
)
def test_what_no_attack_fits_is_recorded_and_said(name: str, code: str, tmp_path: Path) -> None:
    found = rehearsed(name, tmp_path)
    assert [note.code for note in found.draft.fatal] == [code]
    prune(found.run, 0, time.time() + 60)
    assert not [path for path in found.run.folder.rglob("*.npz")], "no example outlives the updates"
    with found.run.ledger(readonly=True) as ledger:
        assert sum(row["status"] == "accepted" for row in ledger.observations()) == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("ends", "ended its process", marks=FULL),
        pytest.param("missing", "a_package_that_nobody_has", marks=FULL),
        ("raises", "no data for client"),
        pytest.param("waits", "--clients", marks=FULL),
    ],
)
def test_an_app_that_does_not_train_is_refused_in_a_sentence(name: str, words: str, tmp_path: Path) -> None:
    folder = app_of(name, tmp_path)
    with pytest.raises(SpecError, match=words):
        observe(folder, tmp_path / "runs", {}, 1, Console(quiet=True))
    assert not list((tmp_path / "runs").iterdir())
