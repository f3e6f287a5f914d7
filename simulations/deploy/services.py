"""The table of a deployment's processes but Ray's; docker-compose.yml and a local start run these commands."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedgauge.simulations.run.processes import free_port

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Addresses:
    """The addresses and paths in the commands of a deployment's processes; the defaults are those inside the containers.

    Args:
        folder: of the deployment.
        run: the name of its run.
        bind: the address that servers listen on.
        superlink: host and port under which the other processes reach it.
        ports: each SuperNode's port on its loopback address, for the client app that it starts.
    """

    folder: str = "/deployment"
    run: str = "${FEDGAUGE_RUN:-federation}"
    bind: str = "0.0.0.0"
    superlink: tuple[str, int] = ("superlink", 8000)
    dashboard: int = 8765
    ports: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def local(cls, folder: str, run: str, clients: int) -> "Addresses":
        """This machine's loopback address with free ports."""
        ports = {client: free_port() for client in range(clients)}
        return cls(folder, run, LOOPBACK, (LOOPBACK, free_port()), free_port(), ports)


def services(addresses: Addresses, clients: int) -> dict[str, tuple[str, ...]]:
    """The command of each service of a deployment; each comes after the services that it needs."""
    folder, runs, at = addresses.folder, f"{addresses.folder}/runs", link(addresses)
    secret = ("--superexec-auth-secret-file", f"{folder}/secrets/superexec")
    superlink = (  # its database is a file, so that it still knows the registered nodes after a restart
        *("flower-superlink", "--host", addresses.bind, "--port", str(addresses.superlink[1])),
        *("--ssl-ca-certfile", f"{folder}/tls/ca.crt", "--ssl-certfile", f"{folder}/tls/server.crt"),
        *("--ssl-keyfile", f"{folder}/tls/server.key", "--enable-supernode-auth", "--isolation", "process"),
        *(*secret, "--database", f"{folder}/link/superlink.db"),
    )
    serverapp = ("flower-superexec", "--runtime-api-address", at, "--root-certificates", f"{folder}/tls/ca.crt")
    place = ("--host", addresses.bind, "--port", str(addresses.dashboard))
    return {
        "superlink": superlink,
        "serverapp": (*serverapp, *secret),
        "register": ("fedgauge", "deploy", "register", folder, "--superlink", at),
        **{f"supernode-{k}": supernode(addresses, k) for k in range(clients)},
        "start": ("fedgauge", "deploy", "start", folder, "--superlink", at, "--name", addresses.run),
        "attack": ("fedgauge", "audit", f"{runs}/{addresses.run}", "--follow"),
        "dashboard": ("fedgauge", "watch", runs, *place, "--token-file", f"{folder}/secrets/dashboard"),
    }


def supernode(addresses: Addresses, client: int) -> tuple[str, ...]:
    """A client's SuperNode, authenticated by its key, with its owner's file."""
    return (
        "flower-supernode",
        *("--superlink", link(addresses), "--root-certificates", f"{addresses.folder}/tls/ca.crt"),
        *("--auth-supernode-private-key", f"{addresses.folder}/keys/client-{client}"),
        *("--host", LOOPBACK, "--port", str(addresses.ports.get(client, 9094))),
        *("--node-config", f'client="{addresses.folder}/clients/{client}/client.toml"'),
    )


def link(addresses: Addresses) -> str:
    """Host and port of the SuperLink."""
    return "{}:{}".format(*addresses.superlink)
