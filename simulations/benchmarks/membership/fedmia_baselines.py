"""FedMIA's comparison at reduced size: its two attacks and six baselines under its six defenses, on CIFAR-100.

Zhu et al. (CVPR 2025): Blackbox-Loss, Grad-Cosine and Grad-Norm read one round, Loss-Series, Avg-Cosine and Grad-Diff several,
FedMIA-I and -II several rounds and the other clients' updates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedgauge.attacks.membership.scores import SCORES, Scoring
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.components import Table
from fedgauge.client.data.images import cifar100
from fedgauge.client.federation import Federation
from fedgauge.client.local_data import has_images
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.simulations.benchmarks.membership.roc import ScoredCandidates
from fedgauge.simulations.benchmarks.membership.tables import (
    Candidates,
    figure,
    numbers,
    pooled,
    rates,
    scoring,
)
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread
from fedgauge.simulations.run.honest_rounds import honest_rounds

CLIENTS, SHARD, PART = 10, 60, 30  # images that a client holds, and that it trains on in a round where data are sampled
NETWORK: Table = {"use": "convsmall"}
SLICE = 10
AUGMENTED: Table = {"use": "ats", "policy": [], "crop_and_flip": True}
SEEDS = (0,)
ROUNDS = (10, 20, 30)  # attacked; training ends with the last
SCORED, STRANGERS, PUBLIC = (
    30,
    250,
    100,
)  # images of each client's, test images, and public images for the likelihood ratio


def _epoch(images: int) -> Table:
    return {"use": "local_sgd", "rate": 0.1, "steps": images // SLICE, "batch_size": SLICE}


@dataclass(frozen=True)
class _Row:
    """A defense: the clients' chain, and the images that a client trains on in a round."""

    chain: tuple[Table, ...]
    images: int = SHARD


WHOLE = _epoch(SHARD)
ROWS: Mapping[str, _Row] = {
    "none": _Row((WHOLE,)),
    "perturb": _Row((WHOLE, {"use": "clip", "max_norm": 1.0}, {"use": "gaussian", "sigma": 0.002})),
    "sparse": _Row((WHOLE, {"use": "prune", "keep": 0.1})),
    "mixup": _Row(({"use": "mixup", "alpha": 1.0}, WHOLE)),
    "augmentation": _Row((AUGMENTED, WHOLE)),
    "sampling": _Row((_epoch(PART),), PART),
    "augmentation and sampling": _Row((AUGMENTED, _epoch(PART)), PART),
}
# what a method sums over the attacked rounds, and whether it takes the last of them alone
METHODS: Mapping[str, tuple[str, bool]] = {
    "Blackbox-Loss": ("loss after", True),
    "Grad-Cosine": ("cosine", True),
    "Grad-Norm": ("norm", True),
    "Loss-Series": ("loss after", False),
    "Avg-Cosine": ("cosine", False),
    "Grad-Diff": ("gradient_difference", False),
    "FedMIA-I": ("fedmia_loss", False),
    "FedMIA-II": ("fedmia", False),
    "likelihood_ratio": ("likelihood_ratio", False),
}


@dataclass(frozen=True, eq=False)
class _Scores:
    """Scores (T, K, N) of one row and seed in the attacked rounds, by measure.

    Args:
        accuracy: of the trained network on test images.
    """

    scores: Mapping[str, Tensor]
    candidates: Candidates
    accuracy: float


