"""What a deployment survives: with Flower's real processes, TLS and keys."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.run import launch, processes
from tests.simulations.deploy.local import RUN, LocalDeployment
from tests.small_runs import ANALYTIC, DEPLOYED
from tests.waiting import listens, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds children by /proc: Linux"),
]

SCENARIO = DEPLOYED.format(rounds=3, clients=2) + ANALYTIC


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    (tmp_path / "small.toml").write_text(SCENARIO)
    return Deployment.create(tmp_path / "federation", 2, scenario=tmp_path / "small.toml", sampling="agreed")


def reached(deployment: Deployment, round: int) -> bool:
    for ledger_file in (deployment.folder / "runs").glob("*/ledger.sqlite"):
        with Run(ledger_file.parent).ledger(readonly=True) as ledger:
            return bool(ledger.rounds()) and ledger.last_round() >= round
    return False


def train(local: LocalDeployment, faults: dict[int, tuple[str, ...]]) -> int | None:
    """Train the run with every service, of which some are killed once a round is over; returns the exit status.

    What died is started again, as Docker does; but the SuperLink and `start` are not.
    """
    restarted = [name for name in local.commands if name.startswith("supernode")][:2]
    local.listen()
    local.begin("serverapp", *restarted, "start")
    run = Run(local.deployment.folder / "runs" / RUN)
    waiting = dict(faults)
    while local.status("start") is None:
        if "attack" not in local.children and run.at_work("training"):
            local.begin("attack")
            restarted.append("attack")
        for round in [round for round in waiting if reached(local.deployment, round)]:
            for name in waiting.pop(round):
                local.kill(name)
        for name in restarted:
            if local.status(name):
                time.sleep(2.0)
                local.begin(name)
        time.sleep(0.1)
    assert not waiting, "every fault came"
    return local.status("start")


@pytest.mark.full
def test_one_run_through_many_faults_ends_complete(deployment: Deployment) -> None:
    """A client and the attack service are killed, then the SuperLink and `start`; another start continues."""
    with closing(LocalDeployment(deployment)) as first:
        assert train(first, {1: ("supernode-1", "attack"), 2: ("superlink", "start")}) == -signal.SIGKILL
    assert processes.marked(first.mark) == []
    with closing(LocalDeployment(deployment)) as second:
        assert train(second, {}) == 0, second.log("start").read_text()
    complete(Run.open(deployment.folder / "runs" / RUN), rounds=3, clients=2)


def complete(run: Run, rounds: int, clients: int) -> None:
    """Neither gap nor double: every round once, every client's fate in it once, every update attacked once by each attack."""
    with run.ledger(readonly=True) as ledger:
        assert ledger.meta()["state"] == "trained"
        assert [r["round"] for r in ledger.rounds()] == list(range(rounds + 1))
        seen = {(o["round"], o["client"]): o["status"] for o in ledger.observations()}
        assert {round for round, _ in seen} == set(range(1, rounds + 1))
        assert len(ledger.observations()) == len(seen)
        accepted = {key for key, state in seen.items() if state == "accepted"}
        assert Counter(round for round, _ in accepted)[rounds] == clients, "in the end all are back"
        progress = ledger.progress()
        each = 4  # an attack and three baselines
        assert (progress.done, progress.failed, progress.queued, progress.leased) == (each * len(accepted), 0, 0, 0)
        rows = Counter((r["round"], r["client"], r["attack"], r["example"], r["metric"]) for r in ledger.scores())
        assert rows and max(rows.values()) == 1
        assert {(round, client) for round, client, *_ in rows} == accepted


# -------------------------------------------------------------------------------------------------------- Ray's cluster


def access(cluster: LocalDeployment) -> dict[str, str]:
    """What a process needs; it looks for a head that is gone for ten seconds, not for a minute."""
    hasty = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
    return hasty | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{cluster.deployment.folder}/secrets/ray"}


@pytest.fixture
def cluster(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalDeployment]:
    """A Ray head and a worker, by the commands of docker-compose.yml."""
    with closing(LocalDeployment(deployment)) as local:
        usual = local.environment
        monkeypatch.setattr(local, "environment", lambda name: usual(name) | access(local))
        local.begin("ray-head")
        wait_for(lambda: listens(local.head), 60)
        local.begin("ray-worker")
        yield local


def restart(cluster: LocalDeployment) -> None:
    """Start what died again, as Docker does."""
    for name in ("ray-head", "ray-worker"):
        if cluster.status(name) is not None:
            with suppress(ProcessLookupError):  # what it had started would hold its port, or answer in its place
                cluster.kill(name)
            time.sleep(1.0)
            cluster.begin(name)


def workers_of(cluster: LocalDeployment) -> list[int]:
    """The attack workers that the cluster's own processes have started: they carry its mark."""
    lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in processes.marked(cluster.mark)}
    return [pid for pid, line in lines.items() if line.exists() and b"ray::Actor" in line.read_bytes()]


def joined(cluster: LocalDeployment) -> list[str]:
    """The nodes without cores that audits have joined to the cluster."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    address = f"127.0.0.1:{cluster.head}"
    return [line for line in listed if "ray.scripts.scripts" in line and address in line]


@pytest.mark.full
def test_the_attack_service_works_in_a_cluster_that_lets_in_who_has_its_token(
    cluster: LocalDeployment, make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run], tmp_path: Path
) -> None:
    long = [
        {"use": "inverting_gradients", "iterations": 1000},
        {"use": "analytic"},
    ]  # not over before the head is killed
    scenario = make_scenario(audit={"executor": "ray"}, attack=long)
    run = make_taped(cluster.deployment.folder / "runs" / RUN, scenario)
    command = cluster.commands["attack"]
    (tmp_path / "ray").mkdir()
    outside = launch.child_environment(tmp_path, "none-of-theirs") | access(cluster)
    outside["RAY_ADDRESS"] = f"127.0.0.1:{cluster.head}"
    (tmp_path / "wrong").write_text("0" * 64)
    stranger = subprocess.run(
        command,
        env=outside | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "wrong")},
        capture_output=True,
        timeout=150,
    )
    with run.ledger() as ledger:
        before = ledger.progress()
        assert stranger.returncode != 0 and before.queued == before.total > 0 and workers_of(cluster) == []

    def begin_audit() -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=outside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    there: list[int] = []

    def begun() -> bool:
        there.extend(workers_of(cluster))
        return bool(there) or audit.poll() is not None

    audit = begin_audit()
    try:
        wait_for(begun, 90)
        cluster.kill("ray-head")
        _, said = audit.communicate(timeout=200)
    finally:
        audit.kill()
    assert there and audit.returncode, f"without a head it fails, and is started again: {said}"
    wait_for(lambda: not joined(cluster), 60)

    wait_for(lambda: restart(cluster) or listens(cluster.head), 120)
    audit = begin_audit()
    try:  # the worker ends when it has looked for its head in vain, and is started again while the audit waits for it
        wait_for(lambda: restart(cluster) or audit.poll() is not None, 300)
    finally:
        audit.kill()
    _, said = audit.communicate()
    assert audit.returncode == 0, said
    with run.ledger() as ledger:
        after = ledger.progress()
        assert (after.done, after.failed) == (before.total, 0)
        rows = Counter((r["round"], r["client"], r["attack"], r["example"], r["metric"]) for r in ledger.scores())
        assert set(rows.values()) == {1}
    assert cluster.status("ray-head") is None and cluster.status("ray-worker") is None, "the cluster stays"
