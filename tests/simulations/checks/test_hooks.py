"""Whichever of a user's hooks raises, each command ends with a sentence and a status, and none with a traceback."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgauge.client.components import allowing
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.exit_status import MISTAKE
from tests.small_runs import taped

HERE = Path(__file__).parent
SCENARIO = """
rounds = 1
clients = 2
data = { use = "hooked:stripes", batch_size = 2, auxiliary = 20 }
model = { use = "hooked:network" }
loss = { use = "hooked:cost" }
chain = [{ use = "hooked:dimmed" }, { use = "local_sgd", rate = 0.1 }, { use = "hooked:shrink" }]
attack = [{ use = "hooked:guess" }, { use = "inverting_gradients", iterations = 2, labels = "given" }]
strategy = { use = "hooked:Average" }
audit = { executor = "local" }
"""
COMMANDS = {
    "doctor": ["doctor", "a.toml"],
    "run": ["run", "a.toml", "--in-memory", "--log", "quiet"],
    "audit": ["audit", "runs/before", "--log", "quiet"],
}
BUILT = (
    "data",
    "images as an array",
    "model",
    "a class as the model",
    "loss",
    "link built",
    "transform",
    "attack built",
)
TRIED = ("normalise", "forward", "apply", "apply of another type", "apply of attackers", "mean")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a scenario and a run that was recorded when no hook raised."""
    folder = tmp_path_factory.mktemp("hooks")
    (folder / "a.toml").write_text(SCENARIO)
    with allowing(["hooked"], [HERE]):
        taped(folder / "runs" / "before", Scenario.load(folder / "a.toml"), 1)
    return folder


@pytest.fixture(autouse=True)
def place(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(recorded)
    monkeypatch.setenv("COLUMNS", "160")
    with allowing(["hooked"], [HERE]):
        yield


@pytest.mark.product
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("hook", BUILT + TRIED)
def test_a_hook_that_raises_is_refused_in_a_sentence(
    command: str, hook: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOOK", hook)
    before = set(Path("runs").iterdir())
    assert main(COMMANDS[command]) == MISTAKE
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    if command != "doctor" or hook in (*BUILT, "mean"):
        assert printed.err.strip().splitlines()[-1].startswith("fedgauge: ") and not printed.out
    else:
        assert " wrong " in printed.out
    if hook != "apply of attackers":  # clients can train with it
        assert set(Path("runs").iterdir()) == before, "refused before anything was created"


def test_a_strategy_that_cannot_be_built_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOOK", "strategy built")
    assert main(COMMANDS["doctor"]) == main(COMMANDS["run"]) == MISTAKE
    assert "[strategy]: Mishap" in capsys.readouterr().err


def test_a_fault_of_fedgauges_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("fedgauge.simulations.checks.scenario_check.check", broken)
    with pytest.raises(ZeroDivisionError):
        main(COMMANDS["doctor"])
