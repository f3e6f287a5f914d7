"""A deployment's folder holds what its parties need and no more; its processes train, are attacked, and end together."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedgauge.client.components import SpecError, allowing
from fedgauge.client.deployment.owner import OwnerConfig
from fedgauge.server.app import federate
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_rows import Participation
from fedgauge.server.store.run import Run, RunBusy
from fedgauge.server.strategy.validator import CLIENT_ABSENT
from fedgauge.server.views.overview import notices
from fedgauge.server.views.reading import Reading, state_of
from fedgauge.simulations.cli import main as cli
from fedgauge.simulations.deploy import supervisor
from fedgauge.simulations.deploy.folder import DEMO, Deployment, health
from fedgauge.simulations.deploy.lifecycle import AbsenceReporter, _nobody, _start_all, _why, down, status
from fedgauge.simulations.deploy.pki import write_authority, write_node_key
from fedgauge.simulations.deploy.services import Service
from fedgauge.simulations.deploy.supervisor import LocalDeployment
from fedgauge.simulations.live.progress import RunProgress, participation
from fedgauge.simulations.live.view import View
from fedgauge.simulations.run import in_memory, processes
from fedgauge.simulations.run.launch import TrainingFailed
from fedgauge.simulations.run.simulate import Interrupt, create_run

linux = pytest.mark.skipif(sys.platform != "linux", reason="finds children by /proc: Linux")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A deployment of three clients; not to be changed."""
    return Deployment.create(tmp_path_factory.mktemp("here") / "federation", 3, ["fed.example", "192.0.2.7"])


@pytest.fixture
def fresh(made: Deployment, tmp_path: Path) -> Deployment:
    """A copy of it."""
    shutil.copytree(made.folder, tmp_path / "federation")
    return Deployment.open(tmp_path / "federation")


# ------------------------------------------------------------------------------------------------------------ identity


