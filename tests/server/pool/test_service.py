"""The attack service: every job of the ledger ends in rows, whatever happens to files, attacks and pools."""

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave
from fedgauge.attacks.score_rows import WHOLE_BATCH
from fedgauge.client.components import allowing
from fedgauge.client.federation import Federation
from fedgauge.server.pool.executors import LocalExecutor, Result, WorkerDied
from fedgauge.server.pool.service import ATTEMPTS, serve
from fedgauge.server.pool.worker import Task
from fedgauge.server.store.ledger_types import Progress
from fedgauge.server.store.run import Run, RunBusy
from tests.server.pool.score_rows import errors, progress, score_rows

IG = {"use": "inverting_gradients", "iterations": 4}


def meta(run: Run) -> dict[str, str]:
    with run.ledger() as ledger:
        return ledger.meta()


def file_of(run: Run, round: int, client: int) -> Path:
    return run.folder / "tape" / f"round-{round:05d}-client-{client:05d}.safetensors"


@pytest.fixture
def plugin() -> Iterator[Callable[[type[Attack]], str]]:
    """Adds an attack as a user's own package would; returns the name that a scenario uses."""
    added = []

    def add(attack: type[Attack]) -> str:
        name = f"plugins.attack_{len(added)}"
        module = types.ModuleType(name)
        attack.__module__ = name
        setattr(module, attack.__name__, attack)
        sys.modules[name] = module
        added.append(name)
        return f"{name}:{attack.__name__}"

    with allowing(["plugins"]):
        yield add
    for name in added:
        del sys.modules[name]


# ------------------------------------------------------------------------------------------------------------ all well


def test_every_job_is_done_and_everything_is_written(kit: Any, tmp_path: Path) -> None:
    run = kit.make_run(tmp_path / "run", kit.scenario(attack=[IG], audit={"executor": "local", "wave": 3}), rounds=2)
    serve(run, LocalExecutor())
    assert progress(run) == Progress(done=2 * 4 * 4)
    rows = score_rows(run)
    assert len(rows) == len(set(rows))
    attacks = {
        "inverting_gradients",
        "mean_image",
        "class_mean_image",
        "random_image",
        "wrong_client(inverting_gradients)",
    }
    for metric in ("mse", "psnr", "ssim", "identified"):
        found = {(r, c, a, e) for r, c, a, e, m, _, _ in rows if m == metric}
        assert found == {(r, c, a, e) for r in (1, 2) for c in range(4) for a in attacks for e in (0, 1)}
    assert {(a, e) for _, _, a, e, m, _, _ in rows if m == "label_accuracy"} == {("inverting_gradients", WHOLE_BATCH)}
    assert {status for *_, status, _ in rows} == {"converged"}
    x = run.read_reconstruction(2, 3, "inverting_gradients")["x"]
    assert x.shape == (2, 1, 28, 28)
    assert 0 <= float(x.min()) <= float(x.max()) <= 1
    assert len(list((run.folder / "reconstructions").iterdir())) == 2 * 4 * 4


def test_a_score_is_the_metric_of_the_kept_image_and_the_true_one(kit: Any, tmp_path: Path) -> None:
    scenario = kit.scenario(attack=[IG])
    run = kit.make_run(tmp_path / "run", scenario)
    serve(run, LocalExecutor())
    truth = Federation(scenario.protocol).batch_at(2, 1).x.double()
    kept = run.read_reconstruction(1, 2, "inverting_gradients")["x"].double()
    expected = ((truth - kept) ** 2).flatten(1).mean(1).tolist()
    with run.ledger() as ledger:
        found = [r["value"] for r in ledger.scores("mse") if (r["client"], r["attack"]) == (2, "inverting_gradients")]
        cards = {r["knowledge"] for r in ledger.scores() if r["attack"] == "wrong_client(inverting_gradients)"}
    assert found == pytest.approx(expected, rel=1e-12)
    assert len(cards) == 1
    assert "labels restored" in cards.pop(), "the threat model stands beside every score"


