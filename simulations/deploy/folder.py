"""A deployment is a folder: the server's scenario, certificates, a key and a file for each client's owner, and its runs."""

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

import tomli_w

from fedgauge.client.components import SpecError, package_of
from fedgauge.client.federation import DATASET, TRANSFORM
from fedgauge.client.models.build import MODEL
from fedgauge.client.models.losses import LOSS
from fedgauge.client.registry import OWN
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.deploy.pki import alternative_names, write_authority, write_node_key, write_secret
from fedgauge.simulations.deploy.services import Addresses, supernode
from fedgauge.simulations.run.simulate import check_deployable, create_run

DEMO = Path(__file__).parents[1] / "deployment.toml"
VERSION = "0.1.0"  # of the image
IN_COMPOSE = 3  # clients that docker-compose.yml has
CONTAINER_USER = 10001  # who the containers run as where the deployment was made by root
FIRST_RUN = "federation"  # what the containers call their run, unless FEDGAUGE_RUN says another name
Grading = Literal["off", "scores"]
Sampling = Literal["secret", "agreed"]


@dataclass(frozen=True)
class Deployment:
    """Paths and doors of one deployment's folder."""

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
        """Write a deployment's folder, for its owner only.

        Args:
            hosts: names or addresses under which clients on other machines reach the server.
            grading, sampling: what each client's file says; its owner may change it.

        Raises:
            SpecError: the folder holds something, or the scenario is none.
        """
        if folder.exists() and not folder.is_dir():
            raise SpecError(f"{folder} is a file: a deployment is a folder, which is made where there is none")
        if folder.exists() and any(folder.iterdir()):
            raise SpecError(f"{folder} is not empty: a deployment's keys must not replace another's")
        if any(c in str(folder.absolute()) for c in "\"'\\\n"):
            raise SpecError(f"{folder}: Flower cannot be told of a path with quotes or backslashes in it")
        checked = Scenario.load(scenario, [f"clients={clients}"])
        check_deployable(checked)
        try:
            alternative_names(hosts)
        except ValueError as error:
            raise SpecError(f"--host: {error}") from error
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        made = cls(folder)
        for part in ("tls", "keys", "public", "secrets", "clients", "link", "runs", "logs"):
            (folder / part).mkdir(mode=0o700)
        (folder / "scenario.toml").write_text(checked.to_toml())
        write_authority(folder / "tls", hosts)
        for name in ("superexec", "dashboard", "ray"):
            write_secret(folder / "secrets" / name, secrets.token_hex(32).encode())
        for client in range(clients):
            write_node_key(folder / "keys" / f"client-{client}")
            # apart, for the server's containers, which must not see the private ones
            shutil.copyfile(made.public_key(client), folder / "public" / made.public_key(client).name)
            made._write_client(client, checked, grading, sampling)
        write_secret(folder / ".env", made._settings(clients).encode())
        (folder / "compose.override.yaml").write_text(override(clients))
        if os.getuid() == 0:  # the containers do not run as root
            made._hand_over(CONTAINER_USER)
        return made

    @classmethod
    def open(cls, folder: Path) -> "Deployment":
        """An existing deployment; SpecError when the folder is none."""
        missing = [name for name in ("scenario.toml", "keys", "tls") if not (folder / name).exists()]
        if missing:
            raise SpecError(
                f"{folder} is no deployment (no {' and '.join(missing)} in it): make one with fedgauge deploy init"
            )
        return cls(folder)

    @property
    def clients(self) -> int:
        """How many there are."""
        return len(list((self.folder / "keys").glob("client-*.pub")))

    def scenario(self) -> Scenario:
        """The server's scenario."""
        scenario = Scenario.load(self.folder / "scenario.toml")
        if scenario.protocol.clients != self.clients:
            raise SpecError(
                f"{self.folder}/scenario.toml: clients = {scenario.protocol.clients}, but there are keys of {self.clients}"
            )
        return scenario

    def public_key(self, client: int) -> Path:
        """The file of a client's public key."""
        return self.folder / "keys" / f"client-{client}.pub"

    def log(self, service: str) -> Path:
        """Where a service of a local start tells what it does."""
        path = self.folder / "logs" / f"{service}.log"
        path.touch(mode=0o600)
        return path

    def runs(self) -> list[Run]:
        """Its runs, in the order in which they began."""
        found = [Run(path.parent) for path in (self.folder / "runs").glob("*/ledger.sqlite")]
        return sorted(found, key=lambda run: (run.folder / "scenario.toml").stat().st_mtime_ns)

    def next_run(self, new: bool = False) -> str:
        """The name of the run that is to be trained now: of the last one where it is unfinished; else, or if asked for, new."""
        runs = self.runs()
        if runs and not new and not runs[-1].model.exists():
            return runs[-1].name
        stem = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{FIRST_RUN}"
        taken = {run.name for run in runs}
        return next(name for n in count(1) if (name := stem if n == 1 else f"{stem}-{n}") not in taken)

    def begin(self, name: str) -> tuple[Run, bool]:
        """The run of this name, made where there is none, and whether it has to go on where it stopped.

        Raises:
            SpecError: it is complete, or the name is none.
        """
        if not name or Path(name).name != name or name.startswith("."):
            raise SpecError(f"{name!r} cannot be a run's name")
        folder = self.folder / "runs" / name
        if not folder.exists():
            return create_run(self.scenario(), folder, mode="deployment"), False
        run = Run.open(folder)
        if run.model.exists():
            raise SpecError(f"{folder} is complete; the next run needs another name (FEDGAUGE_RUN)")
        return run, state_of_training(run) != ""

    def foreign(self) -> list[str]:
        """Packages outside fedgauge's that the scenario names: each owner must have them, and let them be loaded."""
        protocol = self.scenario().protocol
        tables = (protocol.data, protocol.model, protocol.loss, *protocol.chain)
        kinds = (DATASET, MODEL, LOSS, *[TRANSFORM] * len(protocol.chain))
        packages = {package_of(table, kind) for table, kind in zip(tables, kinds, strict=True)}
        return sorted(packages - {OWN, ""})

    def lock(self) -> AbstractContextManager[None]:
        """Hold this deployment's local start alone; Busy names the holder."""
        return Run(self.folder).lock("up")  # the same lock as a run's

    def holder(self) -> int | None:
        """The living process that holds the local start."""
        return Run(self.folder).holder("up")

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
            **({"loss": scenario.tables["loss"]} if "loss" in scenario.tables else {}),
            "grading": {"mode": grading, "precision": 0.5, "queries": 8},
        }
        write_secret(folder / "client.toml", (_OWNER + tomli_w.dumps(tables)).encode())

    def _settings(self, clients: int) -> str:
        user = os.getuid() or CONTAINER_USER
        group = os.getgid() or CONTAINER_USER
        lines = {
            "FEDGAUGE_VERSION": VERSION,
            "FEDGAUGE_UID": user,
            "FEDGAUGE_GID": group,
            "FEDGAUGE_RUN": FIRST_RUN,
            "FEDGAUGE_CLIENTS": clients,
            "COMPOSE_PROFILES": "cpu",
        }
        return "".join(f"{key}={value}\n" for key, value in lines.items())

    def _hand_over(self, user: int) -> None:
        for path in [self.folder, *self.folder.rglob("*")]:
            os.chown(path, user, user)


