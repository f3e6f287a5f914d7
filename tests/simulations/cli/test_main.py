"""The command line: a user's mistake is one sentence and exit status 2."""

import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main


def test_a_folder_of_data_that_is_not_there_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDGAUGE_DATA", str(tmp_path / "none"))
    assert main(["list"]) == 2


def test_commands_work_next_to_a_users_own_files_of_the_same_names(tmp_path: Path) -> None:
    for name in ("client", "server", "attacks", "defenses", "simulations"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the {name}.py of the user was imported')\n")
    program = [sys.executable, "-m", "fedgauge.simulations.cli.main"]  # which puts the current folder first on the path
    done = subprocess.run([*program, "list"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_libraries_are_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    asks = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a background job ignores it
    program = [sys.executable, "-c", f"{asks}; from fedgauge.simulations.cli.main import main; sys.exit(main())", "run"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(program, env=environment, stdout=-1, stderr=-1, text=True) as command:
        assert command.stdout is not None and command.stderr is not None
        assert command.stdout.readline() == "begun\n"
        command.send_signal(signal.SIGINT)
        assert "Traceback" not in command.stderr.read() and command.wait(60) == 130


@pytest.mark.parametrize("output", ["| head -1", pytest.param("| true", marks=pytest.mark.full)])
def test_a_reader_that_goes_is_no_failure_in_any_locale(attacked: Run, output: str) -> None:
    """`report` reads its own files in UTF-8, and a table of rich's is cut off."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = f"{sys.executable} -m fedgauge.simulations.cli.main"
    runs = attacked.folder.parent
    script = f"set -o pipefail; {program} report {attacked.folder} && {program} runs --runs {runs} {output}"
    done = subprocess.run(["bash", "-c", script], env={**os.environ, **plain}, stderr=-1, timeout=300)
    assert done.returncode == 0, done.stderr


HEAVY = ("torch", "flwr", "ray", "numpy", "rich")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 0, "usage: fedgauge"),
        (["--help"], 0, "usage: fedgauge"),
        (["--version"], 0, f"fedgauge {metadata.version('fedgauge')}"),
        (["rnu"], 2, "invalid choice: 'rnu' (choose from "),
        (["--verison"], 2, "usage: fedgauge"),
    ],
)
def test_help_and_misspelt_commands_wait_for_no_torch(arguments: list[str], status: int, words: str) -> None:
    program = (
        "import sys\nfrom fedgauge.simulations.cli.main import main\n"
        f"try:\n    status = main({arguments})\nexcept SystemExit as ended:\n    status = ended.code\n"
        f"loaded = [name for name in {HEAVY} if name in sys.modules]\n"
        "sys.exit(f'{loaded} is imported' if loaded else status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert words in (done.stderr if status else done.stdout) and "is imported" not in done.stderr
