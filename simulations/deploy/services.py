"""The table of a deployment's processes; docker-compose.yml starts these commands; a local start starts all but Ray's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedgauge.simulations.run.processes import free_port

Restart = Literal["no", "on-failure", "unless-stopped"]


@dataclass(frozen=True)
class Addresses:
    """The addresses and paths in the commands of a deployment's processes; the defaults are those inside the containers.

    Args:
        folder: of the deployment.
        run: the name of its run.
        bind: the address that servers listen on.
        superlink, ray, dashboard: host and port under which the other processes reach them.
        ports: each SuperNode's port on its loopback address, for the client app that it starts.
    """

    folder: str = "/deployment"
    run: str = "${FEDGAUGE_RUN:-federation}"
    bind: str = "0.0.0.0"
    superlink: tuple[str, int] = ("superlink", 8000)
    ray: tuple[str, int] = ("ray-head", 6379)
    dashboard: int = 8765
    ports: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def local(cls, folder: str, run: str, clients: int) -> "Addresses":
        """This machine's loopback address with free ports."""
        here = "127.0.0.1"
        ports = {client: free_port() for client in range(clients)}
        return cls(folder, run, here, (here, free_port()), (here, free_port()), free_port(), ports)

    def port(self, client: int) -> int:
        """The port of a client's SuperNode on its loopback address."""
        return self.ports.get(client, 9094)

    @property
    def dashboard_address(self) -> str:
        """The URL of the page on this machine."""
        return f"http://{self.bind}:{self.dashboard}/"


@dataclass(frozen=True)
class Service:
    """One process: its command, its environment, and whether it is restarted when it ends."""

    command: tuple[str, ...]
    restart: Restart = "unless-stopped"
    environment: Mapping[str, str] = field(default_factory=dict)


def services(addresses: Addresses, clients: int) -> dict[str, Service]:
    """Every service of a deployment by name; each comes after the services that it needs."""
    folder, link, ray = addresses.folder, _at(addresses.superlink), ray_access(addresses)
    register = ("fedgauge", "deploy", "register", folder, "--superlink", link)
    start = ("fedgauge", "deploy", "start", folder, "--superlink", link, "--name", addresses.run)
    attack = ("fedgauge", "audit", f"{folder}/runs/{addresses.run}", "--follow")
    return {
        "superlink": Service(superlink(addresses)),
        "serverapp": Service(serverapp(addresses)),
        "register": Service(register, "no"),
        **{f"supernode-{k}": Service(supernode(addresses, k)) for k in range(clients)},
        "ray-head": Service(ray_head(addresses), environment=ray),
        "ray-worker": Service(ray_worker(addresses), environment=ray),
        "start": Service(start, "no"),
        "attack": Service(attack, "on-failure", {"RAY_ADDRESS": _at(addresses.ray), **ray}),
        "dashboard": Service(dashboard(addresses)),
    }


def superlink(addresses: Addresses) -> tuple[str, ...]:
    """The SuperLink: TLS, node authentication, and a secret without which no process can run server apps.

    Its database is a file, so that it still knows the registered nodes after a restart.
    """
    folder = addresses.folder
    return (
        "flower-superlink",
        *("--host", addresses.bind, "--port", str(addresses.superlink[1])),
        *("--ssl-ca-certfile", f"{folder}/tls/ca.crt", "--ssl-certfile", f"{folder}/tls/server.crt"),
        *("--ssl-keyfile", f"{folder}/tls/server.key", "--enable-supernode-auth"),
        *("--isolation", "process", "--superexec-auth-secret-file", f"{folder}/secrets/superexec"),
        *("--database", f"{folder}/link/superlink.db"),
    )


def serverapp(addresses: Addresses) -> tuple[str, ...]:
    """The process that runs the curious ServerApp, separate from the SuperLink."""
    return (
        "flower-superexec",
        *("--runtime-api-address", _at(addresses.superlink), "--root-certificates", f"{addresses.folder}/tls/ca.crt"),
        *("--superexec-auth-secret-file", f"{addresses.folder}/secrets/superexec"),
    )


def supernode(addresses: Addresses, client: int) -> tuple[str, ...]:
    """A client's SuperNode, authenticated by its key, with its owner's file."""
    return (
        "flower-supernode",
        *("--superlink", _at(addresses.superlink), "--root-certificates", f"{addresses.folder}/tls/ca.crt"),
        *("--auth-supernode-private-key", f"{addresses.folder}/keys/client-{client}"),
        *("--host", "127.0.0.1", "--port", str(addresses.port(client))),
        *("--node-config", f'client="{addresses.folder}/clients/{client}/client.toml"'),
    )


def ray_head(addresses: Addresses) -> tuple[str, ...]:
    """The head of the attack workers' cluster; it runs no attacks itself.

    On one machine it and the worker see the same GPUs, which Ray would count twice.
    """
    none = ("--num-cpus", "0", "--num-gpus", "0")
    return ("ray", "start", "--head", "--port", str(addresses.ray[1]), *none, *_RAY, "--include-dashboard=false")


def ray_worker(addresses: Addresses, gpus: str = "") -> tuple[str, ...]:
    """A node of the attack workers' cluster with one core, and with this many GPUs; default: those that Ray finds."""
    has = ("--num-gpus", gpus) if gpus else ()
    return ("ray", "start", "--address", _at(addresses.ray), "--num-cpus", "1", *has, *_RAY)


def dashboard(addresses: Addresses) -> tuple[str, ...]:
    """The page over all runs of the deployment; visitors need the token."""
    token = f"{addresses.folder}/secrets/dashboard"
    where = ("--host", addresses.bind, "--port", str(addresses.dashboard), "--token-file", token)
    return ("fedgauge", "watch", f"{addresses.folder}/runs", *where)


def ray_access(addresses: Addresses) -> dict[str, str]:
    """Ray's token authentication: a process that joins the cluster can run any code in all others."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{addresses.folder}/secrets/ray"}


_RAY = ("--block", "--disable-usage-stats")


def _at(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