def state_of_training(run: Run) -> str:
    """ "" before it began, then training, trained, failed or interrupted."""
    try:
        with run.ledger(readonly=True) as ledger:
            return ledger.meta().get("state", "")
    except LedgerError as error:
        raise SpecError(str(error)) from error


def override(clients: int) -> str:
    """What docker-compose.yml lacks, or has too much of, for this many clients; JSON is YAML, too."""
    added: dict[str, Any] = {f"supernode-{k}": container(k) for k in range(IN_COMPOSE, clients)}
    added |= {f"supernode-{k}": {"scale": 0} for k in range(clients, IN_COMPOSE)}
    keys = {f"client-{k}": {"file": f"./keys/client-{k}"} for k in range(IN_COMPOSE, clients)}
    return "# written by fedgauge deploy init\n" + json.dumps({"services": added, "secrets": keys}, indent=2) + "\n"


def container(client: int) -> Mapping[str, Any]:
    """A SuperNode's service as docker-compose.yml has those of its first clients."""
    return {
        **HARDENED,
        "command": list(supernode(Addresses(), client)),
        "restart": "unless-stopped",
        "depends_on": {"register": {"condition": "service_completed_successfully"}},
        "networks": ["federation"],
        "volumes": ["./tls/ca.crt:/deployment/tls/ca.crt:ro", f"./clients/{client}:/deployment/clients/{client}"],
        "secrets": [{"source": f"client-{client}", "target": f"/deployment/keys/client-{client}"}],
        "healthcheck": {"test": ["CMD", "python", "-c", health(Addresses().port(client))], **_PATIENT},
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
}
_PATIENT = {"interval": "10s", "timeout": "5s", "retries": 6, "start_period": "60s"}
_OWNER = """\
# What this client's owner decides: the data it trains on, what is done to an update before it leaves, and whether the
# server may be told how well its attacks did. Nothing that a server says changes it. Paths are relative to this file.
"""


def health(port: int, first: int = 1, mute: float = 60.0) -> str:
    """A health check in Python: whether a SuperNode answers; one that refuses to, long after its start, is ended.

    A connection that breaks at the wrong moment makes a SuperNode fail without its process ending, and Docker starts again
    only what has ended.

    Args:
        first: the container's first process.
    """
    return (
        "import os, time, urllib.error, urllib.request as u\n"
        "direct = u.build_opener(u.ProxyHandler({}))\n"  # Docker hands its own proxies to every container
        f"try: direct.open('http://127.0.0.1:{port}/health', timeout=3)\n"
        "except urllib.error.URLError as error:\n"
        f"    late = time.time() - os.stat('/proc/{first}').st_mtime > {mute:g}\n"
        f"    if late and isinstance(error.reason, ConnectionRefusedError): os.kill({first}, 15)\n"
        "    raise\n"
    )
