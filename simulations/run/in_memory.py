"""A federation in one process: Flower's own messages between the real server app and the real client app, no transport."""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedgauge.client.app import app as client_app
from fedgauge.client.components import SpecError, users_errors
from fedgauge.client.protocol import Protocol
from fedgauge.server.app import federate
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import Run


class MemoryGrid:
    """A grid that answers each message by calling `client/app.py` at once; node n is client n - 1."""

    def __init__(self, protocol: Protocol) -> None:
        self.clients = {client + 1: client for client in range(protocol.clients)}  # by node
        config = {"protocol": protocol.to_json()}
        self._contexts = {
            n: Context(1, n, {"partition-id": c}, RecordDict(), dict(config)) for n, c in self.clients.items()
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return [self._answer(m) for m in messages]

    def _answer(self, message: Message) -> Message:
        try:
            return client_app(message, self._contexts[message.metadata.dst_node_id])
        except Exception as error:  # as with Flower, a client that fails is an error reply, which the server records
            return Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)


def train(run: Run) -> None:
    """Train a run's federation in this process, with the same server app and client app that Flower starts."""
    with flower():
        federate(run, cast(Grid, MemoryGrid(run.scenario().protocol)))


@contextmanager
def flower() -> Iterator[None]:
    """Give Flower's messages an author, which they need outside a run, and silence its log of rounds."""
    before = TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id
    log = logging.getLogger("flwr")
    level = log.level
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = before


if __name__ == "__main__":
    try:
        with users_errors():
            train(Run.open(Path(sys.argv[1])))
    except (SpecError, LedgerError) as error:  # the log's last line, which the terminal repeats
        sys.exit(f"fedgauge: {error}")
