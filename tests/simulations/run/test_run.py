"""The real thing: `fedgauge run` drives Flower's engine, clients and attack workers. The only tests that start Flower."""

import csv
import io
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from fedgauge.attacks.grading.replay import TOLERANCE
from fedgauge.client.components import SpecError
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run import in_memory
from fedgauge.simulations.run.create import create_run
from fedgauge.simulations.run.launch import training_process
from fedgauge.simulations.run.processes import marked
from tests.hostile_folder import hostile
from tests.listening import LOOPBACK, listening
from tests.small_runs import SMALLEST, in_this_process
from tests.waiting import wait_for

OURS = uuid.uuid4().hex
FEDGAUGE = (sys.executable, "-m", "fedgauge.simulations.cli.main")

SCENARIO = """
seed = 3
rounds = 4
clients = 3
[data]
use = "mnist5k"
partition = "dirichlet"
alpha = 0.5
batch_size = 1
[model]
use = "mlp"
hidden = [64]
[strategy]
use = "FedAvg"
fraction_train = 0.7
min_train_nodes = 2
[[chain]]
use = "local_sgd"
rate = 0.1
[audit]
rounds = [1, 2, 4]
workers = 1
wave = 2
[[attack]]
use = "analytic"
[[attack]]
use = "inverting_gradients"
iterations = 40
"""


def fedgauge(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FEDGAUGE, *arguments], capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]


