"""Whether the truth that a tester hands in gives the updates on the tape: it grades nothing and chooses nothing."""

from collections.abc import Mapping
from itertools import groupby, zip_longest

import torch
from torch import nn

from fedgauge.attacks.base import Observation
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import LocalTraining
from fedgauge.client.rng import generator
from fedgauge.client.training import StochasticLayer
from fedgauge.client.transforms import BatchTransform, StatefulTransform, noise_free
from fedgauge.client.update import Batch, Update

Found = Mapping[tuple[int, int], Batch | None]  # the truth by (round, client)

MOST_UPDATES = 12  # checked, the first of each round before the second of any
MOST_OTHERS = 4  # other clients, and other rounds, that each is compared with
# where the order of the examples is the client's own: so many are tried, fewer if each has many steps
ORDERS, STEPS = 16, 64
SAME = 0.999  # cosine from which nothing can explain an update better
IN_ORDER, ANY_ORDER = 0.8, 0.5  # the least cosine of a truth that is right


def chosen(found: Found) -> list[tuple[int, int]]:
    """Which updates to check: some of every round."""
    there = sorted(key for key, batch in found.items() if batch is not None and len(batch.y))
    by_round = [list(keys) for _, keys in groupby(there, key=lambda key: key[0])]
    return [key for keys in zip_longest(*by_round) for key in keys if key is not None][:MOST_UPDATES]


def doubt(fed: Federation, seen: Observation, found: Found, fits: bool) -> str:
    """Why the truth of an observation's client seems to be another one; empty if it gives the update, or if that cannot be told.

    Args:
        found: the truth of all clients and rounds.
        fits: whether the update may come from the local training that the chain assumes.
    """
    own = found[seen.round, seen.client]
    if own is None or fed.protocol.secure_sum is not None or (cosine := _cosine(fed, seen, own)) >= SAME:
        return ""
    said = f"the truth of client {seen.client} does not give its update of round {seen.round} (cosine {cosine:.2f})"
    others = [(_cosine(fed, seen, batch), words) for words, batch in _others(seen, own, found)]
    better, words = max(others, default=(-1.0, ""))
    if 1 - better < (1 - cosine) / 2:
        return f"{said}: {words} do (cosine {better:.2f})"
    if fits and not _is_noisy(fed) and cosine < (ANY_ORDER if _draws_order(fed) else IN_ORDER):
        return f"{said}: is it another client's, another scale, another round, or is the local training not as [[chain]] says?"
    return ""


def _others(seen: Observation, own: Batch, found: Found) -> list[tuple[str, Batch]]:
    """The examples of other clients in the round, and of the client in other rounds."""
    there = {key: batch for key, batch in sorted(found.items(), key=lambda item: item[0]) if batch is not None}
    other = {key: batch for key, batch in there.items() if not _same(batch, own)}
    clients = [(f"those of client {c}", batch) for (r, c), batch in other.items() if r == seen.round]
    rounds = [(f"those of its round {r}", batch) for (r, c), batch in other.items() if c == seen.client]
    return clients[:MOST_OTHERS] + rounds[:MOST_OTHERS]


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


def _is_noisy(fed: Federation) -> bool:
    """Whether chance, or what a client keeps of earlier rounds, is in the update: then a truth that is right may be far off."""
    chance = (nn.modules.dropout._DropoutNd, StochasticLayer)
    if any(isinstance(m, chance) and m.training and getattr(m, "p", 1) for m in fed.model.modules()):
        return True
    if fed.chain.local.remembers:
        return True
    rest = [link for link in fed.chain.links if link is not fed.chain.local]
    return any(isinstance(link, StatefulTransform | BatchTransform) or noise_free(link) != link for link in rest)
