"""Apps as their authors write them, each observed without a change: its draft gives its update, or a problem says why not."""

import time
import tomllib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.rehearsal.rehearse import Rehearsal, observe, rehearse
from fedgauge.simulations.run.retention import prune
from tests.foreign.written import SHAPES, source
from tests.forks import ForkedProcess, ready_to_fork

FOREIGN = Path(__file__).parents[2] / "foreign" / "shapes"
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
FULL = pytest.mark.full
# whose drafts give updates far from the clients'
FAR = (
    *("groups", "groups_of_steps", "modified", "dropped", "penalised", "smoothed", "drawn", "ragged", "softened"),
    "signs",
    "by_phases",
    "sharpened",
    "modified_in_training",
    "activated",
    "clipped_by_layer",
)


@pytest.fixture(autouse=True)
def all_apps_but_one_are_forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one has a process of its own, as users' apps have."""
    if "epochs" not in request.node.name:
        ready_to_fork()
        monkeypatch.setattr("fedgauge.simulations.rehearsal.rehearse.OwnProcess", ForkedProcess)


def app_of(name: str, tmp_path: Path) -> Path:
    """The folder of an app."""
    folder = tmp_path / name
    folder.mkdir()
    text = source(name) if name in SHAPES else (FOREIGN / f"{name}.py").read_text()
    (folder / f"{name}.py").write_text(text)
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name))
    (folder / "rate.txt").write_text("0.1")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """A folder's files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An app's folder, in which nothing changes, and of which no process stays."""
    found = app_of(request.node.callspec.params["name"], tmp_path)
    before, running = contents(found), set(psutil.Process().children(recursive=True))
    yield found
    assert contents(found) == before
    assert set(psutil.Process().children(recursive=True)) <= running


def rehearsed(folder: Path) -> Rehearsal:
    """An app, run and drafted."""
    run, observed = observe(folder, folder.parent / "runs", {}, 1, Console(quiet=True))
    return rehearse(run, observed, folder, 1)


def names(normal: str, full: str) -> list[Any]:
    """Parameters of both parts of the tests."""
    return [*normal.split(), *(pytest.param(name, marks=FULL) for name in full.split())]


@pytest.mark.parametrize(
    "name",
    names(
        "epochs",
        "plain accumulated closure library batch_norm descents two_records own_loop own_strategy files weighted segments "
        "older counted compiled configured doubled denoised decayed popped outside amplified settled_norm pictures sized "
        "in_parts lazy measured adversarial capturable compared threaded sensitive odd_arguments doubled_inside annealed clipped "
        "shortened",
    ),
)
def test_the_draft_gives_the_update(name: str, folder: Path) -> None:
    found = rehearsed(folder)
    assert torch.get_default_dtype() == torch.float32
    assert [problem.code for problem in found.draft.problems if problem.code != "cost"] == []
    assert "rounding" in found.proof, found.proof


@pytest.mark.parametrize("name", names("stateful rebound", "profiled empty traced"))
def test_an_app_that_is_hard_to_observe_trains_as_without(name: str, folder: Path) -> None:
    _, observed = observe(folder, folder.parent / "runs", {}, 1, Console(quiet=True))
    assert not observed.failed


