"""Whom a client's data holds: scores accumulated over rounds, of those that were in a batch and of all that the client holds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedgauge.attacks.membership.scores import SCORES, against_null, calibrated, null_and_population
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.components import Table
from fedgauge.client.data.images import batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.update import concatenate
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.benchmarks.membership.single_updates import SHOWN, tables_of_rows
from fedgauge.simulations.benchmarks.membership.tables import RATE, Told, in_processes, numbers, pooled, scoring
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread
from fedgauge.simulations.run.honest_rounds import honest_rounds

ROWS = ("none", "noise .1", "DP-SGD 1")
SEEDS = (0, 1)
ROUNDS = (1, 4, 16)  # of training, all of them attacked
STRANGERS = 250  # test images
OF_SHARD = 50  # images of each client's shard, whether or not a batch had them
LISTED = ("highest", "sum", "highest ratio", "mixture")  # among the figures; the rows have all


@dataclass(frozen=True, eq=False)
class _Told:
    """Accumulated scores (K, N) of one row and seed, by score, way of accumulating and number of rounds.

    Args:
        alone: (T, K, N) likelihood ratios of each round by itself, by how they are compared.
        batches: for each round and client, the candidates in its batch.
        drawn: by number of rounds, for each client the candidates that were in one of its batches.
        held: for each client, some candidates of all that it holds.
        labels: (N,); strangers: the candidates that no client holds.
        clients: (K,) clusters: one for each seed and client.
    """

    scores: Mapping[tuple[str, str, int], Tensor]
    alone: Mapping[str, Tensor]
    batches: Sequence[Sequence[Tensor]]
    drawn: Mapping[int, Sequence[Tensor]]
    held: Sequence[Tensor]
    labels: Tensor
    strangers: Tensor
    clients: Tensor


def over_rounds(
    progress: Progress, rows: Sequence[str] = ROWS, seeds: Sequence[int] = SEEDS, rounds: Sequence[int] = ROUNDS
) -> BenchmarkReport:
    """AUC and true positives at 1 % false positives after some rounds, by score and by how rounds are accumulated."""
    tables = tables_of_rows()
    work = [(tables[name], seed, tuple(rounds)) for name in rows for seed in seeds]
    told = in_processes(_measured, work, progress)
    records: list[dict[str, object]] = []
    figures: list[Figure] = []
    for i, name in enumerate(rows):
        some = told[i * len(seeds) : (i + 1) * len(seeds)]
        records += [{"row": name, "score": SHOWN[0], "alone": how} | _alone(some, name, how) for how in some[0].alone]
        for score, how, count in some[0].scores:
            record = _record(some, name, score, how, count)
            records.append(record)
            if score == SHOWN[0] and how in LISTED:
                figures += _figures(record)
    settings = dict(
        sweep="simulations/defenses.toml: network, data, chains; batches of 4 of about 875 images that a client holds",
        seeds=list(seeds), clients=4, rounds=f"the first {max(rounds)} of training from the untrained network, all attacked",
        positives=f"in a batch: of any of the rounds so far; held: {OF_SHARD} of all that the client holds",
        negatives=f"{STRANGERS} test images (nobody's)",
        null="half of the 500 auxiliary images: scores are standardised by those of the same label, client and round",
        calibrated="a log-ratio less the log of the null's mean ratio of its label, where that is above 0; chosen among several "
        "ways on seed 0 of the rows none and noise .1, so that only the other seed and row are held out",
        accumulated="highest: standardised, of the rounds; sum: standardised, of the rounds; sum of "
        "log-ratios: standardised after the sum; highest ratio: calibrated, of the rounds (membership_over_rounds); mixture: "
        "sum of log(1 - q + q exp(log-ratio)), calibrated, q the batch's part of what the client holds",
        alone=f"single updates of rounds 1 to {max(rounds)}: log-ratios standardised, plain and calibrated (membership)",
        intervals="bootstrap over clients (seed x client)",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings, tuple(records))


def accumulated(score: str, raw: Tensor, labels: Tensor, null: Tensor, share: float) -> dict[str, Tensor]:
    """Scores (T, K, N + M) of T rounds as one (K, N), by how they are accumulated.

    Args:
        labels: (N,) of the candidates.
        null: (M,) labels of the candidates that nobody trained on, which come last.
        share: the part of a client's data that is in a batch.
    """
    each = compared(against_null, raw, labels, null)
    found = {"highest": each.amax(0), "sum": each.sum(0)}
    if score == "likelihood_ratio":
        ratios = compared(calibrated, raw, labels, null)
        absent = torch.full_like(ratios, math.log(1 - share))
        found["sum of log-ratios"] = compared(against_null, raw.sum(0, keepdim=True), labels, null)[0]
        found["highest ratio"] = ratios.amax(0)
        found["mixture"] = torch.logaddexp(absent, ratios + math.log(share)).sum(0)
    return found


def compared(by: Callable[..., Tensor], raw: Tensor, labels: Tensor, null: Tensor) -> Tensor:
    """Scores (T, K, N) of the candidates beside the null of the same label, by `against_null` or `calibrated`."""
    return torch.stack([by(one[:, : len(labels)], labels, one[:, len(labels) :], null) for one in raw])


def _measured(tables: Table, seed: int, rounds: Sequence[int]) -> _Told:
    """One row of the sweep and seed."""
    with one_thread():
        fed = Federation(Scenario.from_tables({**tables, "seed": seed}).protocol)
        clients = range(fed.protocol.clients)
        known, data = public_knowledge(fed), fed.shards.dataset
        null, public = null_and_population(known)
        shards = [fed.shards.indices[c] for c in clients]
        some = [
            s[torch.randperm(len(s), generator=generator(seed, "held", c))[:OF_SHARD]] for c, s in enumerate(shards)
        ]
        drawn = {n: [_drawn(fed, c, n) for c in clients] for n in rounds}
        rows = torch.cat([*some, *drawn[max(rounds)]]).unique()
        strangers = batch_of(data.x_test, data.y_test, torch.arange(STRANGERS))
        everybody = concatenate([batch_of(data.x, data.y, rows), strangers, null])
        labels = everybody.y[: -len(null.y)]
        share = fed.shards.batch_size / (sum(map(len, shards)) / len(shards))
        raw: dict[str, list[Tensor]] = {name: [] for name in SHOWN}
        scores: dict[tuple[str, str, int], Tensor] = {}
        for now in honest_rounds(fed, max(rounds)):
            scored = scoring(known, now, everybody, public)
            for name in SHOWN:
                raw[name].append(SCORES[name](scored))
                if now.round in rounds:
                    found = accumulated(name, torch.stack(raw[name]), labels, null.y, share)
                    scores |= {(name, how, now.round): t for how, t in found.items()}
    place, ratios = partial(torch.searchsorted, rows), torch.stack(raw[SHOWN[0]])
    alone = {"standardised": compared(against_null, ratios, labels, null.y), "plain": ratios[..., : len(labels)]}
    return _Told(
        scores,
        alone | {"calibrated": compared(calibrated, ratios, labels, null.y)},
        [[place(fed.rows_at(c, round)) for c in clients] for round in range(1, max(rounds) + 1)],
        {n: [place(mine) for mine in each] for n, each in drawn.items()},
        [place(mine) for mine in some],
        labels,
        torch.arange(len(rows), len(labels)),
        torch.tensor([seed * len(clients) + c for c in clients]),
    )


def _drawn(fed: Federation, client: int, rounds: int) -> Tensor:
    """Rows of the images that were in a client's batch in one of the first rounds."""
    found: Tensor = torch.cat([fed.rows_at(client, round) for round in range(1, rounds + 1)]).unique()
    return found