def handshake(server: Path, trusted: Path, name: str) -> None:
    """TLS between the server's files and a client that trusts one authority, by OpenSSL, in memory."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(server / "server.crt", server / "server.key")
    asking = ssl.create_default_context(cafile=trusted / "ca.crt")
    up, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        asking.wrap_bio(back, up, server_hostname=name),
        serving.wrap_bio(up, back, server_side=True),
    ]
    left = list(ends)
    for _ in range(10):
        for end in list(left):
            try:
                end.do_handshake()
                left.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert not left


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "superlink", "fed.example", "192.0.2.7"])
def test_the_server_is_believed_under_each_of_its_names(made: Deployment, name: str) -> None:
    handshake(made.folder / "tls", made.folder / "tls", name)


def test_the_server_is_not_believed_under_another_name(made: Deployment) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="elsewhere.example"):
        handshake(made.folder / "tls", made.folder / "tls", "elsewhere.example")


def test_who_trusts_another_authority_of_the_same_name_does_not_believe_the_server(
    made: Deployment, tmp_path: Path
) -> None:
    write_authority(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made.folder / "tls", tmp_path, "localhost")


def test_a_certificate_that_has_run_out_is_not_believed(tmp_path: Path) -> None:
    write_authority(tmp_path, days=-0)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(tmp_path, tmp_path, "localhost")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_keys_are_what_ssh_keygen_writes(tmp_path: Path) -> None:
    write_node_key(tmp_path / "ours")
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", tmp_path / "theirs"], check=True)
    derived = subprocess.run(
        ["ssh-keygen", "-y", "-f", tmp_path / "ours"], capture_output=True, text=True, check=True
    ).stdout
    assert derived.split()[:2] == (tmp_path / "ours.pub").read_text().split()[:2]
    for name in ("ours", "theirs"):
        private, public = (tmp_path / name).read_bytes(), (tmp_path / f"{name}.pub").read_bytes()
        key = load_ssh_private_key(private, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp384r1"
        assert private.splitlines()[0] == b"-----BEGIN OPENSSH PRIVATE KEY-----"
        assert public.split()[0] == b"ecdsa-sha2-nistp384"
        shown = load_ssh_public_key(public)
        assert isinstance(shown, ec.EllipticCurvePublicKey)
        assert shown.public_numbers() == key.public_key().public_numbers()


# ---------------------------------------------------------------------------------------------------------- the folder


def test_the_folder_and_its_secrets_are_their_owners_alone(made: Deployment) -> None:
    open_to_all = {".crt", ".pub", ".toml", ".yaml"}
    for path in [made.folder, *made.folder.rglob("*")]:
        mode = path.stat().st_mode & 0o777
        if path.is_dir():
            assert mode == 0o700, path
        elif path.suffix not in open_to_all or path.name == "client.toml":
            assert mode == 0o600, path
    names = {p.relative_to(made.folder).as_posix() for p in made.folder.rglob("*") if p.is_file()}
    wanted = {"scenario.toml", ".env", "compose.override.yaml", "tls/ca.crt", "tls/server.key", "secrets/superexec"}
    wanted |= {f"keys/client-{k}" for k in range(3)} | {f"clients/{k}/client.toml" for k in range(3)}
    assert wanted <= names
    assert "tls/ca.key" not in names, "who has it could be the SuperLink to every client"


def test_what_the_servers_containers_see_of_the_keys_is_public(made: Deployment) -> None:
    shown = {p.name: p.read_bytes() for p in (made.folder / "public").iterdir()}
    assert shown == {f"client-{k}.pub": made.public_key(k).read_bytes() for k in range(3)}


def test_no_two_keys_and_no_two_secrets_are_equal(made: Deployment, fresh: Deployment, tmp_path: Path) -> None:
    other = Deployment.create(tmp_path / "other", 3)
    secret = [p.read_bytes() for d in (made, other) for p in d.folder.rglob("*")
              if p.is_file() and p.parent.name in ("keys", "secrets", "tls")]  # fmt: skip
    assert len(secret) == 2 * (6 + 3 + 3) and len(set(secret)) == len(secret)


def test_each_owners_file_is_one_and_says_what_the_scenario_says(made: Deployment) -> None:
    protocol = made.scenario().protocol
    for client in range(3):
        owner = OwnerConfig.load(made.folder / "clients" / str(client) / "client.toml")
        assert owner.client == client
        assert [dict(link) for link in owner.chain] == [dict(link) for link in protocol.chain]
        assert {**owner.data, **owner.split, "batch_size": owner.batch_size} == dict(protocol.data)
        assert owner.grading.mode == "off"


def test_grading_and_sampling_are_as_was_asked_for(tmp_path: Path) -> None:
    made = Deployment.create(tmp_path / "federation", 1, grading="scores", sampling="agreed")
    text = (made.folder / "clients" / "0" / "client.toml").read_text()
    owner = OwnerConfig.load(made.folder / "clients" / "0" / "client.toml")
    assert owner.grading.mode == "scores" and 'sampling = "agreed"' in text


@pytest.mark.parametrize("clients", [1, 5])
def test_the_number_of_clients_is_the_one_that_was_asked_for(tmp_path: Path, clients: int) -> None:
    made = Deployment.create(tmp_path / "federation", clients)
    assert made.clients == made.scenario().protocol.clients == clients
    (made.folder / "keys" / "client-9.pub").write_text("of nobody")
    with pytest.raises(SpecError, match=f"clients = {clients}, but there are keys of {clients + 1}"):
        made.scenario()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").write_text("mine")
    assert cli.main(["deploy", "init", str(tmp_path), "--clients", "2"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.main(["deploy", "init", str(tmp_path / "kept"), "--clients", "2"]) == 2
    assert "is a file" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--clients", "2", "--host", "no name at all"], "--host"),
        (["--clients", "2", "--scenario", "no-such.toml"], "there is no such file"),
    ],
)
def test_a_mistake_is_told_with_exit_status_two(
    tmp_path: Path, arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["deploy", "init", str(tmp_path / "federation"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "federation").exists(), "nothing is written before all is checked"


def test_what_only_a_simulation_can_do_is_refused(tmp_path: Path) -> None:
    scenario = tmp_path / "summed.toml"
    scenario.write_text(DEMO.read_text() + "\n[secure_sum]\ngroup = 2\n")
    with pytest.raises(SpecError, match="secure_sum"):
        Deployment.create(tmp_path / "federation", 2, scenario=scenario)
    assert not (tmp_path / "federation").exists(), "nothing is written before all is checked"


def test_a_folder_that_is_no_deployment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in (["up", str(tmp_path), "--local"], ["status", str(tmp_path)], ["down", str(tmp_path)]):
        assert cli.main(["deploy", *action]) == 2
        assert "is no deployment" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ its runs


def test_an_unfinished_run_is_the_next_one_and_a_complete_one_is_not(fresh: Deployment) -> None:
    first, resumed = fresh.begin("one")
    assert not resumed and fresh.begin("one") == (first, False), "what has not begun begins"
    with first.ledger() as ledger:
        assert ledger.meta()["mode"] == "deployment"
        for state in ("training", "failed", "interrupted"):
            ledger.set_meta(state=state)
            assert fresh.next_run() == "one" and fresh.begin("one") == (first, True), state
    first.model.touch()  # what the server leaves last of all, whatever was heard of its end
    assert fresh.next_run() != "one"
    with pytest.raises(SpecError, match="is complete"):
        fresh.begin("one")


def test_another_run_may_be_begun_although_the_last_is_unfinished(fresh: Deployment) -> None:
    names = []
    for _ in range(3):  # within one second, too
        names.append(fresh.begin(fresh.next_run(new=True))[0].name)
        assert fresh.next_run() == fresh.runs()[-1].name
    assert len(set(names)) == 3 and {run.name for run in fresh.runs()} == set(names)


def test_a_run_that_cannot_go_on_is_told_before_anything_is_started(
    fresh: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a disk that was full in round 1 leaves it: a round, and no checkpoint."""
    run, _ = fresh.begin("one")
    with run.ledger() as ledger:
        ledger.record_intake(1, [Participation(0, "accepted", "", 1, "digest")])
        ledger.set_meta(state="failed")
    began: list[str] = []

    def enter(self: LocalDeployment) -> LocalDeployment:
        began.append(self.addresses.run)
        raise TrainingFailed("enough for a test")

    monkeypatch.setattr(LocalDeployment, "__enter__", enter)
    assert cli.main(["deploy", "up", str(fresh.folder), "--local"]) == 2
    told = capsys.readouterr().err
    assert "has rounds up to 1 and no checkpoint" in told and "audit" in told
    assert told.strip().endswith(f"Begin another run with: fedgauge deploy up {fresh.folder} --local --new")
    assert began == []
    assert cli.main(["deploy", "up", str(fresh.folder), "--local", "--new", "--log", "quiet"]) == 1
    told = capsys.readouterr().err
    assert began == [fresh.runs()[-1].name] != ["one"]
    assert f"the training can go on: fedgauge deploy up {fresh.folder} --local" in told


