"""compose.sh refuses what would stop a deployment halfway, before anything is started, and names the remedy."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fedgauge.simulations.deploy.folder import FORMAT, Deployment
from tests.waiting import free_port

ROOT = Path(__file__).resolve().parents[3]
# an engine that answers what a test lets it answer; the real one is tried by tests/load/containers.sh
ENGINE = """\
#!/bin/sh
echo "$*" >> "$ASKED"
case "$1 $2" in
  "version "*) exit "${ENGINE_STATUS:-0}" ;;
  "compose version") [ -n "$COMPOSE" ] && echo "$COMPOSE" ;;
  "image inspect") [ -n "$FORMAT" ] && echo "${FORMAT#none}" ;;
esac
"""


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Deployment.create(tmp_path_factory.mktemp("created") / "federation", 2).folder


@pytest.fixture
def folder(tmp_path: Path, created: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(ENGINE)
    (tmp_path / "bin" / "docker").chmod(0o755)
    folder = Path(shutil.copytree(created, tmp_path / "federation"))
    with (folder / ".env").open("a") as settings:
        settings.write(f"FEDGAUGE_UID={os.getuid()}\nFEDGAUGE_PORT={free_port()}\nFEDGAUGE_VIEW_PORT={free_port()}\n")
    return folder


def call(folder: Path, *words: str, **engine: str) -> tuple[int, str, list[str]]:
    """Return the script's status, its message, and what it asked the engine."""
    base = folder.parent
    asked = base / "asked"
    answers = {"COMPOSE": "2.26.1", "FORMAT": str(FORMAT), "ASKED": str(asked), **engine}
    env = {**os.environ, **answers, "PATH": f"{base}/bin:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / "compose.sh", folder, *words], env=env, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stderr, asked.read_text().splitlines() if asked.exists() else []


def started(asked: list[str]) -> list[str]:
    return [line for line in asked if line.startswith("compose") and re.search(r" up( |$)", line)]


def set_in(folder: Path, key: str, value: object) -> None:
    settings = (folder / ".env").read_text()
    (folder / ".env").write_text(re.sub(rf"(?m)^{key}=.*$", f"{key}={value}", settings))


def test_it_starts_a_folder_in_which_nothing_is_wrong(folder: Path) -> None:
    status, said, asked = call(folder, "up", "--detach")
    assert (status, said) == (0, "") and started(asked)[0].endswith("compose.override.yaml up --detach")


def test_it_passes_every_other_command_on_unchecked(folder: Path) -> None:
    status, _, asked = call(folder, "down", COMPOSE="1.29.2")
    assert status == 0 and len(asked) == 1 and asked[0].endswith(" down")


def test_services_elsewhere_are_not_started_and_their_keys_not_needed(folder: Path) -> None:
    set_in(folder, "FEDGAUGE_ELSEWHERE", '"supernode-1 attack"')
    (folder / "keys" / "client-1").unlink()
    status, said, asked = call(folder, "up", "--detach")
    assert (status, said) == (0, "")
    assert set(re.findall(r"--scale (\S+)", started(asked)[0])) == {"supernode-1=0", "attack=0"}


@pytest.mark.parametrize(
    ("engine", "remedy"),
    [
        ({"ENGINE_STATUS": "1"}, "start it"),
        ({"COMPOSE": "1.29.2"}, "docker-compose-v2"),
        ({"COMPOSE": ""}, "docker-compose-v2"),
        ({"FORMAT": ""}, "docker build -t fedgauge:0.1.0"),
        ({"FORMAT": "none"}, "docker build -t fedgauge:0.1.0"),  # an image that has no label
        ({"FORMAT": str(FORMAT - 1)}, "docker build -t fedgauge:0.1.0"),
    ],
    ids=["no engine", "compose 1", "no compose", "no image", "image without format", "old image"],
)
def test_it_refuses_an_unsuitable_engine_or_image(folder: Path, engine: dict[str, str], remedy: str) -> None:
    status, said, asked = call(folder, "up", **engine)
    assert status == 2 and remedy in said and not started(asked)


def _no_secret(folder: Path) -> None:
    (folder / "secrets" / "ray").unlink()


def _no_key(folder: Path) -> None:
    (folder / "keys" / "client-1").unlink()


def _other_user(folder: Path) -> None:
    set_in(folder, "FEDGAUGE_UID", 54321)


def _no_deployment(folder: Path) -> None:
    (folder / "scenario.toml").unlink()


@pytest.mark.parametrize(
    ("damage", "remedy"),
    [
        (_no_secret, "restore it"),
        (_no_key, "FEDGAUGE_ELSEWHERE"),
        (_other_user, "chown -R 54321"),
        (_no_deployment, "fedgauge deploy init"),
    ],
)
def test_it_refuses_a_damaged_folder(folder: Path, damage: Callable[[Path], None], remedy: str) -> None:
    damage(folder)
    status, said, asked = call(folder, "up")
    assert status == 2 and remedy in said and not started(asked)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_it_refuses_a_port_that_is_in_use(folder: Path, address: str) -> None:
    with socket.socket() as other:
        other.bind((address, 0))
        other.listen()
        port = other.getsockname()[1]
        set_in(folder, "FEDGAUGE_VIEW_PORT", port)
        status, said, asked = call(folder, "up")
    assert status == 2 and f"port {port}" in said and "FEDGAUGE_VIEW_PORT" in said and not started(asked)


def test_the_image_names_the_newest_format_that_it_reads() -> None:
    assert f"LABEL fedgauge.format={FORMAT}\n" in (ROOT / "Dockerfile").read_text()


def test_the_containers_script_runs_every_command_of_the_page() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / "deploy.md").read_text(), re.MULTILINE | re.DOTALL)
    commands = set("".join(blocks).splitlines())
    script = (ROOT / "tests" / "load" / "containers.sh").read_text()
    named = {double or single for double, single in re.findall(r"""\bpage (?:"([^"]+)"|'([^']+)')""", script)}
    tried = [{name} if name in commands else {line for line in commands if name in line} for name in named]
    assert all(len(lines) == 1 for lines in tried), "each names one command"
    assert set().union(*tried) == commands
