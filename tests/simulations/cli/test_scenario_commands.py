"""fedgauge init and doctor."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import main
from tests.simulations.cli.conftest import scenario_file


def test_init_writes_a_scenario_that_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.toml"
    assert main(["init", str(target)]) == 0
    assert Scenario.load(target).protocol.clients == 4
    target.write_text("\ufeff" + target.read_text())  # as an editor on Windows saves it
    assert Scenario.load(target).protocol.clients == 4
    assert main(["init", str(target)]) == 2
    assert "exists" in capsys.readouterr().err
    for kind in ("text", "tables"):
        assert main(["init", "--data", kind, str(tmp_path / f"{kind}.toml")]) == 0


def test_missing_parts_of_this_machine_are_not_reported_as_working(
    no_local_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedgauge.simulations.checks.machine._ray", lambda: "not started here")
    main(["doctor"])
    marks = {line[13:].split()[0]: line[:13].strip() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert (marks["torch"], marks["LPIPS"]) == ("ok", "optional")


WORDY = """
import warnings
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        warnings.warn("enable_nested_tensor is True, but it is not used", stacklevel=1)
        self.head = nn.Linear(784, classes)

    def forward(self, x):
        warnings.warn("the author's own words", stacklevel=1)
        warnings.warn("the author's own words", stacklevel=1)
        return self.head(x.flatten(1))
"""


@pytest.mark.full
def test_warnings_of_a_network_are_printed_once(tmp_path: Path) -> None:
    (tmp_path / "wordy.py").write_text(WORDY)
    scenario = scenario_file(tmp_path, model={"use": "wordy:Net"})
    command = [sys.executable, "-m", "fedgauge.simulations.cli.main", "doctor", str(scenario), "--allow", "wordy"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stderr.count("the author's own words") == 1 and "nested" not in told.stderr
