"""A deployment in one process: each client by its owner's file."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from flwr.app import Context, RecordDict
from flwr.serverapp import Grid

from fedgauge.client.protocol import Protocol
from fedgauge.server.app import federate
from fedgauge.server.store.run import Run
from fedgauge.simulations.run.in_memory import MemoryGrid, flower


class OwnedGrid(MemoryGrid):
    """The clients of a deployment; run: Flower's number of the run."""

    def __init__(self, protocol: Protocol, owners: Sequence[Path], run: int = 1) -> None:
        super().__init__(protocol)
        for node, path in enumerate(owners, 1):
            config = {"protocol": protocol.to_json()}
            self._contexts[node] = Context(run, node, {"client": str(path)}, RecordDict(), config)


def train_owned(run: Run, owners: Sequence[Path], number: int = 1) -> None:
    with flower():
        federate(run, cast(Grid, OwnedGrid(run.scenario().protocol, owners, number)))
