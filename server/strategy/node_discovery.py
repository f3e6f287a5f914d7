"""Asks each node which client it is: node ids are random, while shards belong to client numbers."""

import math
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

TIMES = 3  # how often a node of a deployment is asked which client it is
PATIENCE = 120.0  # seconds for the answers in a deployment: to answer, a client may have to start a process


def discover_nodes(grid: Grid, clients: int, patience: float | None = None) -> dict[int, int]:
    """The clients by their nodes.

    Args:
        patience: seconds. For a deployment, where one client must not stop the others: nodes that are not connected by then,
            or give a number that is not the federation's or that another node gives too, are left out. None: wait for every
            client.

    Raises:
        RuntimeError: no node is left; without patience: the nodes are not exactly the federation's clients.
    """
    deadline = math.inf if patience is None else time.monotonic() + patience
    answers: dict[int, int | None] = {}
    while True:
        nodes = list(grid.get_node_ids())
        if len(nodes) >= clients or time.monotonic() >= deadline:
            # a simulation's nodes always answer; on a busy machine it takes minutes
            wait = None if patience is None else PATIENCE
            answers |= _answers(grid, [n for n in nodes if n not in answers], clients, wait)
            # a SuperLink that was restarted calls the nodes of its last start connected, and answers for them with errors until
            # they come back: they are asked again
            if patience is None or answers.keys() >= set(nodes) or time.monotonic() >= deadline:
                break
        time.sleep(0.2)
    numbers = {node: number for node, number in answers.items() if number is not None}
    given, numbers = sorted(numbers.values()), _unique(numbers) if patience is not None else numbers
    if not numbers or (patience is None and given != list(range(clients))):
        raise RuntimeError(f"expected clients 0..{clients - 1} to introduce themselves, got {given}")
    return numbers


@dataclass
class LateJoiners:
    """Admits clients that connect to a deployment after it began, between its rounds.

    Args:
        known: clients by node; admitted ones are added.
    """

    grid: Grid
    clients: int
    known: dict[int, int]
    _asked: Counter[int] = field(default_factory=Counter)

    def admit(self) -> None:
        """Ask the unknown nodes for their client numbers; a number that is taken is not given again."""
        strangers = [n for n in self.grid.get_node_ids() if n not in self.known and self._asked[n] < TIMES]
        if not strangers:
            return
        self._asked.update(strangers)
        answers = _answers(self.grid, strangers, self.clients, PATIENCE)
        taken = set(self.known.values())
        self.known.update(_unique({node: n for node, n in answers.items() if n is not None and n not in taken}))


def _answers(grid: Grid, nodes: Collection[int], clients: int, wait: float | None) -> dict[int, int | None]:
    """By each node that answered, within some seconds if they are limited, the client number it gave; None: no valid one."""
    questions = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
    answers = grid.send_and_receive(questions, timeout=wait)
    return {m.metadata.src_node_id: _number(m, clients) for m in answers if not m.has_error()}


def _unique(numbers: dict[int, int]) -> dict[int, int]:
    claims = Counter(numbers.values())
    return {node: client for node, client in numbers.items() if claims[client] == 1}


def _number(answer: Message, clients: int) -> int | None:
    """Return the client number that a node reports; None if it is invalid."""
    number = answer.content.metric_records.get("who", MetricRecord()).get("client")
    return number if isinstance(number, int) and 0 <= number < clients else None