def _alone(told: Sequence[_Told], name: str, how: str) -> dict[str, object]:
    """Rates of every update by itself, and the true positives of each seed, as the calibration was chosen on the first."""
    seeds = [
        [
            _apart(one, one.alone[how][round, k], mine, k)
            for round, batches in enumerate(one.batches)
            for k, mine in enumerate(batches)
        ]
        for one in told
    ]
    found = _rates([part for parts in seeds for part in parts], name, "alone", how)
    apart = [pooled(parts).true_positives(RATE, generator("seed", name, how)).value for parts in seeds]
    return found | {"tpr_at_1_percent_by_seed": [round(value, 4) for value in apart]}


def _record(told: Sequence[_Told], name: str, score: str, how: str, count: int) -> dict[str, object]:
    record: dict[str, object] = {"row": name, "rounds": count, "score": score, "accumulated": how}
    for whom in ("in_a_batch", "held"):
        parts = [
            _apart(one, own, one.drawn[count][k] if whom == "in_a_batch" else one.held[k], k)
            for one in told
            for k, own in enumerate(one.scores[score, how, count])
        ]
        record[whom] = _rates(parts, name, score, how, count, whom)
    return record


def _apart(one: _Told, scores: Tensor, mine: Tensor, client: int) -> Told:
    """Scores (N,) of these candidates and of strangers of their labels, with the client's number."""
    others = one.strangers[torch.isin(one.labels[one.strangers], one.labels[mine])]
    return scores[mine], scores[others], one.clients[client]


def _rates(parts: Sequence[Told], *names: str | int) -> dict[str, object]:
    found, rng = pooled(parts), partial(generator, "membership over rounds", *names)
    auc, hits = found.auc(rng("auc")), found.true_positives(RATE, rng("hits"))
    counts: dict[str, object] = {"n": len(found.members), "negatives": len(found.others)}
    return counts | {"auc": numbers(auc), "tpr_at_1_percent": numbers(hits)}


def _figures(record: Mapping[str, Any]) -> list[Figure]:
    """What a record says of those that were in a batch, and of all that the client holds."""
    found = []
    for whom, words in (("in_a_batch", "in a batch so far"), ("held", "held")):
        where = f"{words}, {record['row']}, rounds 1 to {record['rounds']}: {record['score']}, {record['accumulated']}"
        auc, hits = record[whom]["auc"], record[whom]["tpr_at_1_percent"]
        note = f"{auc[1]:.3f} to {auc[2]:.3f}, n = {record[whom]['n']}; TPR at 1 % FPR {hits[0]:.2f}"
        found.append(Figure(where, auc[0], "AUC", note=note))
    return found
