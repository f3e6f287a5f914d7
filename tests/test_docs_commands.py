"""Every command that a page shows is run: here as written, or with smaller input by the test that is named here."""

import importlib
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import tomli_w

from fedgauge.client.components import allowing
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.create import create_run
from tests.small_runs import SMALLEST, fill_tape, in_this_process
from tests.test_docs import COMMAND, PAGES, README, ROOT, blocks, prose
from tests.test_docs_code import write

TABLES = SMALLEST | {
    "data": {"use": "mnist5k", "batch_size": 1},
    "chain": [{"use": "clip", "max_norm": 1.0}, {"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "analytic"}],
}
ELSEWHERE: Mapping[
    str, str
] = {  # by the beginning of a command that takes minutes, serves a page or needs GPUs: its test
    "app .": "simulations/rehearsal/test_shapes.py",
    "audit RUN --devices": "simulations/cli/test_devices.py",
    "audit runs/theirs --allow mine --truth": "server/strategy/test_tester_truth.py",
    "audit": "test_docs_code.py",
    "doctor client.toml": "simulations/checks/test_owner_check.py",
    "doctor mine.toml": "test_docs_code.py",
    "doctor": "simulations/cli/test_scenario_commands.py",
    "reproduce suite": "simulations/reproduction/test_suite.py",
    "reproduce": "simulations/reproduction/test_reproduce.py",
    "run --resume": "simulations/run/test_resume.py",
    "run SCENARIO.toml --allow": "test_docs_code.py",
    "run SCENARIO.toml --set audit.devices": "simulations/cli/test_devices.py",
    "run scenario.toml --set": "simulations/run/test_table_scenario.py",
    "run simulations/quickstart-table": "simulations/run/test_table_scenario.py",
    "run simulations/quickstart-text": "simulations/run/test_text_scenario.py",
    "run simulations/quickstart-lora": "simulations/run/test_text_scenario.py",
    "sweep": "simulations/experiments/test_sweep.py",
    "watch": "simulations/cli/test_result_commands.py",
}
OTHERS: Mapping[str, str] = {  # the same for lines that are no command of fedgauge
    "make ": ".ci/run",
    ".ci/run": ".ci/run",
    ". .venv/bin/activate": "Makefile",
    "python -m pip install": "tests/test_install.py",
    "docker build": "tests/load/containers.sh",
    "python -m fedgauge.simulations.benchmarks.gpu": "tests/simulations/benchmarks/test_gpu.py",
    "mkdir -p ../path": "tests/simulations/benchmarks/test_gpu.py",
    "PYTHONPATH=../path": "tests/simulations/benchmarks/test_gpu.py",
}
FAILS = ("gate",)  # what their thresholds forbid is found, as the update is read exactly


def shown() -> list[str]:
    """Every command of the pages' blocks, without its comment, and every complete one of the README's tables."""
    bodies = [body for page in PAGES for kind in ("sh", "yaml") for body in blocks(page.read_text(), kind)]
    lines = [line for body in bodies for line in COMMAND.findall(body)]
    lines += re.findall(r"`(fedgauge [a-z][^`\[]*)`", prose(README.read_text()))
    return sorted({shlex.join(shlex.split(line, comments=True)[1:]) for line in lines})


READY = [line for line in shown() if re.fullmatch(r"run simulations/(quickstart|malicious)\.toml", line)]
HERE = [line for line in shown() if not line.startswith(tuple(ELSEWHERE)) and line not in READY]
HERE.sort(key=lambda line: not line.startswith("deploy init"))  # the others need what it makes


@pytest.mark.parametrize("start", ELSEWHERE)
def test_a_command_that_is_not_run_here_is_in_the_test_that_is_named(start: str) -> None:
    assert any(line.startswith(start) for line in shown()), "no page shows it any more"
    assert f'"{start.split()[0]}' in (ROOT / "tests" / ELSEWHERE[start]).read_text()


def test_each_other_line_of_a_block_is_run_where_it_is_said() -> None:
    """Those of docs/deploy.md are compared with their script in test_compose_script.py."""
    bodies = [body for page in PAGES if page.name != "deploy.md" for body in blocks(page.read_text(), "sh")]
    lines = [line for body in bodies for line in body.splitlines() if line and not COMMAND.match(line)]
    assert [line for line in lines if not line.startswith(tuple(OTHERS))] == []
    assert [start for start in OTHERS if not any(line.startswith(start) for line in lines)] == []
    assert [path for path in OTHERS.values() if not (ROOT / path).is_file()] == []


def test_flowers_own_command_can_be_given() -> None:
    page = "\n".join(page.read_text() for page in PAGES).replace("\\\n", "")
    parser = importlib.import_module("flwr.supernode.cli.flower_supernode")._parse_args_run_supernode()
    lines = re.findall(r"flower-supernode (--.*)$", page, re.MULTILINE)
    assert lines and all(parser.parse_args(shlex.split(line)).superlink for line in lines)


@pytest.mark.full
@pytest.mark.slow
def test_the_commands_of_the_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, in a folder with a scenario, finished runs and the figures that they name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", in_this_process)
    scenario = Scenario.from_tables(TABLES)
    with allowing(()):
        run = fill_tape(create_run(scenario, tmp_path / "runs" / "FIRST"), scenario, 1)
        serve(run, LocalExecutor())
    shutil.copytree(run.folder, tmp_path / "runs" / "SECOND")
    shutil.copytree(run.folder, tmp_path / "RUN")
    (tmp_path / "ours.json").write_text(
        next((ROOT / "simulations/papers").glob("*/results/suite_small.json")).read_text()
    )
    write("bring-your-own.md", tmp_path)
    for name in ("scenario.toml", "SCENARIO.toml"):
        (tmp_path / name).write_text(tomli_w.dumps(TABLES))
    for line in HERE:
        words = [word.replace("$(ls -d runs/* | tail -1)", "runs/FIRST") for word in shlex.split(line)]
        words = words[: words.index(">")] if ">" in words else words
        if words[0] == "init":
            (tmp_path / "scenario.toml").unlink()
        if words[:2] == ["deploy", "init"]:
            shutil.rmtree(words[2], ignore_errors=True)
        if "federation/runs/federation" in words:  # of a deployment that has trained
            shutil.copytree(run.folder, words[1], dirs_exist_ok=True)
        status = main(words)
        assert status == (words[0] in FAILS and "--fail-above" in words), line
        if words[0] == "init":
            (tmp_path / "scenario.toml").write_text(tomli_w.dumps(TABLES))
    shutil.copytree(run.folder, tmp_path / "runs" / "RUN")
    (cell,) = blocks((ROOT / "docs/watching.md").read_text(), "py")  # of a notebook, whose own commands are left out
    exec(compile(re.sub(r"^%.*$", "", cell, flags=re.MULTILINE), "watching.md", "exec"), {})
    assert {path.name for path in tmp_path.iterdir()} >= {"gate.xml", "figures", "federation"}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("line", READY)
def test_a_ready_scenario_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one round of two clients, as all rounds take minutes."""
    (path,) = line.split()[1:]
    malicious = ["--set", "server_attack.0.rounds=[1]"] if "malicious" in path else []
    plan = ["--set", "audit.rounds=[1]", "--set", "audit.executor=local", "--set", "attack.1.iterations=10"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", in_this_process)
    assert (
        main(["run", str(ROOT / path), "--in-memory", "--set", "rounds=1", "--set", "clients=2", *plan, *malicious])
        == 0
    )
