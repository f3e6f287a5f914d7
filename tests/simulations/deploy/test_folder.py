"""A deployment's folder holds what its parties need and no more, and its runs in order."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedgauge.client.components import SpecError
from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.simulations.cli import main as cli
from fedgauge.simulations.deploy.folder import DEMO, Deployment


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


def test_each_owners_file_is_one_and_says_what_the_scenario_says(made: Deployment) -> None:
    protocol = made.scenario().protocol
    for client in range(3):
        owner = OwnerConfig.load(made.folder / "clients" / str(client) / "client.toml")
        assert owner.client == client
        assert [dict(link) for link in owner.chain] == [dict(link) for link in protocol.chain]
        assert {**owner.data, **owner.split, "batch_size": owner.draw.batch_size} == dict(protocol.data)
        assert owner.grading.mode == "off"
        assert owner.guard is not None and owner.guard.inspect == "refuse"


def test_nobody_is_a_canary_unasked(tmp_path: Path) -> None:
    text = (
        DEMO.read_text()
        + '[[chain]]\nuse = "clip"\nmax_norm = 1.0\n[[chain]]\nuse = "gaussian"\nsigma = 1.0\n[canaries]\nclients = 2\n'
    )
    (tmp_path / "canaries.toml").write_text(text)
    made = Deployment.create(tmp_path / "federation", 3, scenario=tmp_path / "canaries.toml")
    files = [(made.folder / "clients" / str(client) / "client.toml").read_text() for client in range(3)]
    assert ["canary = false" in text for text in files] == [False, True, True]


@pytest.mark.parametrize("clients", [1, 5])
def test_the_number_of_clients_is_the_one_that_was_asked_for(tmp_path: Path, clients: int) -> None:
    made = Deployment.create(tmp_path / "federation", clients)
    assert made.clients == made.scenario().protocol.clients == clients
    (made.folder / "keys" / "client-9.pub").write_text("of nobody")
    with pytest.raises(SpecError):
        made.scenario()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    assert cli.main(["deploy", "init", str(tmp_path), "--clients", "2"]) == 2
    assert cli.main(["deploy", "init", str(tmp_path / "kept"), "--clients", "2"]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_root_hands_the_folder_over_to_the_containers_user(tmp_path: Path) -> None:
    made = Deployment.create(tmp_path / "federation", 1)
    assert {path.lstat().st_uid for path in (made.folder, *made.folder.rglob("*"))} == {10001}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--clients", "2", "--host", "no name at all"], "--host"),
        (["--clients", "2", "--scenario", "no-such.toml"], "no such file"),
    ],
)
def test_a_mistake_is_reported_with_exit_status_two(
    tmp_path: Path, arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["deploy", "init", str(tmp_path / "federation"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "federation").exists(), "nothing is written before all is checked"


def test_what_only_a_simulation_can_do_is_refused(tmp_path: Path) -> None:
    scenario = tmp_path / "summed.toml"
    scenario.write_text(DEMO.read_text() + "\n[secure_sum]\ngroup = 2\n")
    with pytest.raises(SpecError):
        Deployment.create(tmp_path / "federation", 2, scenario=scenario)
    assert not (tmp_path / "federation").exists(), "nothing is written before all is checked"


def test_a_folder_that_is_no_deployment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["deploy", "register", str(tmp_path), "--superlink", "x:1"]) == 2
    assert "not a deployment" in capsys.readouterr().err


def test_an_unfinished_run_is_continued_and_a_complete_one_is_not(fresh: Deployment) -> None:
    first, resumed = fresh.begin("one")
    assert not resumed and fresh.begin("one") == (first, False), "what has not begun begins"
    with first.ledger(readonly=True) as ledger:
        assert not ledger.foreign, "an attack service that starts before the server does not take it for a user's app"
    with first.ledger() as ledger:
        assert ledger.meta()["mode"] == "deployment"
        for state in ("training", "failed", "interrupted"):
            ledger.set_meta(state=state)
            assert fresh.begin("one") == (first, True), state
    first.model.touch()  # what the server leaves last of all, whatever was heard of its end
    with pytest.raises(SpecError):
        fresh.begin("one")


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".", "..", ".hidden", "/abs"])
def test_a_run_stays_in_the_deployments_folder(fresh: Deployment, name: str) -> None:
    with pytest.raises(SpecError):
        fresh.begin(name)
    assert list((fresh.folder / "runs").iterdir()) == []
