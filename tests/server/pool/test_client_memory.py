"""Attacks with memory in a live run: a client's rounds in order, nothing lost or done twice, whatever happens in between."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Reconstruction, Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.source import FederationSource
from fedgauge.client.federation import Federation
from fedgauge.server.pool.executors import LocalExecutor, Result
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Progress
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from tests.server.pool.score_rows import errors, progress, score_rows

ROUNDS = 4
CLIENTS = 3
FIT = 0.5  # so few iterations reach it for some of the images and not for others
FEEDBACK = {
    "use": "feedback_blending",
    "attack": {"use": "inverting_gradients", "rate": 0.3},
    "alpha": 0.25,
    "fit": FIT,
    "iterations": 6,
    "name": "feedback",
}
IG = {"use": "inverting_gradients", "iterations": 4}


@dataclass(frozen=True)
class Kept:
    """All that an audit leaves: every score's bits but its seconds, every job's end and key, every file's bytes."""

    scores: list[tuple[Any, ...]]
    jobs: list[tuple[Any, ...]]
    files: dict[str, bytes]


def kept(run: Run) -> Kept:
    query = (
        "SELECT a.name, j.round, j.client, j.state, j.key, j.memory FROM jobs j JOIN attacks a ON a.id = j.attack_id"
    )
    with run.ledger() as ledger:
        jobs = sorted(tuple(r) for r in ledger._db.execute(query))
    folders = [run.folder / name for name in ("reconstructions", "memories")]
    return Kept(score_rows(run), jobs, {f"{f.name}/{p.name}": p.read_bytes() for f in folders for p in f.glob("*")})


def remembered(run: Run, round: int, client: int) -> dict[str, Tensor]:
    return run.read_memory(round, client, "feedback")


def found(run: Run, round: int, client: int) -> Tensor:
    return run.read_reconstruction(round, client, "feedback")["x"]


@pytest.fixture(scope="module")
def scenario(kit: Any) -> Scenario:
    """One digit an update, so that the truth's order is the attack's; two clients in one wave, the third in another."""
    data = {"use": "mnist5k", "batch_size": 1, "auxiliary": 64}
    audit = {"executor": "local", "wave": 2}
    made: Scenario = kit.scenario(rounds=ROUNDS, clients=CLIENTS, data=data, attack=[FEEDBACK, IG], audit=audit)
    return made


@pytest.fixture(scope="module")
def audited(kit: Any, tmp_path_factory: pytest.TempPathFactory, scenario: Scenario) -> Run:
    """An audit without any interruption; not to be changed."""
    run: Run = kit.make_run(tmp_path_factory.mktemp("audited") / "whole", scenario, rounds=ROUNDS)
    serve(run, LocalExecutor())
    return run


