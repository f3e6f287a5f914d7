"""Check updates against their audit's assumptions: the local training of an app, and the truth that a tester hands in.

Neither check grades or chooses anything.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from statistics import fmean

import torch
from torch import nn

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.training_evidence import TrainingEvidence, training_evidence
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import StochasticLayer
from fedgauge.client.local_training import LocalTraining
from fedgauge.client.rng import generator
from fedgauge.client.transforms import BatchTransform, StatefulTransform, noise_free
from fedgauge.client.update import Batch
from fedgauge.server.store.tape import TapeError
from fedgauge.server.store.tape_source import TapeSource, UploadMismatch

MOST_CLIENTS = 3  # of a round
_RANK = (False, None, True)  # whether an update fits, the worst first
RECORDED = (
    "the updates were recorded before the server aggregated them, so noise that the server adds to their average does not protect "
    "them from this server"
)
NO_REPLAY = "not possible: the app's clients keep their data; they are taken to train as the chain says"


class TrainingCheck:
    """Compares updates before they are attacked, and writes the worst result into the ledger and on the attacks' cards.

    Compares the first attacked clients of each round, at most MOST_CLIENTS.
    """

    def __init__(self, source: TapeSource) -> None:
        self._source, self._ledger = source, source.ledger
        self._compared: set[tuple[int, int]] = set()  # (round, client)
        self._worst: TrainingEvidence | None = None
        if words := self._ledger.meta().get("training"):  # what an earlier service found
            self._worst = TrainingEvidence("undecided", self._ledger.training_fits, words)

    def compare(self, round: int, clients: Collection[int]) -> None:
        """Compare the updates of a round's clients that were not compared yet."""
        known = {client for compared, client in self._compared if compared == round}
        for client in sorted(set(clients) - known)[: MOST_CLIENTS - len(known)]:
            self._compared.add((round, client))
            found = self._evidence(round, client)
            if self._worst is None or _RANK.index(found.fits) < _RANK.index(self._worst.fits):
                which = f"client {client}, round {round}, the worst of at most {MOST_CLIENTS} clients of each attacked round"
                self._worst = replace(found, words=f"{found.words} ({which})")
                self._write()

    def begin(self, coming: bool) -> bool:
        """Compare the first update on the tape, before anything is attacked; False: there is none yet, and some may come."""
        taped = self._source.taped()
        if not taped and coming:
            return False
        if taped:
            round, client, _ = taped[0]
            self.compare(round, [client])
        self._write()  # also on the cards of attacks that were added since
        return True

    def _evidence(self, round: int, client: int) -> TrainingEvidence:
        digests = {(taped, sender): digest for taped, sender, digest in self._source.taped()}
        try:
            seen = self._source.observation(round, client, digests[round, client])
            return training_evidence(self._source.federation, seen)
        except (TapeError, UploadMismatch) as error:
            return TrainingEvidence("undecided", None, f"whether the update fits this is not known: {error}")

    def _write(self) -> None:
        whole = self._worst or TrainingEvidence("undecided", None, "")
        words = "; ".join(filter(None, (whole.words, RECORDED)))
        names = [a["name"] for a in self._ledger.attacks() if a["role"] != "baseline"]
        self._ledger.describe("training", dict.fromkeys(names, words))
        self._ledger.set_meta(
            replay="unknown",
            replay_detail="; ".join(filter(None, (NO_REPLAY, RECORDED, whole.words))),
            training=whole.words,
            training_fits=str(whole.fits),
        )


# ------------------------------------------------------------------------------------------------ a tester's truth

MOST_UPDATES = 12  # checked, of all rounds
ORDERS, STEPS = 16, 64
SAME = 0.999  # cosine from which nothing can explain an update better
IN_ORDER, ANY_ORDER = 0.8, 0.5  # the least cosine of a truth that is right
RIVALS, COMPARED = 7, 4  # batches of public examples with the truth's labels, and orders of each
BETTER = 2  # so many of them explain an update as well as a wrong truth


def doubt(fed: Federation, seen: Observation, own: Batch) -> str:
    """Return why a client's truth seems wrong; empty if it gives the update, or if that is unknown."""
    if unchecked(fed):
        return ""
    # the order of the examples is the client's own: so many are tried, fewer if each has many steps
    orders = max(2, min(ORDERS, STEPS // fed.chain.local.steps)) if _draws_order(fed) else 1
    cosines = _cosines(fed, seen, own, orders)
    cosine = max(cosines)
    if cosine >= SAME:
        return ""
    fits = cosine >= (ANY_ORDER if _draws_order(fed) else IN_ORDER)
    rivals = (fmean(_cosines(fed, seen, rival, min(COMPARED, orders))) for rival in _rivals(fed, own))
    if fits and sum(rival >= fmean(cosines) for rival in rivals) < BETTER:
        return ""
    turned = ': opposite, as of gradients: set [tape] replies = "gradients"' if cosine < -ANY_ORDER else ""
    return f"the truth of client {seen.client} does not give its update of round {seen.round} (cosine {cosine:.2f}{turned})"


def unchecked(fed: Federation) -> str:
    """Return why updates cannot be compared with a truth; empty if they can."""
    if fed.protocol.secure_sum is not None:
        return "the server sees only sums of clients"
    return "an update depends on chance or on earlier rounds" if _is_noisy(fed) else ""


def _rivals(fed: Federation, own: Batch) -> Iterator[Batch]:
    """Yield public batches, with the truth's labels as far as there are such examples."""
    public = fed.shards.auxiliary_batch()
    alike = torch.stack([(public.y == y).flatten(1).all(1) if y.dim() else public.y == y for y in own.y]).double()
    for draw in range(RIVALS if len(public.y) else 0):
        rows = torch.multinomial(alike + 1e-9, 1, generator=generator("truth rival", draw)).flatten()
        yield Batch(public.x[rows], public.y[rows])


def _cosines(fed: Federation, seen: Observation, batch: Batch, orders: int) -> list[float]:
    """Return the cosines in some orders in which the client may have taken its examples, up to one that can be no better."""
    found = list[float]()
    for draw in range(orders):
        fed.load_buffers(seen.buffers)
        guess = fed.update_fn()(seen.params, batch, generator("truth check", draw))
        fed.load_buffers(seen.buffers)
        a, b = (torch.cat([part[k].flatten().double() for k in seen.update]) for part in (guess, seen.update))
        sizes = float(a.norm() * b.norm())
        found.append(float(a @ b) / sizes if sizes else 0.0)
        if found[-1] >= SAME:
            break
    return found


def _draws_order(fed: Federation) -> bool:
    return isinstance(fed.chain.local, LocalTraining) and fed.chain.local.shuffle


def _is_noisy(fed: Federation) -> bool:
    """Check if the update depends on chance or on a client's earlier rounds: then a correct truth may be far off."""
    chance = (nn.modules.dropout._DropoutNd, StochasticLayer)
    if fed.chain.local.remembers or any(
        isinstance(m, chance) and m.training and getattr(m, "p", 1) for m in fed.model.modules()
    ):
        return True
    rest = [link for link in fed.chain.links if link is not fed.chain.local]
    return any(isinstance(link, StatefulTransform | BatchTransform) or noise_free(link) != link for link in rest)
