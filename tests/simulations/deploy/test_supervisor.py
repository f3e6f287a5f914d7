"""A deployment's processes are started again as their policy says, and end together."""

import json
import re

import pytest

from fedgauge.simulations.deploy import supervisor
from fedgauge.simulations.deploy.supervisor import LocalDeployment
from fedgauge.simulations.run import processes
from fedgauge.simulations.run.launch import TrainingFailed
from tests.simulations.deploy.conftest import SLEEP, linux, program
from tests.waiting import wait_for


@linux
def test_all_that_was_started_ends_with_the_start_even_what_left_its_group(local: LocalDeployment) -> None:
    stray = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True); {SLEEP}"
    )
    for name in ("one", "two"):
        program(local, name, stray)
    wait_for(lambda: len(processes.marked(local.mark)) == 4)
    local.close()
    assert processes.marked(local.mark) == [] and not local.scratch.exists()


def test_what_dies_is_started_again_as_its_policy_says(local: LocalDeployment) -> None:
    program(local, "always", "")
    program(local, "on-failure", "raise SystemExit(3)", "on-failure")
    program(local, "good", "", "on-failure")
    program(local, "once", "raise SystemExit(3)", "no")
    began = {name: child.pid for name, child in local.children.items()}
    for child in local.children.values():
        child.wait()
    local.poll()
    local.poll()
    again = {name for name, child in local.children.items() if child.pid != began[name]}
    assert again == {"always", "on-failure"}
    facts = json.loads((local.deployment.folder / "up.json").read_text())
    assert facts["pids"] == {name: child.pid for name, child in local.children.items()}


@pytest.mark.parametrize("name", ["dashboard", "superlink"])
def test_what_dies_again_and_again_is_reported_with_the_end_of_its_log_and_ends_all_only_where_it_is_needed(
    local: LocalDeployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(supervisor, "DEATHS", 2)
    program(local, name, "print('no such key'); raise SystemExit(9)")

    def look_on() -> None:
        for _ in range(20):
            local.children[name].wait()
            local.poll()

    words = rf"{name}: exit status 9, 2 times\n(.*\n)+no such key"
    if name == "superlink":
        with pytest.raises(TrainingFailed, match=words):
            look_on()
        return
    look_on()
    assert re.search(words, local.given_up[name])
    told = capsys.readouterr().err
    assert told.count(f"it continues without {name}") == 1 and "no such key" in told
