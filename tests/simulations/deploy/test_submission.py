"""What a deployment submits to Flower, and that what Flower answers is never taken on trust."""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.deploy import submission
from fedgauge.simulations.deploy.submission import Submission
from fedgauge.simulations.run.launch import TrainingFailed, child_environment, with_ends
from tests.small_runs import SMALLEST

Answering = Callable[..., Submission]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that nobody has submitted."""
    return Run.create(tmp_path / "run", Scenario.from_tables(SMALLEST))


def status(run: Run, submitted: Submission) -> str:
    return submitted.status(
        lambda what: with_ends(f"the federation failed: {what}", run.folder / "logs" / "flower.log")
    )


def test_the_app_that_flower_hands_to_every_client_holds_no_code(run: Run, tmp_path: Path) -> None:
    submission.write_app(tmp_path, run, run.scenario())
    (shipped,) = (path for path in (tmp_path / "app").rglob("*") if path.is_file())
    assert shipped.name == "pyproject.toml"
    components = tomllib.loads(shipped.read_text())["tool"]["flwr"]["app"]["components"]
    assert components == {"serverapp": "fedgauge.server.app:app", "clientapp": "fedgauge.client.app:app"}


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run) -> Answering:
    """Puts a program called flwr where Flower's is looked for: it begins run 7, and answers as it is asked to here."""

    def answer(script: str, begun: str = "Successfully started run 7") -> Submission:
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "flwr").write_text(f"#!/bin/sh\nif [ $1 = run ]; then echo '{begun}'; exit; fi\n{script}\n")
        (programs / "flwr").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(programs / "python"))
        log = run.log("flower.log")
        log.write_text("Successfully started run 5\n")  # what was interrupted before
        submitted = Submission(tmp_path, log, child_environment(tmp_path, "a test's"))
        submitted.process.wait(20)
        return submitted

    return answer


@pytest.mark.parametrize(
    "said",
    ['{"runs": null}', '{"runs": []}', '{"runs": [{}]}', "[]", "null", "oops", ""],
)
def test_an_answer_that_is_none_is_a_failure_in_words(run: Run, answering: Answering, said: str) -> None:
    submitted = answering(f"echo '{said}'; echo 'the link is down' >&2")
    with pytest.raises(TrainingFailed, match="link"):
        status(run, submitted)


def test_an_answer_that_never_comes_is_a_failure_in_words(
    run: Run,
    answering: Answering,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "PATIENCE", 0.3)
    submitted = answering("exec sleep 60")
    with pytest.raises(TrainingFailed):
        status(run, submitted)


def test_a_run_that_failed_is_reported_with_the_end_of_its_log(run: Run, answering: Answering) -> None:
    submitted = answering("""echo '{"runs": [{"status": "finished:failed"}]}'""")
    with run.log("flower.log").open("a") as log:
        log.write("first\n" * 50 + "the last words\n")
    assert status(run, submitted) == "finished:failed"
    failed = "the federation failed: finished:failed"
    lines = with_ends(failed, run.folder / "logs" / "flower.log").splitlines()
    assert lines[0] == failed and str(run.folder / "logs" / "flower.log") in lines[1]
    assert (len(lines), lines[-1]) == (2 + 12, "the last words")


def test_a_submission_asks_for_its_own_run(run: Run, answering: Answering) -> None:
    submitted = answering("""echo "{\\"runs\\": [{\\"status\\": \\"$*\\"}]}\"""")
    assert "--run-id 7 --format json" in status(run, submitted)


def test_a_submission_that_was_refused_never_began(run: Run, answering: Answering) -> None:
    submitted = answering("echo never asked; exit 1", begun="no SuperLink is there")
    with pytest.raises(TrainingFailed, match="never"):
        status(run, submitted)


def test_a_superlink_that_comes_back_ends_the_wait_with_the_runs_own_status(
    run: Run, answering: Answering, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    submitted = answering(f"""echo >> {asked}
case $(wc -l < {asked}) in 1|2) exit 1;; 3) status=running;; *) status=finished:completed;; esac
echo "{{\\"runs\\": [{{\\"status\\": \\"$status\\"}}]}}\"""")
    assert submitted.wait(str, lambda: False) == "finished:completed"
    assert len(asked.read_text()) == 4


def test_a_superlink_that_stays_away_fails_the_run(
    run: Run, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = answering("exit 1")
    monkeypatch.setattr(submission, "PATIENCE", 0.5)
    with pytest.raises(TrainingFailed):
        submitted.wait(str, lambda: False)