@pytest.mark.parametrize(
    ("name", "code", "exact"),
    [
        pytest.param("summed", "scale", True, marks=FULL),
        pytest.param("two_passes", "scale", True, marks=FULL),
        pytest.param("proximal", "loss", True, marks=FULL),
        pytest.param("penalised", "loss", False, marks=FULL),
        pytest.param("smoothed", "loss", False, marks=FULL),
        pytest.param("frozen", "", True, marks=FULL),
        pytest.param("tied", "", True, marks=FULL),
        pytest.param("prefixed", "", True, marks=FULL),
        pytest.param("double_head", "", True, marks=FULL),
        pytest.param("batches", "examples", True, marks=FULL),
        pytest.param("by_hand", "steps", True, marks=FULL),
        pytest.param("corrected", "steps", True, marks=FULL),
        pytest.param("features", "features", True, marks=FULL),
        pytest.param("trainer", "", True, marks=FULL),
        pytest.param("activated", "arguments", False, marks=FULL),
        pytest.param("groups", "groups", False, marks=FULL),
        pytest.param("groups_of_steps", "groups", False, marks=FULL),
        pytest.param("close_groups", "groups", False, marks=FULL),
        pytest.param("warmed_up", "schedule", False, marks=FULL),
        pytest.param("phased", "rounds", True, marks=FULL),
        pytest.param("by_phases", "turns", False, marks=FULL),
        pytest.param("private", "noise", False, marks=FULL),
        pytest.param("poisson", "batches noise", False, marks=FULL),
        pytest.param("modified", "mods", False, marks=FULL),
        pytest.param("modified_in_training", "mods", False, marks=FULL),
        pytest.param("distilled", "loss", True, marks=FULL),
        pytest.param("dropped", "dropout", False, marks=FULL),
        pytest.param("half", "autocast", False, marks=FULL),
        pytest.param("taught", "loss", True, marks=FULL),
        pytest.param("drawn", "dropout", False, marks=FULL),
        pytest.param("ragged", "batches", False, marks=FULL),
        pytest.param("softened", "loss", False, marks=FULL),
        pytest.param("signs", "optimizer", False, marks=FULL),
        pytest.param("sharpened", "", False, marks=FULL),
        pytest.param("repeated", "examples", True, marks=FULL),
        pytest.param("clipped_by_layer", "optimizer clipping", False, marks=FULL),
    ],
)
def test_an_assumption_is_a_problem(name: str, code: str, exact: bool, folder: Path) -> None:
    found = rehearsed(folder)
    assert [problem.code for problem in found.draft.problems if problem.code != "cost"] == code.split()
    assert not found.draft.fatal and ("rounding" in found.proof) is exact, found.proof
    with found.run.ledger(readonly=True) as ledger:
        assert (ledger.training_fits is False) is (name in FAR)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("views", "output", marks=FULL),
        pytest.param("two_networks", "networks", marks=FULL),
        pytest.param("by_turns", "networks", marks=FULL),
        pytest.param("personal", "networks", marks=FULL),
        pytest.param("methods", "network", marks=FULL),
        pytest.param("gaps", "inputs", marks=FULL),
        pytest.param("pixels", "inputs", marks=FULL),
        pytest.param("stretched", "inputs", marks=FULL),
        pytest.param("ignored", "labels", marks=FULL),
        pytest.param("tags", "labels", marks=FULL),
        pytest.param("sequences", "labels", marks=FULL),
        pytest.param("trees", "network", marks=FULL),
        pytest.param("functional", "network", marks=FULL),
        pytest.param("set_by_a_class", "network", marks=FULL),
        pytest.param("meta", "unread", marks=FULL),
        pytest.param("linear", "network", marks=FULL),
        pytest.param("scripted", "network", marks=FULL),
        pytest.param("checkpointed", "checkpoint", marks=FULL),
    ],
)
def test_apps_without_a_fitting_attack_are_recorded_with_the_reason(name: str, code: str, folder: Path) -> None:
    found = rehearsed(folder)
    assert [problem.code for problem in found.draft.fatal] == [code]
    prune(found.run, 0, time.time() + 60)
    assert not [path for path in found.run.folder.rglob("*.npz")], "no example outlives the updates"
    with found.run.ledger(readonly=True) as ledger:
        assert sum(row["status"] == "accepted" for row in ledger.observations()) == 4