def fedmia_baselines(
    progress: Progress,
    rows: Sequence[str] = tuple(ROWS),
    seeds: Sequence[int] = SEEDS,
    rounds: Sequence[int] = ROUNDS,
) -> BenchmarkReport:
    """AUC and true positives at 1 % false positives of each method under each defense."""
    if not has_images("cifar100"):
        reason = "skipped: needs cifar100-train-*.npz and cifar100-test-*.npz in the local data folder (FEDGAUGE_DATA)"
        return BenchmarkReport((Figure("FedMIA's comparison", None, "AUC", note=reason),), {})
    figures: list[Figure] = []
    records: list[dict[str, object]] = []
    for i, name in enumerate(rows):
        some = []
        for seed in seeds:
            some.append(_measured(ROWS[name], seed, rounds))
            progress(i * len(seeds) + len(some), len(rows) * len(seeds))
        accuracy = sum(one.accuracy for one in some) / len(some)
        for method in METHODS:
            record, figure = _row(some, name, method)
            figures.append(figure)
            records.append({**record, "accuracy": round(accuracy, 4)})
    settings = dict(
        data=f"cifar100: {CLIENTS} clients of {SHARD} images (published: 10 clients of 5,000)",
        network="convsmall, an AlexNet in small: two convolutions, two linear layers (published: AlexNet, ResNet-18)",
        training=f"each client trains one epoch on its images in a round, in steps of {SLICE} at rate {WHOLE['rate']}",
        rounds=f"{max(rounds)} of training, of which {list(rounds)} are attacked (published: 300)",
        defenses={name: [dict(table) for table in row.chain] for name, row in ROWS.items()},
        sampled=f"{PART} of a client's images in each round; members are all that it holds",
        seeds=list(seeds), positives=f"{SCORED} images of each client's data", negatives=f"of {STRANGERS} test images those "
        "with a label that the client holds, as the others are told by their label alone",
        scores="as published, compared between labels as they are: a hundred classes leave too few public images of each",
        population=f"{PUBLIC} auxiliary images, which only the likelihood ratio reads",
        intervals="bootstrap over clients (seed x client)",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings, tuple(records))


def _measured(row: _Row, seed: int, rounds: Sequence[int]) -> _Scores:
    """One row and seed."""
    with one_thread():
        data = {"use": "cifar100", "batch_size": row.images, "auxiliary": len(cifar100().y) - CLIENTS * SHARD}
        fed = Federation(Protocol(seed, max(rounds), CLIENTS, data, NETWORK, row.chain))
        known, public = public_knowledge(fed), fed.shards.auxiliary_batch()
        # others are told by their label alone
        candidates = Candidates.of(fed, SCORED, STRANGERS, same_label=True)
        population = Batch(public.x[:PUBLIC], public.y[:PUBLIC])
        found: dict[str, list[Tensor]] = {}
        for now in honest_rounds(fed, max(rounds)):
            if now.round in rounds:
                for name, scores in _scores(scoring(known, now, candidates.images, population)).items():
                    found.setdefault(name, []).append(scores)
        each = {name: torch.stack(rows) for name, rows in found.items()}
        return _Scores(each, candidates, fed.evaluate(now.after)[0])


def _scores(scoring: Scoring) -> dict[str, Tensor]:
    """(K, N) of one round, by measure; FedMIA adds up probabilities."""
    names = ("cosine", "gradient_difference", "fedmia", "fedmia_loss", "likelihood_ratio")
    found = {name: SCORES[name](scoring) for name in names}
    for name in ("fedmia", "fedmia_loss"):
        found[name] = torch.special.ndtr(found[name])
    found["loss after"] = SCORES["loss_change"](scoring) - scoring.candidates.losses
    found["norm"] = (-scoring.candidates.norms).expand(len(scoring.wave), -1)
    return found


def _row(tables: Sequence[_Scores], name: str, method: str) -> tuple[dict[str, object], Figure]:
    measure, last = METHODS[method]

    def told(others: bool = False) -> ScoredCandidates:
        scores = [one.scores[measure][-1] if last else one.scores[measure].sum(0) for one in tables]
        return pooled(
            part for one, each in zip(tables, scores, strict=True) for part in one.candidates.told(each, others)
        )

    rng = partial(generator, "FedMIA's comparison", name, method)
    record, auc, hits = rates(told(), rng)
    against = {"auc_against_other_clients": numbers(told(others=True).auc(rng("others")))}
    shown = figure(f"FedMIA's comparison, {name}: {method}", record, auc, hits)
    return {"row": name, "score": method, **record, **against}, shown