def test_the_replay_is_recorded_before_anything_is_attacked(kit: Any, tmp_path: Path) -> None:
    run = kit.make_run(tmp_path / "run", kit.scenario())
    seen: list[tuple[bool, int]] = []
    serve(run, LocalExecutor(), tick=lambda: seen.append(("replay" in meta(run), progress(run).done)))
    assert seen[0] == (True, 0)
    assert meta(run)["replay"] == "ok"
    assert meta(run)["replay_detail"].endswith("exact to rounding")


def test_a_failed_replay_check_is_reported_and_nothing_is_attacked(kit: Any, tmp_path: Path) -> None:
    scenario = kit.scenario(attack=[])
    run = kit.make_run(tmp_path / "run", scenario, tape=False)
    other = kit.scenario(attack=[], chain=[{"use": "local_sgd", "rate": 0.2}])
    with run.ledger() as ledger:
        kit.record_rounds(run, ledger, scenario, Federation(other.protocol), 1)
    for _ in range(2):  # asked again, it looks again
        serve(run, LocalExecutor(), follow=lambda: True)
        assert meta(run)["replay"] == "mismatch"
        assert ", 2 times the" in meta(run)["replay_detail"]
        assert progress(run) == Progress(queued=4 * 3)
        assert score_rows(run) == []
    serve(run, LocalExecutor(), force=True)
    assert (meta(run)["replay"], progress(run)) == ("mismatch", Progress(done=4 * 3))
    with run.ledger() as ledger:
        ledger.retry_ended(["converged"], 2)
    serve(run, LocalExecutor(), other)  # what differed is mended
    assert meta(run)["replay"] == "ok"
    assert progress(run) == Progress(done=4 * 3)


def test_a_run_that_is_done_is_not_done_again(kit: Any, tmp_path: Path) -> None:
    run = kit.make_run(tmp_path / "run", kit.scenario())
    serve(run, LocalExecutor())
    before = score_rows(run)
    serve(run, Refusing())
    assert score_rows(run) == before


class Refusing(LocalExecutor):
    """An executor for a pool that has nothing to do."""

    def submit(self, ticket: int, task: Task) -> None:
        raise AssertionError("nothing was left to attack")


# -------------------------------------------------------------------------------------------------- stopped and going on


def test_an_interrupted_audit_goes_on_to_the_same_scores(kit: Any, tmp_path: Path) -> None:
    scenario = kit.scenario(attack=[IG], audit={"executor": "local", "wave": 2})
    whole, parts = (kit.make_run(tmp_path / name, scenario, rounds=2) for name in ("whole", "parts"))
    serve(whole, LocalExecutor())
    turns = 0
    while progress(parts).queued and turns < 50:
        turns += 1
        begun = progress(parts).done
        serve(parts, LocalExecutor(), stop=lambda begun=begun: progress(parts).done > begun)
        assert progress(parts).leased == 0, "what is in flight is finished"
    assert turns == 16, "a stop after every wave"
    assert score_rows(parts) == score_rows(whole)


def test_jobs_of_a_pool_that_died_are_taken_up_again(kit: Any, tmp_path: Path) -> None:
    scenario = kit.scenario(attack=[IG])
    run, other = (kit.make_run(tmp_path / name, scenario) for name in ("run", "other"))

    class PowerCut(BaseException):
        pass

    class Dying(LocalExecutor):
        def next_done(self, timeout: float) -> tuple[int, Result] | None:
            raise PowerCut

    for _ in range(ATTEMPTS + 1):
        with pytest.raises(PowerCut):
            serve(run, Dying())
        assert progress(run).leased == 4
    serve(run, LocalExecutor())
    serve(other, LocalExecutor())
    assert score_rows(run) == score_rows(other)


def test_a_pool_that_follows_waits_for_what_is_still_to_come(kit: Any, tmp_path: Path) -> None:
    scenario = kit.scenario(attack=[])
    run = kit.make_run(tmp_path / "run", scenario, tape=False)
    coming = iter([True, True, True, False])
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 3:
            with run.ledger() as ledger:
                kit.record_rounds(run, ledger, scenario, Federation(scenario.protocol), 1)

    serve(run, LocalExecutor(), follow=lambda: next(coming, False), tick=tick)
    assert progress(run) == Progress(done=12)
    assert meta(run)["replay"] == "ok"


