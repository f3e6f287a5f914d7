"""Which client each node is, as it says itself: node ids are random, shards are not."""

import math
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

TIMES = 3  # that a node of a deployment is asked which client it is
PATIENCE = 120.0  # seconds for the answers: each may cost a client the start of a process


def discover_nodes(grid: Grid, clients: int, patience: float | None = None) -> dict[int, int]:
    """The clients by their nodes.

    Args:
        patience: seconds. Of a deployment, where one client must not stop the others: who is not there by then, says no number
            of the federation's, or the same as another, is left out. None: waits until every client is there.

    Raises:
        RuntimeError: nobody is left, or without patience: they are not exactly the federation's.
    """
    deadline = math.inf if patience is None else time.monotonic() + patience
    while len(nodes := list(grid.get_node_ids())) < clients and time.monotonic() < deadline:
        time.sleep(0.2)
    found = _introduced(grid, nodes, clients)
    if patience is not None:
        if not (found := _alone(found)):
            raise RuntimeError(f"of {clients} clients none introduced itself within {patience:g} s")
        return found
    if sorted(found.values()) != list(range(clients)):
        raise RuntimeError(f"expected clients 0..{clients - 1} to introduce themselves, got {sorted(found.values())}")
    return found


@dataclass
class LateJoiners:
    """Lets in, between the rounds of a deployment, whoever was not there at its census.

    Args:
        known: clients by node; those that are let in are added.
    """

    grid: Grid
    clients: int
    known: dict[int, int]
    _asked: Counter[int] = field(default_factory=Counter)

    def admit(self) -> None:
        """Ask the nodes that nobody knows; a number that is taken is nobody else's."""
        strangers = [n for n in self.grid.get_node_ids() if n not in self.known and self._asked[n] < TIMES]
        if not strangers:
            return
        self._asked.update(strangers)
        found = _alone(_introduced(self.grid, strangers, self.clients))
        taken = set(self.known.values())
        self.known.update({node: client for node, client in found.items() if client not in taken})


def _introduced(grid: Grid, nodes: Collection[int], clients: int) -> dict[int, int]:
    """Who answered with a client's number."""
    questions = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
    answers = grid.send_and_receive(questions, timeout=PATIENCE)
    return {m.metadata.src_node_id: number for m in answers if (number := _number(m, clients)) is not None}


def _alone(found: dict[int, int]) -> dict[int, int]:
    """Those whose number no other says."""
    claims = Counter(found.values())
    return {node: client for node, client in found.items() if claims[client] == 1}


def _number(answer: Message, clients: int) -> int | None:
    """Which client a node says it is; None where it says nothing of the kind."""
    if answer.has_error():
        return None
    told = answer.content.metric_records.get("who", MetricRecord()).get("client")
    return told if isinstance(told, int) and 0 <= told < clients else None
