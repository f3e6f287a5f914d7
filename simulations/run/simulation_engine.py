"""A federation on Flower's simulation engine, in a process of its own.

It is started by `run_simulation` instead of `flwr run`. A SuperLink listens on a port without authentication, so any user of the
machine could run code with our rights.
"""

import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedgauge.client.app import app as client_app
from fedgauge.server.app import federate
from fedgauge.server.store.run import Run


class ConfiguredClient(ClientApp):
    """The client app with a run-config, which `run_simulation` leaves empty."""

    def __init__(self, config: Mapping[str, str]) -> None:
        super().__init__()
        self._config = dict(config)

    def __call__(self, message: Message, context: Context) -> Message:
        # a new context with the same state, as a context's run-config cannot be set
        own = Context(context.run_id, context.node_id, context.node_config, context.state, dict(self._config))
        return client_app(message, own)


def train(run: Run) -> None:
    scenario = run.scenario()
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        federate(run, grid, context.run_id)

    clients = scenario.protocol.clients
    run_simulation(
        server,
        ConfiguredClient({"protocol": scenario.protocol.to_json()}),
        clients,
        backend_config={
            "init_args": {"num_cpus": min(scenario.simulation.parallel_clients, clients), "log_to_driver": False},
            "client_resources": {"num_cpus": 1.0},
        },
    )


if __name__ == "__main__":
    # by its full name, as Ray would send a class of __main__ by value
    from fedgauge.simulations.run.simulation_engine import train as train_here

    try:
        train_here(Run.open(Path(sys.argv[1])))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # where Ray does not start, Flower's server thread waits for its nodes for ever
