"""A deployment's folder: the server's scenario, certificates, a key and a file for each client's owner, and the runs."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from rich.console import Console

from fedgauge.client.components import SpecError
from fedgauge.server.pki import alternative_names, write_authority, write_new, write_node_key
from fedgauge.server.pool.ray_security import ray_access
from fedgauge.server.pool.service import attack_devices
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.scenario_check import try_first
from fedgauge.simulations.run.create import check_deployable, create_run

DEMO = Path(__file__).parents[1] / "deployment.toml"
VERSION = "0.1.0"  # of the image
FORMAT = 1  # of the folder; the image's label names the newest one that it reads
CONTAINER_USER = 10001  # to whom root hands over a deployment that it makes, as the containers do not run as root
IN_COMPOSE = 3  # clients in docker-compose.yml
MEMORY = "4g"  # of each container, unless FEDGAUGE_MEMORY sets another size
FIRST_RUN = "federation"  # the containers' name for their run, unless FEDGAUGE_RUN sets another
Grading = Literal["off", "scores"]
Sampling = Literal["secret", "agreed"]


@dataclass(frozen=True)
class Deployment:
    """One deployment's folder: its files and its runs."""

    folder: Path

    @classmethod
    def create(
        cls,
        folder: Path,
        clients: int,
        hosts: Sequence[str] = (),
        scenario: Path = DEMO,
        grading: Grading = "off",
        sampling: Sampling = "secret",
    ) -> "Deployment":
        """Write a deployment's folder, readable by its owner only.

        Args:
            hosts: names or addresses under which clients on other machines reach the server.
            grading, sampling: written into each client's file, where its owner may change them.

        Raises:
            SpecError: the folder is not empty, or the scenario is wrong.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SpecError(f"{folder} is a file or is not empty: name a new or empty folder")
        checked = Scenario.load(scenario, [f"clients={clients}"])
        check_deployable(checked)
        attack_devices(checked.audit, in_cluster=True)
        alternative_names(hosts)
        deployment = cls(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        for part in ("tls", "ray", "keys", "public", "secrets", "clients", "link", "runs"):
            (folder / part).mkdir(mode=0o700)
        (folder / "scenario.toml").write_text(checked.to_toml(), "utf-8")
        write_authority(folder / "tls", hosts)
        for name in ("superexec", "dashboard", "ray"):
            write_new(folder / "secrets" / name, secrets.token_hex(32).encode())
        for client in range(clients):
            write_node_key(folder / "keys" / f"client-{client}")
            # a copy for the server's containers, which must not see the private keys
            shutil.copyfile(deployment.public_key(client), folder / "public" / deployment.public_key(client).name)
            deployment._write_client(client, checked, grading, sampling)
        write_new(folder / "ray" / "env", _ray_settings(folder / "ray", hosts).encode())
        write_new(folder / ".env", _settings(folder, clients).encode())
        (folder / "compose.override.yaml").write_text(override(clients))
        if os.getuid() == 0:  # the containers do not run as root
            for path in (*folder.rglob("*"), folder):  # the folder last: then only its new owner can enter it
                os.chown(path, CONTAINER_USER, CONTAINER_USER, follow_symlinks=False)
        return deployment

    @classmethod
    def open(cls, folder: Path) -> "Deployment":
        """An existing deployment.

        Raises:
            SpecError: the folder does not hold one.
        """
        missing = [name for name in ("scenario.toml", "keys", "tls") if not (folder / name).exists()]
        if missing:
            lacks = " and ".join(missing)
            raise SpecError(f"{folder} is not a deployment (it lacks {lacks}): make one with fedgauge deploy init")
        return cls(folder)

    @property
    def clients(self) -> int:
        return len(list((self.folder / "keys").glob("client-*.pub")))

    def scenario(self) -> Scenario:
        scenario = Scenario.load(self.folder / "scenario.toml")
        if scenario.protocol.clients != self.clients:
            named = f"{self.folder}/scenario.toml: clients = {scenario.protocol.clients}"
            raise SpecError(f"{named}, but there are keys for {self.clients}")
        return scenario

    def public_key(self, client: int) -> Path:
        return self.folder / "keys" / f"client-{client}.pub"

    def begin(self, name: str) -> tuple[Run, bool]:
        """Return the run of this name, created if it does not exist, and whether it must be resumed or attacked further.

        Raises:
            SpecError: the run is complete, this cannot be a name, or a new one cannot be trained.
        """
        if not name or Path(name).name != name or name.startswith("."):
            raise SpecError(f"{name!r} cannot be a run's name")
        folder = self.folder / "runs" / name
        if not folder.exists():
            scenario = self.scenario()
            attack_devices(scenario.audit, in_cluster=True)
            try_first(scenario, Console(stderr=True), str(self.folder / "scenario.toml"))
            return create_run(scenario, folder, mode="deployment"), False
        run = Run.open(folder)
        with run.ledger(readonly=True) as ledger:
            if run.model.exists() and not ledger.progress().waiting:
                raise SpecError(f"{folder} is complete; give the next run another name (FEDGAUGE_RUN)")
            return run, bool(ledger.meta().get("state"))

    def _write_client(self, client: int, scenario: Scenario, grading: Grading, sampling: Sampling) -> None:
        folder = self.folder / "clients" / str(client)
        (folder / "state").mkdir(parents=True, mode=0o700)
        folder.chmod(0o700)
        tables: dict[str, Any] = {
            "client": client,
            "state": "state",
            "allow": [],
            "data": {**scenario.protocol.data, "whole": False, "sampling": sampling},
            "chain": list(scenario.protocol.chain),
            **({"canary": False} if client in scenario.protocol.canary_clients else {}),  # only if the owner agrees
            **({"loss": scenario.tables["loss"]} if "loss" in scenario.tables else {}),
            "grading": {"mode": grading, "precision": 0.5, "queries": 8},
            "guard": {"inspect": "refuse"},
            **({"secure_sum": dict(together.real)} if (together := scenario.protocol.secure_sum) else {}),
        }
        write_new(folder / "client.toml", (_OWNER + tomli_w.dumps(tables)).encode())


def _settings(folder: Path, clients: int) -> str:
    """The settings of docker-compose.yml; the folder's name is in the names of its containers."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-")
    settings = {
        "COMPOSE_PROJECT_NAME": "fedgauge" if name in ("", FIRST_RUN) else f"fedgauge-{name}",
        "COMPOSE_PROFILES": "cpu",
        "FEDGAUGE_VERSION": VERSION,
        "FEDGAUGE_FORMAT": FORMAT,
        "FEDGAUGE_UID": os.getuid() or CONTAINER_USER,
        "FEDGAUGE_GID": os.getgid() or CONTAINER_USER,
        "FEDGAUGE_RUN": FIRST_RUN,
        "FEDGAUGE_MEMORY": MEMORY,
        "FEDGAUGE_GPUS": 1,
        "FEDGAUGE_ELSEWHERE": "",  # services that compose.sh does not start
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def _ray_settings(folder: Path, hosts: Sequence[str]) -> str:
    """Write the token and certificates of a Ray cluster on several machines; return the settings of its containers."""
    access = ray_access(folder, hosts)
    del access["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]  # it keeps Ray on the loopback address
    return "".join(f"{key}={value}\n" for key, value in access.items()).replace(str(folder), "/ray")


def override(clients: int) -> str:
    """Adds clients to docker-compose.yml, or removes them, for this many clients; written as JSON, which is YAML too."""
    added: dict[str, Any] = {f"supernode-{k}": container(k) for k in range(IN_COMPOSE, clients)}
    added |= {f"supernode-{k}": {"scale": 0} for k in range(clients, IN_COMPOSE)}
    keys = {f"client-{k}": {"file": f"./keys/client-{k}"} for k in range(IN_COMPOSE, clients)}
    return "# written by fedgauge deploy init\n" + json.dumps({"services": added, "secrets": keys}, indent=2) + "\n"


def container(client: int) -> Mapping[str, Any]:
    """A SuperNode's service, like those of the first clients in docker-compose.yml."""
    return {
        **HARDENED,
        "command": [
            "flower-supernode",
            *("--superlink", "superlink:8000", "--root-certificates", "/deployment/tls/ca.crt"),
            *("--auth-supernode-private-key", f"/deployment/keys/client-{client}"),
            *("--host", "127.0.0.1", "--port", "9094"),
            *("--node-config", f'client="/deployment/clients/{client}/client.toml"'),
        ],
        "environment": {"WAITS_FOR": "the SuperLink, then its rounds"},
        "restart": "unless-stopped",
        "depends_on": {"register": {"condition": "service_completed_successfully"}},
        "networks": ["federation"],
        "volumes": ["./tls/ca.crt:/deployment/tls/ca.crt:ro", f"./clients/{client}:/deployment/clients/{client}"],
        "secrets": [{"source": f"client-{client}", "target": f"/deployment/keys/client-{client}"}],
        "healthcheck": {"test": ["CMD", "python", "-c", HEALTH], **_PATIENT},
    }


HARDENED: Mapping[str, Any] = {
    "image": "fedgauge:${FEDGAUGE_VERSION:-0.1.0}",
    "pull_policy": "never",
    "init": True,
    "user": "${FEDGAUGE_UID:-10001}:${FEDGAUGE_GID:-10001}",
    "read_only": True,
    "tmpfs": ["/tmp"],
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "mem_limit": f"${{FEDGAUGE_MEMORY:-{MEMORY}}}",
    "memswap_limit": f"${{FEDGAUGE_MEMORY:-{MEMORY}}}",
    "pids_limit": 2048,
    "logging": {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}},
}
_PATIENT = {"interval": "10s", "timeout": "5s", "retries": 6, "start_period": "60s"}
_OWNER = """\
# What this client's owner decides: the data that it trains on, what happens to an update before it leaves, and whether the
# server may learn how well its attacks did. No server can change it. Paths are relative to this file.
"""


HEALTH = """\
import urllib.request as u
u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:9094/health', timeout=3)
"""  # without the proxies that Docker passes to every container
