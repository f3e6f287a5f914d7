"""Whom a client's data holds, by defense and by score, after many rounds of training on all of it: FedMIA's table at reduced size.

Zhu et al. (CVPR 2025): the other clients' updates of a round are the null of a client's, and rounds add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedgauge.attacks.membership.scores import SCORES, against_null, null_and_population
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.components import Table
from fedgauge.client.data.images import cifar10
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, concatenate
from fedgauge.simulations.benchmarks.membership.roc import ScoredCandidates
from fedgauge.simulations.benchmarks.membership.tables import (
    RATE,
    Candidates,
    figure,
    in_processes,
    numbers,
    pooled,
    rates,
    scoring,
)
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread
from fedgauge.simulations.run.honest_rounds import honest_rounds

CLIENTS, SHARD = 10, 100  # images that a client holds, and trains on in every round
EPOCH: Table = {"use": "local_sgd", "rate": 0.1, "steps": 10, "batch_size": 10}
ROWS: Mapping[str, tuple[Table, ...]] = {
    "none": (EPOCH,),
    "clip 1, noise .002": (EPOCH, {"use": "clip", "max_norm": 1.0}, {"use": "gaussian", "sigma": 0.002}),
    "DP-SGD .05": ({"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 0.05}, EPOCH),
    "prune to 1 %": (EPOCH, {"use": "prune", "keep": 0.01}),
    "sign": (EPOCH, {"use": "sign", "scale": 0.001}),
    "mixup 1": ({"use": "mixup", "alpha": 1.0}, EPOCH),
}
METHODS = ("fedmia", "cosine", "gradient_difference", "loss", "loss_change", "matched_filter", "likelihood_ratio")
SEEDS = (0, 1)
ROUNDS = (8, 16, 24)  # attacked; training ends with the last
SCORED, STRANGERS, PUBLIC = 30, 250, 500  # images of each client's, test images, and auxiliary images


@dataclass(frozen=True, eq=False)
class _Standardised:
    """Scores (T, K, N) of one row and seed in the attacked rounds, by method.

    Args:
        standard: standardised by the null of the same label; plain: as published.
        accuracy: of the trained network on test images.
    """

    standard: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]
    candidates: Candidates
    accuracy: float


def fedmia_table(
    progress: Progress,
    rows: Sequence[str] = tuple(ROWS),
    seeds: Sequence[int] = SEEDS,
    rounds: Sequence[int] = ROUNDS,
) -> BenchmarkReport:
    """AUC and true positives at 1 % false positives of sums over rounds, by defense and score."""
    work = [(name, seed, tuple(rounds)) for name in rows for seed in seeds]
    tables = in_processes(_measured, work, progress)
    figures: list[Figure] = []
    records: list[dict[str, object]] = []
    for i, name in enumerate(rows):
        some = tables[i * len(seeds) : (i + 1) * len(seeds)]
        accuracy = sum(one.accuracy for one in some) / len(some)
        figures.append(Figure(f"FedMIA's table, {name}: test accuracy", accuracy, "", note=f"{len(seeds)} seeds"))
        for method in METHODS:
            record, figure = _row(some, name, method)
            figures.append(figure)
            records.append({**record, "accuracy": round(accuracy, 4)})
    settings = dict(
        data=f"cifar10: {CLIENTS} clients of {SHARD} images (published: CIFAR-100, 10 clients of 5,000)",
        network="convsmall: two convolutions, two linear layers, 430,000 weights (published: AlexNet, ResNet-18)",
        training=f"each client trains one epoch on all of its images in a round: {EPOCH['steps']} steps of "
        f"{EPOCH['batch_size']} images at rate {EPOCH['rate']} (published: 50 of 100, rate .1 with a cosine schedule)",
        rounds=f"{max(rounds)} of training, of which {list(rounds)} are attacked and add up (published: 300)",
        seeds=list(seeds), positives=f"{SCORED} images of each client's data", negatives=f"{STRANGERS} test images; of "
        "auc_against_other_clients the other clients' images",
        scores="sums over rounds, standardised in each by a public null of the same label; as_published: sums of plain scores, "
        "of fedmia of probabilities; loss reads the weights that the server sent",
        null="half of 500 auxiliary images; the other half is the population of the likelihood ratio",
        intervals="bootstrap over clients (seed x client)",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings, tuple(records))


def _measured(name: str, seed: int, rounds: Sequence[int]) -> _Standardised:
    """One row and seed."""
    with one_thread():
        data = {"use": "cifar10", "batch_size": SHARD, "auxiliary": len(cifar10().y) - CLIENTS * SHARD}
        fed = Federation(Protocol(seed, max(rounds), CLIENTS, data, {"use": "convsmall"}, ROWS[name]))
        public = fed.shards.auxiliary_batch()
        known = public_knowledge(fed, Batch(public.x[:PUBLIC], public.y[:PUBLIC]))
        null, population = null_and_population(known)
        candidates = Candidates.of(fed, SCORED, STRANGERS, same_label=False)
        labels, everybody = candidates.images.y, concatenate([candidates.images, null])
        standard: dict[str, list[Tensor]] = {method: [] for method in METHODS}
        plain: dict[str, list[Tensor]] = {method: [] for method in METHODS}
        for now in honest_rounds(fed, max(rounds)):
            if now.round in rounds:
                scored = scoring(known, now, everybody, population)
                for method in METHODS:
                    found = SCORES[method](scored)
                    own, others = found[:, : len(labels)], found[:, len(labels) :]
                    plain[method].append(own)
                    standard[method].append(against_null(own, labels, others, null.y))
        return _Standardised(
            {method: torch.stack(each) for method, each in standard.items()},
            {method: torch.stack(each) for method, each in plain.items()},
            candidates,
            fed.evaluate(now.after)[0],
        )


def _row(tables: Sequence[_Standardised], name: str, method: str) -> tuple[dict[str, object], Figure]:
    def told(scores: Sequence[Tensor], others: bool = False) -> ScoredCandidates:
        return pooled(
            part for one, each in zip(tables, scores, strict=True) for part in one.candidates.told(each, others)
        )

    rng = partial(generator, "FedMIA's table", name, method)
    sums = [one.standard[method].sum(0) for one in tables]
    found = told(sums)
    plain = [one.plain[method] for one in tables]
    # what is published adds up the probabilities of fedmia's scores
    published = told([(torch.special.ndtr(each) if method == "fedmia" else each).sum(0) for each in plain])
    last = told([one.standard[method][-1] for one in tables])
    record, auc, hits = rates(found, rng)
    more = {
        "auc_of_last_round": numbers(last.auc(rng("last"))),
        "auc_against_other_clients": numbers(told(sums, others=True).auc(rng("others"))),
        "auc_as_published": numbers(published.auc(rng("published"))),
        "tpr_at_1_percent_as_published": numbers(published.true_positives(RATE, rng("published hits"))),
    }
    shown = figure(f"FedMIA's table, {name}: {method}", record, auc, hits)
    return {"row": name, "score": method, **record, **more}, shown