def test_a_job_that_comes_with_the_end_of_the_training_is_not_missed(kit: Any, tmp_path: Path) -> None:
    """Training writes its last jobs and ends between two looks of the pool."""
    scenario = kit.scenario(attack=[])
    run = kit.make_run(tmp_path / "run", scenario, tape=False)
    training = True

    def follow() -> bool:
        nonlocal training
        was, training = training, False
        return was

    def tick() -> None:
        if not progress(run).total:
            with run.ledger() as ledger:
                kit.record_rounds(run, ledger, scenario, Federation(scenario.protocol), 1)

    serve(run, LocalExecutor(), follow=follow, tick=tick)
    assert progress(run) == Progress(done=12)


def test_a_second_pool_on_a_run_is_refused(kit: Any, tmp_path: Path) -> None:
    run = kit.make_run(tmp_path / "run", kit.scenario())
    with run.lock("audit"), pytest.raises(RunBusy):
        serve(run, LocalExecutor())
    assert progress(run).queued == 16
    serve(run, LocalExecutor())
    assert progress(run).done == 16


# ------------------------------------------------------------------------------------------------------- what goes wrong


@dataclass(frozen=True)
class breaks(Attack):
    """Raises what it is told to, for the clients it is told to."""

    words: str = "cuda went away"
    client: int = 1

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        if self.client in wave.clients:
            raise RuntimeError(self.words)
        return [Reconstruction(None, None, 0.0, 1, 0.0, "diverged", f"as {client} was told") for client in wave.clients]


@pytest.mark.parametrize(
    ("words", "told"),
    [("first\nlast", "RuntimeError: last"), ("", "RuntimeError"), (" \n ", "RuntimeError")],
)
def test_an_attack_that_raises_fails_at_once_with_a_row(
    kit: Any, tmp_path: Path, plugin: Callable[[type[Attack]], str], words: str, told: str
) -> None:
    table = {"use": plugin(breaks), "words": words, "iterations": 1}
    run = kit.make_run(tmp_path / "run", kit.scenario(attack=[table], audit={"executor": "local", "wave": 1}))
    executor = Counting()
    serve(run, executor)
    assert executor.submitted.count(("breaks", (1,))) == 1, "what it raised it would raise again"
    assert progress(run) == Progress(done=15, failed=1)
    assert errors(run) == {("breaks", 1, 1): told}
    rows = [r for r in score_rows(run) if r[2] == "breaks"]
    assert [r for r in rows if r[5] == "failed"] == [(1, 1, "breaks", WHOLE_BATCH, "psnr", "failed", None)]
    assert {r[1] for r in rows if r[5] == "diverged"} == {0, 2, 3}, "a diverged attack is a result with a status"


def test_an_observation_that_raises_fails_none_of_its_wave(
    kit: Any, tmp_path: Path, plugin: Callable[[type[Attack]], str]
) -> None:
    table = {"use": plugin(breaks), "iterations": 1}
    run = kit.make_run(tmp_path / "run", kit.scenario(attack=[table], audit={"executor": "local", "wave": 4}))
    executor = Counting()
    serve(run, executor)
    waves = [clients for name, clients in executor.submitted if name == "breaks"]
    assert (waves[0], sorted(waves[1:])) == ((0, 1, 2, 3), [(0,), (1,), (2,), (3,)])
    assert progress(run) == Progress(done=15, failed=1)
    assert errors(run) == {("breaks", 1, 1): "RuntimeError: cuda went away"}


class Deadly(LocalExecutor):
    """Loses its worker over some client's update, as often as it is told to."""

    def __init__(self, client: int, times: int) -> None:
        super().__init__()
        self.client = client
        self.left = times
        self.lost: list[tuple[int, ...]] = []

    def next_done(self, timeout: float) -> tuple[int, Result] | None:
        ticket, task = self._waiting[0]
        if "inverting" not in task.planned.name or self.client not in task.wave.clients or not self.left:
            return super().next_done(timeout)
        self._waiting.popleft()
        self.left -= 1
        self.lost.append(task.wave.clients)
        return ticket, WorkerDied("ActorDiedError: killed")