@pytest.fixture
def whole(audited: Run, tmp_path: Path) -> Run:
    """A copy of it."""
    shutil.copytree(audited.folder, tmp_path / "whole")
    return Run.open(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------------ what it computes


def waves_of(run: Run, clients: Sequence[int], rounds: Sequence[int]) -> list[Wave]:
    return [Wave.stack([run.tape().read(r, c) for c in clients]) for r in rounds]


def expected(scenario: Scenario, run: Run, clients: Sequence[int], rounds: Sequence[int]) -> list[list[Reconstruction]]:
    """The same observations as one sequence in memory, as `fedgauge reproduce` meets them."""
    planned, auditor = (
        scenario.plan.attacks[0],
        Auditor(FederationSource(Federation(scenario.protocol)), scenario.plan.seed),
    )
    attack, known = planned.build(), auditor.knowledge(planned)
    memories, sequence = [{} for _ in clients], []
    for round, wave in zip(rounds, waves_of(run, clients, rounds), strict=True):
        streams = [auditor.stream(planned, round, c) for c in clients]
        results, memories = attack.advance(wave, known, planned.budget, streams, memories)
        sequence.append(results)
    return sequence


def test_a_federations_rounds_are_one_sequence_bit_for_bit(scenario: Scenario, whole: Run) -> None:
    assert progress(whole) == Progress(done=ROUNDS * CLIENTS * 5)
    successes = []
    for clients in ((0, 1), (2,)):
        for round, results in enumerate(expected(scenario, whole, clients, range(1, ROUNDS + 1)), 1):
            for client, result in zip(clients, results, strict=True):
                assert result.x is not None
                assert torch.equal(found(whole, round, client), result.x)
                successes.append((client, round, result.objective <= FIT))
    assert not all(good for *_, good in successes), "a failure is left out"
    for client, round, _ in successes:
        images = sum(good for c, r, good in successes if c == client and r <= round)
        assert int(remembered(whole, round, client).get("images", 0)) == images
    assert max(int(remembered(whole, ROUNDS - 1, c).get("images", 0)) for c in range(CLIENTS)) >= 2, (
        "a search starts from a blend"
    )


def with_attack(scenario: Scenario, **changes: Any) -> Scenario:
    """The scenario with another feedback blending, and without the second attack."""
    return Scenario.from_tables({**scenario.tables, "attack": [{**FEEDBACK, **changes}]})


# -------------------------------------------------------------------------------------------------- stopped and going on


def test_an_audit_that_is_stopped_after_every_wave_leaves_what_a_whole_one_leaves(
    kit: Any, tmp_path: Path, scenario: Scenario, whole: Run
) -> None:
    parts, turns = kit.make_run(tmp_path / "parts", scenario, rounds=ROUNDS), 0
    while progress(parts).queued and turns < 100:
        turns += 1
        begun = progress(parts).done
        serve(parts, LocalExecutor(), stop=lambda begun=begun: progress(parts).done > begun)
    assert turns == ROUNDS * 5 * 2
    assert kept(parts) == kept(whole)


class PowerCut(BaseException):
    """Everything ends here."""


@pytest.mark.parametrize("place", ["write_reconstruction", "write_memory", "finish"])
def test_a_power_cut_between_any_two_writes_loses_nothing_and_doubles_nothing(
    kit: Any, tmp_path: Path, scenario: Scenario, whole: Run, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run, owner = kit.make_run(tmp_path / "run", scenario, rounds=ROUNDS), Ledger if place == "finish" else Run
    original, calls = getattr(owner, place), 0

    def write(*arguments: Any) -> Any:
        """Every third write, the first of a wave's two among them, is the last thing that happens."""
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            if place != "finish":  # what was written is there
                original(*arguments)
            raise PowerCut
        return original(*arguments)

    cuts = 0
    with monkeypatch.context() as patched:
        patched.setattr(owner, place, write)
        while progress(run).queued or progress(run).leased:
            try:
                serve(run, LocalExecutor())
            except PowerCut:
                cuts += 1
            assert cuts < 100
    assert cuts >= 5
    assert kept(run) == kept(whole)


class Shuffled(LocalExecutor):
    """Several waves in flight, of which the last begun is the first to end."""

    slots = 3

    def __init__(self) -> None:
        super().__init__()
        self.together: set[frozenset[tuple[str, int, tuple[int, ...]]]] = set()

    def next_done(self, timeout: float) -> tuple[int, Result] | None:
        in_flight = [t for _, t in self._waiting if t.planned.name == "feedback"]
        self.together.add(frozenset(("feedback", t.wave.round, t.wave.clients) for t in in_flight))
        self._waiting.reverse()
        done = super().next_done(timeout)
        self._waiting.reverse()
        return done


def test_whatever_the_interleaving_the_bits_are_the_same(
    kit: Any, tmp_path: Path, scenario: Scenario, whole: Run
) -> None:
    run, executor = kit.make_run(tmp_path / "run", scenario, rounds=ROUNDS), Shuffled()
    serve(run, executor)
    assert kept(run) == kept(whole)
    assert max(len(waves) for waves in executor.together) == 2, "different clients advance at the same time"
    for waves in executor.together:
        clients = [c for _, _, of_wave in waves for c in of_wave]
        assert len(clients) == len(set(clients)), "and no client meets itself"


def test_rounds_that_arrive_while_the_pool_works_are_taken_up_in_order(
    kit: Any, tmp_path: Path, scenario: Scenario, whole: Run
) -> None:
    """As in a live run: round 1 is attacked before round 2 is trained."""
    run = kit.make_run(tmp_path / "run", scenario, tape=False)
    federation = Federation(scenario.protocol)
    trained: Iterator[int] = iter(range(1, ROUNDS + 1))
    coming = True

    def train() -> None:
        nonlocal coming
        if progress(run).queued or progress(run).leased:
            return
        round = next(trained, None)
        coming = round is not None
        if round is not None:
            with run.ledger() as ledger:
                kit.record_rounds(run, ledger, scenario, federation, round)  # the earlier ones stay as they are

    serve(run, LocalExecutor(), follow=lambda: coming, tick=train)
    assert kept(run) == kept(whole)


# ------------------------------------------------------------------------------------------------------- what goes wrong


def update_file(run: Run, round: int, client: int) -> Path:
    return run.folder / "tape" / f"round-{round:05d}-client-{client:05d}.safetensors"


def spoil(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_job_that_fails_hands_on_what_was_remembered_before_it(kit: Any, tmp_path: Path, scenario: Scenario) -> None:
    scenario = with_attack(scenario, fit=1e9)
    run = kit.make_run(tmp_path / "run", scenario, rounds=ROUNDS)
    spoil(update_file(run, 2, 2))
    serve(run, LocalExecutor())
    assert set(errors(run)) == {(a, 2, 2) for a in ("feedback", "mean_image", "class_mean_image", "random_image")}
    assert progress(run) == Progress(done=ROUNDS * CLIENTS * 4 - 4, failed=4)
    for round, (result,) in zip((1, 3, 4), expected(scenario, run, (2,), (1, 3, 4)), strict=True):
        assert result.x is not None
        assert torch.equal(found(run, round, 2), result.x)
    assert [int(remembered(run, r, 2)["images"]) for r in (1, 3, 4)] == [1, 2, 3]
    assert not run.memory(2, 2, "feedback").exists()
    assert [int(remembered(run, r, 0)["images"]) for r in (1, 2, 3, 4)] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_memory_fails_only_its_client(kit: Any, tmp_path: Path, scenario: Scenario, damage: str) -> None:
    run = kit.make_run(tmp_path / "run", scenario, rounds=ROUNDS)
    serve(run, LocalExecutor(), stop=lambda: progress(run).done >= CLIENTS)
    path = run.memory(1, 0, "feedback")
    path.unlink() if damage == "missing" else spoil(path)
    serve(run, LocalExecutor())
    failed = errors(run)
    assert set(failed) == {("feedback", r, 0) for r in range(2, ROUNDS + 1)}
    assert all(str(path) in error for error in failed.values())
    assert progress(run) == Progress(done=ROUNDS * CLIENTS * 5 - (ROUNDS - 1), failed=ROUNDS - 1)