@pytest.fixture(autouse=True, scope="module")
def ours() -> Iterator[None]:
    """A mark that all descendants of these tests carry, as other tests may run beside them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FEDGAUGE_TEST", OURS)
        yield


def marked_processes() -> list[int]:
    """Processes that a launch of these tests started."""
    return marked(OURS, "FEDGAUGE_TEST")


def run_small(folder: Path) -> None:
    """Run it from a folder with somebody else's package fedgauge, and note in exposed.json what its processes show to others."""
    (folder / "small.toml").write_text(SCENARIO)
    command = [sys.executable, "-P", *FEDGAUGE[1:], "run", str(folder / "small.toml"), "--runs", str(folder / "runs")]
    listens, tokens, commands = set[tuple[str, int]](), set[bytes](), set[bytes]()
    here, pipe = hostile(folder / "theirs"), subprocess.PIPE
    with subprocess.Popen(command, cwd=here, stdout=pipe, stderr=pipe, text=True) as running:
        while running.poll() is None:
            for pid in (pids := marked_processes() if sys.platform == "linux" else []):
                with suppress(OSError, KeyError, psutil.Error):  # it has just ended, or has no token
                    commands.add(Path(f"/proc/{pid}/cmdline").read_bytes())
                    tokens.add(Path(psutil.Process(pid).environ()["RAY_AUTH_TOKEN_PATH"]).read_bytes())
            listens |= listening(pids)
            time.sleep(1.0)
        told, errors = running.communicate()
    assert running.returncode == 0, errors
    last = told.strip().splitlines()[-1]
    assert Path(last).is_dir(), f"the run folder is printed last, alone on its line; got {last!r}"
    assert "report.html" in told
    assert marked_processes() == []
    betrayed = any(secret in command for command in commands for secret in (b"superlink", *tokens))
    facts = {"listens": sorted(listens), "tokens": len(tokens), "betrayed": betrayed}
    (folder / "exposed.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def finished(shared_folder: Callable[[str, Callable[[Path], object]], Path]) -> Run:
    """One complete run, attacked by Ray workers while it trained; not to be changed."""
    (folder,) = (shared_folder("run", run_small) / "runs").iterdir()
    return Run.open(folder)


@pytest.mark.slow
def test_a_real_federation_is_trained_attacked_and_reported(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with finished.ledger() as ledger:
        progress, meta = ledger.progress(), ledger.meta()
        assert [r["round"] for r in ledger.rounds()] == [0, 1, 2, 3, 4]
        # two of three clients a round, attacked in three rounds, by two attacks and three baselines
        assert (progress.done, progress.failed, progress.queued, progress.leased) == (3 * 2 * 5, 0, 0, 0)
        assert meta["replay"] == "ok" and meta["state"] == "trained"
        assert TOLERANCE <= 1e-4
        exact = [r["value"] for r in ledger.scores("psnr") if r["attack"] == "analytic"]
        assert len(exact) == 6 and min(exact) > 100, "the first layer's gradient holds the image exactly"
        labels = [r["value"] for r in ledger.scores("label_accuracy") if r["attack"] == "analytic"]
        assert labels == [1.0] * 6
        baseline = [r["value"] for r in ledger.scores("psnr") if r["attack"] == "mean_image"]
        assert len(baseline) == 6 and max(baseline) < 25
    assert (finished.folder / "report.html").stat().st_size > 100_000
    assert (finished.folder.stat().st_mode & 0o777) == 0o700
    assert main(["export", str(finished.folder)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {r["attack"] for r in rows} >= {"analytic", "inverting_gradients", "mean_image", "wrong_client(analytic)"}
    assert main(["runs", "--runs", str(finished.folder.parent)]) == 0
    assert capsys.readouterr().out.count("complete") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds sockets by /proc: Linux")
def test_a_run_listens_on_the_loopback_address_alone_and_starts_nothing_that_takes_an_app(finished: Run) -> None:
    """A SuperLink would take one from any user of the machine, and Ray's own default is every interface.

    Nor does a process load what lies in the folder where the command is given, which Ray has its workers search first.
    """
    facts = json.loads((finished.folder.parents[1] / "exposed.json").read_text())
    assert len({port for _, port in facts["listens"]}) >= 4, "Ray's head, node and workers"
    assert {address for address, _ in facts["listens"]} == {LOOPBACK}
    assert facts["tokens"] and not facts["betrayed"]
    assert not (finished.folder.parents[1] / "theirs" / "ran").exists()


@pytest.mark.slow
def test_the_trained_model_is_the_same_in_memory_and_with_curiosity_off(finished: Run, tmp_path: Path) -> None:
    """What is trained without Flower's transport is what Flower trains, and what is attacked is the same, bit for bit."""
    (tmp_path / "small.toml").write_text(SCENARIO)
    blind, run = (
        create_run(Scenario.load(tmp_path / "small.toml", [f"audit.curious={curious}"]), tmp_path / curious)
        for curious in ("false", "true")
    )
    in_memory.train(blind)
    in_this_process(run)
    assert blind.model.read_bytes() == run.model.read_bytes() == finished.model.read_bytes()
    assert list((blind.folder / "tape").iterdir()) == []
    tapes = [{p.name: p.read_bytes() for p in (r.folder / "tape").glob("*.safetensors")} for r in (run, finished)]
    assert len(tapes[0]) > 4 and tapes[0] == tapes[1]
    with run.ledger() as mine, finished.ledger() as theirs, blind.ledger() as neither:
        rounds, mine_too, expected = (
            [(r["round"], r["accuracy"], r["loss"]) for r in ledger.rounds()] for ledger in (neither, mine, theirs)
        )
        assert rounds == mine_too == expected
        found, expected = (
            ([tuple(o) for o in ledger.observations()], [tuple(r)[:7] for r in ledger.scores()])
            for ledger in (mine, theirs)
        )
        assert found == expected


def test_a_simulation_whose_clients_would_hold_no_examples_is_refused(tmp_path: Path) -> None:
    tables = SMALLEST | {"data": {"use": "mnist5k", "partition": "none"}}
    with pytest.raises(SpecError):
        create_run(Scenario.from_tables(tables), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_training_in_memory_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SCENARIO)
    run = create_run(Scenario.load(tmp_path / "small.toml"), tmp_path / "run")
    (run.folder / "scenario.toml").write_text("rounds = = 1")
    with closing(training_process(run, in_memory=True)) as training:
        wait_for(training.status, 120)
        assert "scenario.toml" in training.blame("the federation failed")
    assert not training.scratch.exists()