OWN_NETS = """
from torch import nn
def small(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))
"""


@pytest.fixture
def unattacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for an attack service: none is started."""
    monkeypatch.setattr("fedgauge.server.strategy.client_grading.GRACE", 0.0)


@pytest.fixture
def foreign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Deployment]:
    """A deployment whose scenario names a model of the user's own, which no owner has allowed."""
    (tmp_path / "mynets.py").write_text(OWN_NETS)
    scenario = tmp_path / "own.toml"
    scenario.write_text(re.sub(r"use = .*mlp.*\nhidden.*", 'use = "mynets:small"', DEMO.read_text()))
    folder = tmp_path / "federation"
    assert cli.main(["deploy", "init", str(folder), "--clients", "3", "--scenario", str(scenario)]) == 2
    assert "--allow mynets" in capsys.readouterr().err
    assert (
        cli.main(["deploy", "init", str(folder), "--clients", "3", "--scenario", str(scenario), "--allow", "mynets"])
        == 0
    )
    told = capsys.readouterr().out
    before = cli._parser().parse_args(["deploy", "--allow", "one", "up", str(folder), "--local", "--allow", "two"])
    assert [*before.allow, *before.allow_too] == ["one", "two"], "before the action and after it"
    assert f'allow = ["mynets"] in {folder}/clients/*/client.toml, and mynets beside that file' in told
    yield Deployment.open(folder)
    sys.modules.pop("mynets", None)


