"""Whether the truth that a tester hands in gives the updates on the tape: it grades nothing and chooses nothing."""

from collections.abc import Iterator, Mapping

import torch

from fedgauge.attacks.base import Observation
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import LocalTraining
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Update

Found = Mapping[tuple[int, int], Batch | None]  # the truth by (round, client)

MOST_UPDATES = 12  # checked
MOST_OTHERS = 4  # other clients, and other rounds, that each is compared with
# where the order of the examples is the client's own: so many are tried, fewer if each has many steps
ORDERS, STEPS = 16, 64
SAME = 0.999  # cosine from which nothing can explain an update better


def chosen(found: Found) -> list[tuple[int, int]]:
    """Which updates to check: some clients' of every round."""
    there = (key for key, batch in found.items() if batch is not None and len(batch.y))
    return sorted(there, key=lambda key: key[::-1])[:MOST_UPDATES]


def doubt(fed: Federation, seen: Observation, found: Found) -> str:
    """Report that another client's or round's truth gives an observation's update better than its own; empty if none does.

    Args:
        found: the truth of all clients and rounds.
    """
    own = found[seen.round, seen.client]
    if own is None or fed.protocol.secure_sum is not None or (cosine := _cosine(fed, seen, own)) >= SAME:
        return ""
    others = [(_cosine(fed, seen, batch), words) for words, batch in _others(seen, own, found)]
    better, words = max(others, default=(-1.0, ""))
    if 1 - better >= (1 - cosine) / 2:
        return ""
    where = f"the truth of client {seen.client} does not give its update of round {seen.round} (cosine {cosine:.2f})"
    return f"{where}: {words} do (cosine {better:.2f})"


def _others(seen: Observation, own: Batch, found: Found) -> Iterator[tuple[str, Batch]]:
    """Examples of other clients in the round, and of the client in other rounds."""
    other = {k: b for k, b in sorted(found.items(), key=lambda item: item[0]) if b is not None and not _same(b, own)}
    clients = [(f"those of client {client}", b) for (round, client), b in other.items() if round == seen.round]
    rounds = [(f"those of its round {round}", b) for (round, client), b in other.items() if client == seen.client]
    yield from clients[:MOST_OTHERS]
    yield from rounds[:MOST_OTHERS]


def _same(one: Batch, other: Batch) -> bool:
    return torch.equal(one.x, other.x) and torch.equal(one.y, other.y)


def _cosine(fed: Federation, seen: Observation, batch: Batch) -> float:
    """The best cosine over the orders in which the client may have taken its examples."""
    best, orders = -1.0, max(2, min(ORDERS, STEPS // fed.chain.local.steps)) if _draws_order(fed) else 1
    for draw in range(orders):
        best = max(best, _of(_trained(fed, seen, batch, draw), seen.update))
        if best >= SAME:
            break
    return best


def _trained(fed: Federation, seen: Observation, batch: Batch, draw: int) -> Update:
    fed.load_buffers(seen.buffers)
    with torch.random.fork_rng(devices=[]):  # dropout draws from torch's own generator
        torch.manual_seed(draw)
        try:
            return fed.update_fn()(seen.params, batch, generator("truth check", draw))
        finally:
            fed.load_buffers(seen.buffers)


def _of(guess: Update, seen: Update) -> float:
    a, b = (torch.cat([part[k].flatten().double() for k in seen]) for part in (guess, seen))
    sizes = float(a.norm() * b.norm())
    return float(a @ b) / sizes if sizes else 0.0


def _draws_order(fed: Federation) -> bool:
    return isinstance(fed.chain.local, LocalTraining) and fed.chain.local.shuffle