@pytest.mark.parametrize(
    ("times", "lost", "left"),
    [
        (1, [(0, 1)], Progress(done=16)),
        (ATTEMPTS, [(0, 1)] * ATTEMPTS, Progress(done=16)),
        (99, [(0, 1)] * ATTEMPTS + [(1,)], Progress(done=15, failed=1)),
    ],
    ids=["once", "as a wave", "always"],
)
def test_a_wave_that_loses_its_worker_is_tried_again_and_then_one_by_one(
    kit: Any, tmp_path: Path, times: int, lost: list[tuple[int, ...]], left: Progress
) -> None:
    run = kit.make_run(tmp_path / "run", kit.scenario(attack=[IG], audit={"executor": "local", "wave": 2}))
    executor = Deadly(1, times)
    serve(run, executor)
    assert executor.lost == lost
    assert progress(run) == left
    assert set(errors(run).values()) <= {"WorkerDied: ActorDiedError: killed"}


class Counting(LocalExecutor):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[tuple[str, tuple[int, ...]]] = []

    def submit(self, ticket: int, task: Task) -> None:

        self.submitted.append((task.planned.name, task.wave.clients))
        super().submit(ticket, task)


@pytest.mark.parametrize("damage", ["flipped", "missing", "truncated"])
def test_a_damaged_update_fails_its_own_jobs_by_name_and_no_others(kit: Any, tmp_path: Path, damage: str) -> None:
    scenario = kit.scenario(attack=[IG], audit={"executor": "local", "wave": 4})
    run, whole = (kit.make_run(tmp_path / name, scenario, rounds=2) for name in ("run", "whole"))
    path = file_of(run, 1, 2)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
    serve(run, LocalExecutor())
    serve(whole, LocalExecutor())
    assert progress(run) == Progress(done=28, failed=4)
    failed = errors(run)
    assert set(failed) == {(a, 1, 2) for a in ("inverting_gradients", "mean_image", "class_mean_image", "random_image")}
    assert all(v is not None and str(path) in v for v in failed.values())
    keys = {r[:5] for r in score_rows(run) if r[5] != "failed"}
    expected = {r[:5] for r in score_rows(whole)}
    # the reconstruction from client 2's update would also have been graded against client 3's truth
    lost = {k for k in expected - keys if k[0] == 1}
    assert {(k[1], k[2]) for k in lost} == {
        (2, "inverting_gradients"),
        (2, "mean_image"),
        (2, "class_mean_image"),
        (2, "random_image"),
        (3, "wrong_client(inverting_gradients)"),
    }


# --------------------------------------------------------------------------------------------------------- [tape] keep


def test_keep_none_deletes_what_was_attacked_and_keeps_what_was_found(kit: Any, tmp_path: Path) -> None:
    run = kit.make_run(tmp_path / "run", kit.scenario(tape={"keep": "none"}), rounds=2)
    assert len(list((run.folder / "tape").iterdir())) == 10
    left: list[int] = []
    serve(run, LocalExecutor(), tick=lambda: left.append(len(list((run.folder / "tape").iterdir()))))
    assert list((run.folder / "tape").iterdir()) == []
    assert 5 in left, "a round is deleted when its last attack is over, not at the end"
    assert progress(run).done == 32
    assert meta(run)["replay"] == "ok"
    assert run.read_reconstruction(1, 0, "mean_image")["x"].shape == (2, 1, 28, 28)
    with run.ledger() as ledger:
        assert {o["digest"] for o in ledger.observations()} == {None}


def test_keep_none_lets_the_replay_check_have_its_update_first(kit: Any, tmp_path: Path) -> None:
    """Round 1 is not attacked: its one update is there for the replay check alone, and comes while the pool waits."""
    scenario = kit.scenario(attack=[], audit={"executor": "local", "rounds": [2]}, tape={"keep": "none"})
    run = kit.make_run(tmp_path / "run", scenario, tape=False)
    coming = iter([True, True])

    def tick() -> None:
        with run.ledger() as ledger:
            if not ledger.observations():
                kit.record_rounds(run, ledger, scenario, Federation(scenario.protocol), 1)

    serve(run, LocalExecutor(), follow=lambda: next(coming, False), tick=tick)
    assert meta(run).get("replay") == "ok"
    assert list((run.folder / "tape").iterdir()) == []