@FULL
def test_weights_in_other_records_than_arrays_are_no_uploads(tmp_path: Path) -> None:
    assert [problem.code for problem in rehearsed(app_of("packed", tmp_path)).draft.fatal] == ["uploads"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "no data for client"),
        pytest.param("ends", "ended its process", marks=FULL),
        pytest.param("exits", "SystemExit", marks=FULL),
        pytest.param("missing", "a_package_that_nobody_has", marks=FULL),
        pytest.param("broken", "no_such_thing", marks=FULL),
        pytest.param("no_partition", "site", marks=FULL),
        pytest.param("waits", "--clients", marks=FULL),
    ],
)
def test_an_app_that_does_not_train_is_refused_in_a_sentence(
    name: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = folder.parent / "runs"
    assert main(["app", str(folder), "--clients", "1", "--runs", str(runs)]) == 2
    assert words in capsys.readouterr().err
    assert not list(runs.iterdir())


@FULL
@pytest.mark.parametrize(
    ("name", "code"),
    [
        *((name, "") for name in ("deltas", "rows", "multi_label", "one_logit", "prices", "autoencoder", "windows")),
        *(
            ("own_head", "private"),
            ("sentences", "tokenizer"),
            ("next_words", "tokenizer"),
            ("lora", "tokenizer"),
        ),
        *(("gradients", "steps"), ("script", "")),
    ],
)
def test_the_verdict_is_graded_by_what_was_observed(
    name: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted: list[Rehearsal] = []

    def kept(*arguments: Any, **settings: Any) -> Rehearsal:
        drafted.append(rehearse(*arguments, **settings))
        return drafted[-1]

    monkeypatch.setattr("fedgauge.simulations.rehearsal.rehearse.rehearse", kept)
    runs = folder.parent / "runs"
    command = ["app", str(folder), "--clients", "1", "--rounds", "1", "--runs", str(runs), "--log", "quiet"]
    assert main(command) == 0
    assert [problem.code for problem in drafted[0].draft.problems if problem.code != "cost"] == code.split()
    assert "rounding" in drafted[0].proof
    run = Run.open(next(runs.iterdir()))
    with run.ledger(readonly=True) as ledger:
        assert ledger.meta()["replay"] == "ok"
    main_metrics = ("psnr", "cells", "rouge1")
    assert [score for score in scores_of(run) if score[4] in main_metrics and "random" not in str(score[2])]


HAND_WRITTEN = """
rounds = 2
clients = 4
data = {{ use = "npz", path = '{public}', partition = "none", batch_size = 8, mean = [0.0], std = [1.0], classes = 10 }}
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
    drafted = scores_of(run)
    assert any(metric == "psnr" for *_, metric, _value in drafted)
    scenario.write_text(HAND_WRITTEN.format(public=run.folder / "observed" / "public.npz"))
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
    assert not any(metric == "psnr" and value is not None for *_, metric, value in scores_of(Run.open(run)))


@FULL
def test_attacked_clients_have_equally_many_examples(tmp_path: Path) -> None:
    folder = app_of("unequal", tmp_path)
    run, observed = observe(folder, tmp_path / "runs", {}, 2, Console(quiet=True))
    truth = rehearse(run, observed, folder, 4).truth
    attacked = [observed.clients[path.stem.split("-")[1]][0] for path in truth.glob("*-round-1.npz")]
    assert attacked and len({sum(facts["sizes"]) for facts in attacked}) == 1


@FULL
def test_what_the_app_waits_for_is_shown(tmp_path: Path) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=100)
    observe(app_of("retrying", tmp_path), tmp_path / "runs", {}, 1, console)
    assert isinstance(console.file, StringIO) and "Retrying in 1s" in console.file.getvalue()


@FULL
def test_the_recomputation_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["app", str(app_of("views", tmp_path)), "--runs", str(tmp_path / "runs")]) == 3
    assert "computed again" in capsys.readouterr().err


@FULL
def test_pixels_are_those_before_the_apps_own_normalisation(tmp_path: Path) -> None:
    data = tomllib.loads(rehearsed(app_of("transformed", tmp_path)).draft.text())["data"]
    assert (data["mean"], data["std"]) == ([0.3], [0.2])


@FULL
def test_a_loss_of_constants_before_the_first_pass_is_no_obstacle(tmp_path: Path) -> None:
    assert not rehearsed(app_of("early_loss", tmp_path)).draft.fatal


@FULL
def test_later_rounds_that_train_otherwise_are_not_attacked(tmp_path: Path) -> None:
    folder = app_of("decaying", tmp_path)
    run, observed = observe(folder, tmp_path / "runs", {"rounds": 2}, 1, Console(quiet=True))
    found = rehearse(run, observed, folder, 1)
    assert [problem.code for problem in found.draft.problems] == ["rounds"]
    assert tomllib.loads(found.draft.text())["audit"]["rounds"] == [1]


@pytest.mark.parametrize("clients", [1, 2])
def test_uploads_of_rounds_that_a_client_skips_are_not_attacked(clients: int, tmp_path: Path) -> None:
    """Clients train in every other round, two by turns, and return what they were sent in the others."""
    folder = app_of("skipping", tmp_path)
    run, observed = observe(folder, tmp_path / "runs", {"rounds": 4}, clients, Console(quiet=True))
    found = rehearse(run, observed, folder, clients)
    assert "rounding" in found.proof, found.proof
    rounds = tomllib.loads(found.draft.text())["audit"]["rounds"]
    assert rounds in ([1, 3], [2, 4])
    written = {path.stem.partition("-round-")[2] for path in found.truth.iterdir()}
    assert written == {str(round) for round in rounds}


@FULL
def test_clients_that_train_otherwise_are_not_attacked(tmp_path: Path) -> None:
    folder = app_of("unlike", tmp_path)
    run, observed = observe(folder, tmp_path / "runs", {"rounds": 1}, 2, Console(quiet=True))
    found = rehearse(run, observed, folder, 2)
    assert "clients" in [problem.code for problem in found.draft.problems]
    assert len(tomllib.loads(found.draft.text())["audit"]["clients"]) == 1


@FULL
def test_searches_of_a_slow_network_have_fewer_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgauge.simulations.rehearsal.rehearse.SLOW", 1e-9)
    found = rehearsed(app_of("frozen", tmp_path))
    assert "cost" in [problem.code for problem in found.draft.problems]
    attacks = tomllib.loads(found.draft.text())["attack"]
    assert {attack["iterations"] for attack in attacks if "iterations" in attack} == {10}