def owners(deployment: Deployment) -> list[Path]:
    return [deployment.folder / "clients" / str(k) / "client.toml" for k in range(deployment.clients)]


def test_where_every_client_refuses_the_run_has_failed_and_says_why(foreign: Deployment) -> None:
    with allowing(["mynets"], [foreign.folder.parent]):
        run, _ = foreign.begin("one")
        with run.ledger() as ledger:
            view = Told(RunProgress(ledger, run.scenario()))
            lacking = AbsenceReporter(view)
            in_memory.train(run, owners(foreign))
            lacking.tell()
            lacking.tell()
            assert [words[:42] for words in view.said] == [
                f"fedgauge: round {r}: 0 of 3 clients; client 0" for r in (1, 2, 3)
            ]
            assert all("'mynets:small' is not allowed here" in words and "client 2: " in words for words in view.said)
            why = _nobody(ledger)
            assert why.startswith("no round got an update: 0 of 9 updates came in; client 0 missing in 3 rounds: ")
            ledger.set_meta(state="failed", empty=why)
            assert state_of(run, ledger) == "failed", "although all its rounds are over"
        with closing(Reading(run)) as reading, reading.now():
            assert f"The training failed: {why}." in [words for words, _ in notices(reading)]


@pytest.mark.usefixtures("unattacked")
def test_an_owner_who_lets_the_code_be_loaded_takes_part_and_the_others_are_told_of(foreign: Deployment) -> None:
    path = owners(foreign)[1]
    path.write_text(path.read_text().replace("allow = []", 'allow = ["mynets"]'))
    shutil.copy(foreign.folder.parent / "mynets.py", path.parent)
    with allowing(["mynets"], [foreign.folder.parent]):
        run, _ = foreign.begin("one")
        in_memory.train(run, owners(foreign))
        with run.ledger() as ledger:
            assert _nobody(ledger) == ""
            assert participation(ledger.observations()).startswith(
                "3 of 9 updates came in; client 0 missing in 3 rounds"
            )
            view = Told(RunProgress(ledger, run.scenario()))
            AbsenceReporter(view).tell()
            assert view.said == [], "of rounds before this start nothing is told again"


class Told(View):
    """A view that keeps what it is told to say."""

    def __init__(self, run_progress: RunProgress) -> None:
        super().__init__(run_progress)
        self.said: list[str] = []

    def say(self, words: str) -> None:
        self.said.append(words)


@pytest.mark.usefixtures("unattacked")
def test_a_client_that_is_away_has_a_row_that_says_so(made: Deployment, tmp_path: Path) -> None:
    """Two of three are there: the third is missing in each round, whoever was asked."""
    run = create_run(made.scenario(), tmp_path / "run", mode="deployment")

    class Without(in_memory.MemoryGrid):
        def get_node_ids(self) -> Iterable[int]:
            return [1, 3]

    grid = Without(run.scenario().protocol, owners(made))
    with in_memory.flower(), pytest.MonkeyPatch.context() as patched:
        patched.setattr("fedgauge.server.app.discover_nodes", lambda *_: {1: 0, 3: 2})  # which waits for the third
        federate(run, grid)
    with run.ledger() as ledger:
        seen = [(o["round"], o["client"], o["status"]) for o in ledger.observations()]
        assert seen == [(r, c, "missing" if c == 1 else "accepted") for r in (1, 2, 3) for c in range(3)]
        assert participation(ledger.observations()) == (
            f"6 of 9 updates came in; client 1 missing in 3 rounds: {CLIENT_ABSENT}"
        )


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".", "..", ".hidden", "/abs"])
def test_a_run_stays_in_the_deployments_folder(fresh: Deployment, name: str) -> None:
    with pytest.raises(SpecError, match="cannot be a run's name"):
        fresh.begin(name)
    assert fresh.runs() == []


def test_runs_come_in_the_order_in_which_they_began(fresh: Deployment) -> None:
    for name in ("b", "c", "a"):
        fresh.begin(name)
        time.sleep(0.02)
    assert [run.name for run in fresh.runs()] == ["b", "c", "a"]


