"""Flower's real processes, TLS and keys on one SuperLink: whom it lets in, and what its clients train."""

import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fedgauge.server.pki import write_authority, write_node_key
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.deploy.train import register, start
from fedgauge.simulations.run import in_memory
from fedgauge.simulations.run.create import create_run
from tests.simulations.deploy.local import RUN, LocalDeployment, Watching
from tests.small_runs import ANALYTIC, DEPLOYED, SEARCH
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="finds children by /proc: Linux"),
]

SCENARIO = DEPLOYED.format(rounds=2, clients=2) + "rounds = [2]\n" + SEARCH + ANALYTIC
ENTERED = "SuperNode ID:"  # what one says that was let in


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """A SuperLink that knows two keys."""
    folder = tmp_path_factory.mktemp("linked")
    (folder / "small.toml").write_text(SCENARIO)
    deployment = Deployment.create(
        folder / "federation", 2, scenario=folder / "small.toml", grading="scores", sampling="agreed"
    )
    with closing(LocalDeployment(deployment)) as local:
        local.listen()
        yield local


def begin_missing(local: LocalDeployment, *names: str) -> None:
    """Start services that do not run yet."""
    for name in names:
        if name not in local.children:
            local.begin(name)


def trained(local: LocalDeployment) -> Run:
    """A run by the services of containers, attacked while it trains."""
    begin_missing(local, "serverapp", "supernode-0", "supernode-1")
    run, _ = local.deployment.begin(RUN)

    def look_on() -> None:
        assert [
            s for s in ("superlink", "serverapp", "supernode-0", "supernode-1") if local.status(s) is not None
        ] == []
        if run.at_work("training"):
            begin_missing(local, "attack")

    assert start(local.deployment, local.superlink, RUN, Watching(look_on)) == 0
    return run


# ------------------------------------------------------------------------------------------------- who is not let in


def refusal(local: LocalDeployment, name: str, command: tuple[str, ...]) -> str:
    """The log of a SuperNode that is not let in."""
    local.commands[name] = command
    local.begin(name)
    wait_for(lambda: local.status(name) is not None, 90)
    said = local.log(name).read_text()
    assert ENTERED not in said and local.status(name) != 0
    return said


def changed(command: tuple[str, ...], option: str, value: str) -> tuple[str, ...]:
    place = command.index(option) + 1
    return (*command[:place], value, *command[place + 1 :])


def test_strangers_are_refused_and_who_is_known_is_not(linked: LocalDeployment, tmp_path: Path) -> None:
    folder, port = linked.deployment.folder, linked.port
    mine = linked.commands["supernode-0"]

    write_node_key(tmp_path / "stranger")
    said = refusal(linked, "stranger", changed(mine, "--auth-supernode-private-key", str(tmp_path / "stranger")))
    assert "Exit Code: 305" in said, said

    without = [w for i, w in enumerate(mine) if "--auth-supernode" not in w and "--auth-supernode" not in mine[i - 1]]
    assert "Exit Code: 305" in refusal(linked, "keyless", tuple(without)), "nobody makes himself known"

    (tmp_path / "other").mkdir()
    write_authority(tmp_path / "other")
    said = refusal(linked, "deceived", changed(mine, "--root-certificates", str(tmp_path / "other" / "ca.crt")))
    assert "certificate" in said.lower(), said

    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10)
    trusting = ssl.create_default_context(cafile=folder / "tls" / "ca.crt")
    with urllib.request.urlopen(f"https://127.0.0.1:{port}/health", timeout=10, context=trusting) as answer:
        assert answer.status == 200
    asked = urllib.request.Request(
        f"https://127.0.0.1:{port}/v1/runtime/acquire-task",
        data=b"",
        headers={"Content-Type": "application/protobuf", "Accept": "application/protobuf"},
    )
    with pytest.raises(urllib.error.HTTPError) as denied:  # else anybody could run in the ServerApp's place
        urllib.request.urlopen(asked, timeout=10, context=trusting)
    with denied.value as answer:  # which holds a socket
        assert answer.code in (401, 403), answer.read()

    register(linked.deployment, f"127.0.0.1:{port}")  # once more changes nothing
    begin_missing(linked, "supernode-0")
    known = linked.log("supernode-0")
    wait_for(lambda: ENTERED in known.read_text(), 60)
    assert linked.status("supernode-0") is None


# ---------------------------------------------------------------------------------------------------- what is trained


def by_example(ledger: Ledger) -> dict[tuple[object, ...], float]:
    return {(r["round"], r["client"], r["attack"], r["example"]): r["value"] for r in ledger.scores("psnr")}


def test_a_deployment_trains_what_a_simulation_of_its_seed_trains(linked: LocalDeployment, tmp_path: Path) -> None:
    """Two clients with files of their own, which grade the attacks: the same updates, bit for bit."""
    run = trained(linked)
    simulated = create_run(run.scenario(), tmp_path / "simulated")
    in_memory.train(simulated)
    with run.ledger() as ours, simulated.ledger() as theirs:
        found, expected = ([tuple(o) for o in ledger.observations()] for ledger in (ours, theirs))
        assert found == expected and len(found) == 4, "round, client, what became of it, examples, digest"
        accuracies = [[(r["round"], r["accuracy"], r["loss"]) for r in ledger.rounds()] for ledger in (ours, theirs)]
        assert accuracies[0] == accuracies[1]
        serve(simulated, LocalExecutor())
        told, truth = (by_example(ledger) for ledger in (ours, theirs))
        assert told.keys() == truth.keys() and len(told) == 2 * 7, "two attacks, their wrong clients, three baselines"
        # quantised to 0.5 dB by each client, and capped; packed differently, an attack's last digits differ
        assert max(abs(told[key] - min(truth[key], 60.0)) for key in told) <= 0.25 + 0.05
        progress = ours.progress()
        assert (progress.done, progress.failed, progress.waiting) == (10, 0, 0)
        graded = [r["value"] for r in ours.scores("psnr") if r["attack"] == "analytic"]
        assert len(graded) == 2 and min(graded) >= 60, "the first layer's gradient holds the image exactly"
