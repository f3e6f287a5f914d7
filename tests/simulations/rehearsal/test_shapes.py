"""Apps as their authors write them, each observed without a change: its draft gives its update, or one note says why not."""

import shutil
import time
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from fedgauge.client.components import SpecError
from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main
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
            "plain", "epochs", "accumulated", "factory", "files", "batch_norm", "own_loop", "frozen", "library", "rows",
        )
    ],
)  # fmt: skip
def test_the_draft_gives_the_update(name: str, tmp_path: Path) -> None:
    found = rehearsed(name, tmp_path)
    assert found.draft.problems == []
    assert "exact to rounding" in found.proof, found.proof


@pytest.mark.parametrize(
    ("name", "codes", "form"),
    [
        pytest.param("sentences", ["tokenizer"], "token_ids", marks=FULL),
        pytest.param("next_words", ["tokenizer"], "token_ids", marks=FULL),
        pytest.param("lora", ["tokenizer"], "token_ids", marks=FULL),
        pytest.param("trainer", [], "token_ids", marks=FULL),
        ("gradients", ["steps"], "npz"),
    ],
)
def test_sentences_and_gradients_are_drafted(name: str, codes: list[str], form: str, tmp_path: Path) -> None:
    found = rehearsed(name, tmp_path)
    assert set(codes) <= {problem.code for problem in found.draft.problems} <= {*codes, "cost"}
    assert "exact to rounding" in found.proof, found.proof
    assert tomllib.loads(found.draft.text())["data"]["use"] == form


@pytest.mark.full
@pytest.mark.parametrize(("name", "code"), [("groups", "groups"), ("private", "noise")])
def test_what_a_scenario_cannot_say_is_a_note(name: str, code: str, tmp_path: Path) -> None:
    found = rehearsed(name, tmp_path)
    assert [problem.code for problem in found.draft.problems] == [code]
    assert not found.draft.fatal and "differs by" in found.proof


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("multi_label", "labels", marks=FULL),
        pytest.param("autoencoder", "labels", marks=FULL),
        ("trees", "network"),
        pytest.param("arrays", "network", marks=FULL),
    ],
)
def test_what_no_attack_fits_is_recorded_and_said(name: str, code: str, tmp_path: Path) -> None:
    found = rehearsed(name, tmp_path)
    assert [problem.code for problem in found.draft.fatal] == [code]
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


HAND_WRITTEN = """
rounds = 2
clients = 4
data = {{ use = "npz", path = '{public}', auxiliary = {auxiliary}, batch_size = 8, mean = [0.0], std = [1.0], classes = 10 }}
model = {{ use = "theirs:Net" }}
chain = [{{ use = "local_training", rate = 0.1 }}]
audit = {{ effort = "quick", executor = "local", clients = [0] }}
"""


def scores_of(run: Run) -> list[tuple[object, ...]]:
    """Everything that was measured, less times."""
    with run.ledger(readonly=True) as ledger:
        return [(r["round"], r["client"], r["attack"], r["example"], r["metric"], r["value"]) for r in ledger.scores()]


@pytest.mark.full
def test_a_drafted_and_a_hand_written_scenario_give_equal_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = app_of("plain", tmp_path)
    (folder / "plain.py").rename(folder / "theirs.py")
    (folder / "pyproject.toml").write_text(PROJECT.format(name="theirs"))
    command = ["app", str(folder), "--clients", "1", "--runs", str(tmp_path / "runs"), "--log", "quiet"]
    command += ["--draft", str(tmp_path / "audit.toml")]
    assert main([*command, "--fail-above", "psnr=5"]) == 1
    run = Run.open(next((tmp_path / "runs").iterdir()))
    scenario = run.folder / "scenario.toml"
    assert (tmp_path / "audit.toml").read_text() == scenario.read_text()
    drafted, auxiliary = scores_of(run), tomllib.loads(scenario.read_text())["data"]["auxiliary"]
    assert any(metric == "psnr" for *_, metric, _value in drafted)
    scenario.write_text(HAND_WRITTEN.format(public=run.folder / "observed" / "public.npz", auxiliary=auxiliary))
    again = ["audit", str(run.folder), "--retry", "all", "--allow", "theirs", "--truth", str(run.folder / "truth")]
    monkeypatch.syspath_prepend(str(folder))
    assert main([*again, "--log", "quiet"]) == 0
    assert scores_of(run) == drafted


@pytest.mark.full
def test_no_truth_is_written_unless_wanted(tmp_path: Path) -> None:
    folder = app_of("plain", tmp_path)
    assert (
        main(["app", str(folder), "--clients", "1", "--runs", str(tmp_path / "runs"), "--no-truth", "--log", "quiet"])
        == 0
    )
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "truth").exists()
    assert not any(metric == "psnr" for *_, metric, _value in scores_of(Run.open(run)))
