"""The gate: what lies beyond a threshold fails, and what was not measured never passes."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from fedgauge.server.store.run import Run
from fedgauge.server.views.gate import GateResult, Threshold
from fedgauge.simulations.cli.main import main
from tests.simulations.cli.conftest import scenario_file
from tests.small_runs import in_this_process


def gate(of: str, *words: str) -> int:
    return main(["gate", of, *words])


@pytest.mark.parametrize(
    ("value", "conclusive", "above", "expected"),
    [
        (21.0, True, True, "failed"),
        (20.0, True, True, "passed"),
        (19.0, True, True, "passed"),
        (19.0, False, True, "not measured"),
        (21.0, False, True, "failed"),
        (19.0, True, False, "failed"),
        (21.0, True, False, "passed"),
        (None, True, True, "not measured"),
        (float("nan"), True, True, "not measured"),
        (float("inf"), True, True, "failed"),
    ],
)
def test_an_outcome_by_hand(value: float | None, conclusive: bool, above: bool, expected: str) -> None:
    result = GateResult(Threshold("psnr", 20.0, above), value, "by hand", conclusive)
    assert result.outcome == expected


def test_a_run_that_leaks_fails_and_a_higher_threshold_holds(attacked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Analytic inversion of one example is exact: its PSNR counts 60 dB in a mean."""
    run = str(attacked.folder)
    assert gate(run, "--fail-above", "psnr=59.9") == 1
    assert "of 4 by analytic" in capsys.readouterr().out
    assert gate(run, "--fail-above", "worst.psnr=1000") == 0
    assert gate(run, "--fail-below", "mse=1e-6", "--fail-above", "worst.psnr=1000") == 1
    assert gate(run, "--fail-above", "worst.psnr=59") == 1
    assert gate(run, "--fail-above", "worst.psnr=80") == 1, "only means count at most 60 dB"


def test_unmeasured_metrics_do_not_pass(attacked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    tested = ("membership", "dataset_membership")
    asked = [word for metric in tested for word in ("--fail-above", f"{metric}=.7")]
    assert gate(str(attacked.folder), *asked, "--fail-above", "worst.psnr=1000") == 3
    assert re.findall(r"--attack (\w+)", capsys.readouterr().out) == ["membership", "membership_over_rounds"]
    assert gate(str(attacked.folder), "--fail-above", "epsilon=1") == 3


def lose(run: Run, *, all_of_them: bool) -> None:
    """Take the values from an attack's rows, as if it had diverged."""
    with run.ledger() as ledger:
        of_it = "attack = 'analytic'" if all_of_them else "attack = 'analytic' AND client = 0"
        ledger._db.execute(f"UPDATE scores SET value = NULL, status = 'diverged' WHERE {of_it}")


def test_rows_without_a_value_are_counted_next_to_what_was_measured(
    attacked: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    lose(attacked, all_of_them=False)
    assert gate(str(attacked.folder), "--fail-above", "worst.psnr=2000", "--fail-above", "worst.psnr=1000") == 0
    assert capsys.readouterr().out.count("2 x diverged of 4") == 2
    lose(attacked, all_of_them=True)
    assert gate(str(attacked.folder), "--fail-above", "psnr=59") == 3
    assert "4 x diverged of 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "threshold"),
        (["--junit", "x.xml"], "threshold"),
        (["--fail-above", "psnrr=20"], "did you mean psnr?"),
        (["--fail-above", "held_membership=.7"], "did you mean membership or"),  # its name before 0.1
        (["--fail-above", "held_membership=.7"], "or dataset_membership?"),
        (["--fail-above", "leakage=1"], "there are: psnr"),
        (["--fail-above", "mse=.1"], "--fail-below"),
        (["--fail-below", "psnr=20"], "--fail-above"),
        (["--fail-above", "psnr=60"], "could never fail, as values end at 60"),
        (["--fail-above", "worst.label_accuracy=1"], "could never fail"),
        (["--fail-above", "ssim=1"], "could never fail, as values end at 1"),
        (["--fail-below", "mse=0"], "could never fail, as values end at 0"),
    ],
)
def test_a_mistake_is_one_sentence(
    attacked: Run, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(str(attacked.folder), *words) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("text", ["psnr", "psnr=", "psnr=nan", "psnr=inf", "psnr=a"])
def test_invalid_thresholds_are_refused(attacked: Run, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gate(str(attacked.folder), "--fail-above", text)
    assert ended.value.code == 2
    expected = "a finite number" if text.partition("=")[2] else "METRIC=VALUE"
    assert f"--fail-above: expected {expected}" in capsys.readouterr().err


def test_junit_says_what_the_lines_say(attacked: Run, tmp_path: Path) -> None:
    junit = tmp_path / "gate.xml"
    chosen = ["--fail-above", "psnr=20", "--fail-above", "membership=.7", "--fail-above", "worst.psnr=1000"]
    assert gate(str(attacked.folder), *chosen, "--junit", str(junit)) == 1
    suite = ElementTree.parse(junit).getroot()[0]
    assert [suite.get(k) for k in ("tests", "failures", "errors")] == ["3", "1", "1"]
    assert [[child.tag for child in case] for case in suite] == [["failure"], ["error"], ["system-out"]]


NOISE = [
    {"use": "clip", "max_norm": 1.0, "each": True},
    {"use": "gaussian", "sigma": 5.0},
    {"use": "local_sgd", "rate": 0.1},
]


def workflow() -> list[dict[str, Any]]:
    """The steps of the page's workflow."""
    page = (Path(__file__).parents[3] / "docs/guides/gate.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    steps: list[dict[str, Any]] = yaml.safe_load(block)
    return steps


def script() -> str:
    return "".join(step.get("run", "") for step in workflow())


def test_the_workflow_is_yaml_with_a_script_that_bash_reads() -> None:
    for step in workflow():
        assert step.keys() <= {"name", "run", "if", "uses", "with"} and ("run" in step) != ("uses" in step)
    subprocess.run(["bash", "-n"], input=script(), text=True, check=True)


@pytest.mark.full
def test_the_commands_of_the_workflow_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, in one folder, on a scenario whose noise hides everything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", in_this_process)
    scenario_file(tmp_path, chain=NOISE, attack=[{"use": "analytic"}, {"use": "membership"}]).rename("scenario.toml")
    commands = [shlex.split(line, comments=True) for line in script().splitlines()]
    ours = [words[1:] for words in commands if words[0] == "fedgauge"]
    assert [words[0] for words in ours] == ["run", "gate"]
    for words in ours:
        of = str(sorted(Path("runs").iterdir())[-1]) if words[0] == "gate" else words[1]
        assert main([words[0], of, *words[2:]]) == 0, capsys.readouterr()
    (uploaded,) = (step["with"]["path"].split() for step in workflow() if "uses" in step)
    files = {path.name for pattern in uploaded for path in tmp_path.glob(pattern)}
    assert files == {"gate.xml"}