# --------------------------------------------------------------------------------------------------- its processes here


@pytest.fixture
def local(fresh: Deployment, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalDeployment]:
    """A local start with small programs in the place of Flower's."""
    monkeypatch.setattr(supervisor, "PAUSE", 0.0)
    made = LocalDeployment(fresh, "a-run", with_ray=False)
    yield made
    made.close()


def program(local: LocalDeployment, name: str, code: str, restart: str = "unless-stopped") -> None:
    local.services[name] = Service((sys.executable, "-c", code), restart)  # type: ignore[arg-type]
    local.begin(name)


def wait_for(condition: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


SLEEP = "import time; time.sleep(120)"


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
def test_what_dies_again_and_again_is_told_with_the_end_of_its_log_and_ends_all_only_where_it_is_needed(
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
    assert told.count(f"it goes on without {name}") == 1 and "no such key" in told


def test_an_interrupt_while_services_start_ends_in_order(
    local: LocalDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = Interrupt()
    interrupt.asked = True
    monkeypatch.setattr(local, "listen", lambda: None)
    monkeypatch.setattr(local, "finish", lambda name: None)
    run, _ = local.deployment.begin("a-run")
    _start_all(local, run, interrupt)
    assert local.children == {}, "nothing more is started"


@linux
def test_a_superlink_that_died_is_named_and_not_who_died_of_it(local: LocalDeployment, tmp_path: Path) -> None:
    run = create_run(local.deployment.scenario(), tmp_path / "run", mode="deployment")
    program(local, "superlink", "import time; print('linked', flush=True); time.sleep(120)")
    program(local, "start", "raise SystemExit(1)", "no")
    local.children["start"].wait()
    with run.ledger() as ledger:
        assert _why(local, ledger, 1).startswith("the deployment failed: start: exit status 1")
        wait_for(lambda: "linked" in local.deployment.log("superlink").read_text())
        local.children["superlink"].kill()
        local.children["superlink"].wait()
        assert re.fullmatch(
            r"the SuperLink died, and .*\n--- the end of .*superlink.log:\nlinked", _why(local, ledger, 1)
        )
        wait_for(lambda: local.poll() or local.status("superlink") is None)
        assert _why(local, ledger, 1).startswith("the SuperLink died"), "it is up again, and the run is not"


@linux
def test_one_that_no_longer_answers_is_started_again(local: LocalDeployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MUTE", 0.0)
    program(local, "mute", SLEEP)
    program(local, "answering", SLEEP)
    with socket.create_server(("127.0.0.1", 0)) as door:
        for name, port in (("mute", processes.free_port()), ("answering", door.getsockname()[1])):
            local.services[name] = replace(local.services[name], answers=port)
        before = dict(local.children)
        wait_for(lambda: local.poll() or local.children["mute"] is not before["mute"])
    assert before["mute"].poll() is not None and local.children["answering"] is before["answering"]


@linux
@pytest.mark.parametrize(("mute", "ends"), [(0.0, True), (600.0, False)], ids=["old", "young"])
def test_the_health_check_ends_a_node_that_has_failed_and_stays(mute: float, ends: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as node:
        try:
            code = health(processes.free_port(), node.pid, mute)
            failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert failed.returncode == 1 and "Connection refused" in failed.stderr
            if ends:
                assert node.wait(10) == -signal.SIGTERM
            assert node.poll() is not None or not ends
        finally:
            node.kill()


def test_the_health_check_of_a_node_that_answers_passes() -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        code = health(server.server_port, os.getpid(), 0.0)
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@linux
def test_status_tells_who_lives_and_how_the_run_stands(fresh: Deployment, attacked_run: Run) -> None:
    assert status(fresh) == ({}, [])
    shutil.copytree(attacked_run.folder, fresh.folder / "runs" / "one")
    local = LocalDeployment(fresh, "one", with_ray=False)
    try:
        program(local, "living", SLEEP)
        program(local, "ended", "")
        local.children["ended"].wait()
        alive, lines = status(fresh)
    finally:
        local.close()
    assert alive == {"living": True, "ended": False}
    with attacked_run.ledger() as ledger:
        rows, done = len(list(ledger.scores())), ledger.progress().done
    assert lines[0] == "one: trained, round 2 of 2"
    assert lines[1].startswith(f"attacks: {done} done, 0 to come") and lines[1].endswith(f"{rows} score rows")
    assert status(fresh)[0] == {"living": False, "ended": False}


HOLD = """
import sys, time
from pathlib import Path
from fedgauge.simulations.deploy.folder import Deployment
with Deployment.open(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(120)
"""


@linux
def test_a_deployment_is_up_once_and_down_asks_whoever_holds_it(fresh: Deployment) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", HOLD, fresh.folder], stdout=subprocess.PIPE, text=True) as holder,
        LocalDeployment(fresh, "one", with_ray=False) as left,
    ):
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunBusy, match=f"process {holder.pid} holds its up"), fresh.lock():
            pass
        program(left, "stray", SLEEP)
        assert down(fresh) == [left.children["stray"].pid]
        assert holder.wait() == -signal.SIGTERM and left.children["stray"].wait() != 0
        assert down(fresh) == [], "nothing is left to end"


def test_down_ends_nobody_whom_it_does_not_know(fresh: Deployment) -> None:
    for mark in ("", "x", "../..", str(os.getpid())):
        (fresh.folder / "up.json").write_text(json.dumps({"mark": mark, "pids": {"me": os.getpid()}}))
        assert down(fresh) == []


# ------------------------------------------------------------------------------------------------------- the real thing


def by_example(ledger: Ledger) -> dict[tuple[object, ...], float]:
    return {(r["round"], r["client"], r["attack"], r["example"]): r["value"] for r in ledger.scores("psnr")}


@pytest.mark.slow
def test_a_deployment_trains_what_a_simulation_of_its_seed_trains(tmp_path: Path) -> None:
    """TLS, node authentication, three clients with files of their own, a Ray cluster: the same updates, bit for bit."""
    folder = tmp_path / "federation"
    assert (
        cli.main(["deploy", "init", str(folder), "--clients", "3", "--sampling", "agreed", "--grading", "scores"]) == 0
    )
    deployment = Deployment.open(folder)
    command = [sys.executable, "-m", "fedgauge.simulations.cli.main", "deploy", "up", str(folder), "--local"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert "the services are being ended" in done.stderr and " of 3 clients" not in done.stderr, "all took part"
    assert "graded by the clients, to 0.5 dB" in done.stdout and "labels are graded by no client" in done.stdout
    run = Run.open(Path(done.stdout.strip().splitlines()[-1]))
    assert run.folder == deployment.runs()[0].folder

    scenario = deployment.scenario()
    simulated = create_run(scenario, tmp_path / "simulated")
    in_memory.train(simulated)
    with run.ledger() as ours, simulated.ledger() as theirs:
        found, expected = ([tuple(o) for o in ledger.observations()] for ledger in (ours, theirs))
        assert found == expected and len(found) == 9, "round, client, what became of it, examples, digest"
        accuracies = [[(r["round"], r["accuracy"], r["loss"]) for r in ledger.rounds()] for ledger in (ours, theirs)]
        assert accuracies[0] == accuracies[1]
        serve(simulated, LocalExecutor())
        told, truth = (by_example(ledger) for ledger in (ours, theirs))
        assert told.keys() == truth.keys() and len(told) == 9 * 6, "two attacks, their wrong clients, and two baselines"
        # quantised to 0.5 dB by each client, and capped; packed differently, an attack's last digits differ
        assert max(abs(told[key] - min(truth[key], 60.0)) for key in told) <= 0.25 + 0.05
        progress = ours.progress()
        assert (progress.done, progress.failed, progress.queued + progress.leased) == (36, 0, 0)
        graded = [r["value"] for r in ours.scores("psnr") if r["attack"] == "analytic"]
        assert len(graded) == 9 and min(graded) >= 60, "the first layer's gradient holds the image exactly"
    mark = json.loads((folder / "up.json").read_text())["mark"]
    assert processes.marked(mark) == []
