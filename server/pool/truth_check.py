"""Whether the truth that a tester hands in gives the updates on the tape: it grades nothing and chooses nothing."""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from fedgauge.attacks.base import Observation
from fedgauge.attacks.modality.registry import modality_of
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
SURE = 0.99  # cosine from which another brightness does
IN_ORDER, ANY_ORDER = 0.8, 0.5  # the least cosine of a truth that is right


def chosen(found: Found) -> list[tuple[int, int]]:
    """Which updates to check: some of every round."""
    there = sorted(key for key, batch in found.items() if batch is not None and len(batch.y))
    place, before = dict[tuple[int, int], int](), Counter[int]()
    for key in there:
        place[key] = before[key[0]]
        before[key[0]] += 1
    return sorted(there, key=lambda key: (place[key], key))[:MOST_UPDATES]


def doubt(fed: Federation, seen: Observation, found: Found, fits: bool) -> str:
    """Why the truth of an observation's client seems to be another one; empty if it gives the update, or if that cannot be told.

    Args:
        found: the truth of all clients and rounds.
        fits: whether the update may come from the local training that the chain assumes.
    """
    own = found[seen.round, seen.client]
    if own is None or fed.protocol.secure_sum is not None:
        return ""
    cosine = _cosine(fed, seen, own)
    said = f"the truth of client {seen.client} does not give its update of round {seen.round} (cosine {cosine:.2f})"
    if cosine >= SAME:
        return ""
    others = [(_cosine(fed, seen, batch), words, subtle) for words, batch, subtle in _others(fed, seen, own, found)]
    likely = [(cosine, words) for cosine, words, subtle in others if cosine >= SURE or not subtle]
    better, words = max(likely, key=lambda other: other[0], default=(-1.0, ""))
    if 1 - better < (1 - cosine) / 2:
        return f"{said}: {words} do (cosine {better:.2f})"
    if fits and not _is_noisy(fed) and cosine < (ANY_ORDER if _draws_order(fed) else IN_ORDER):
        return f"{said}: is it another client's, another scale, another round, or is the local training not as [[chain]] says?"
    return ""


def _others(fed: Federation, seen: Observation, own: Batch, found: Found) -> Iterator[tuple[str, Batch, bool]]:
    """Other examples that would show a mistake, and whether another local training may look like them."""
    for kind in ("client", "round"):
        named: list[tuple[str, Batch, bool]] = []
        for (round, client), batch in sorted(found.items(), key=lambda item: item[0]):
            here = round == seen.round if kind == "client" else client == seen.client
            if batch is None or not here or (round, client) == (seen.round, seen.client) or _same(batch, own):
                continue
            words = f"those of client {client}" if kind == "client" else f"those of its round {round}"
            named.append((words, batch, False))
        yield from named[:MOST_OTHERS]
    for mistake in modality_of(fed.shards.dataset).mistaken(own.x):
        yield mistake.words, Batch(mistake.x, own.y), mistake.subtle


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
