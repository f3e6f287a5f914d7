"""Who was in the batch: membership from single updates on rows of the sweep, untrained and trained, beside what reads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import fedgauge.simulations
from fedgauge.attacks.base import Observation, Wave
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.likelihood import RestOfBatch
from fedgauge.attacks.membership.limit import area, detectability, power
from fedgauge.attacks.membership.scores import SCORES, Scoring, beside_null, null_and_population
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.components import Table
from fedgauge.client.data.images import batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.update import Params, concatenate
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.benchmarks.membership.roc import ScoredCandidates
from fedgauge.simulations.benchmarks.membership.tables import RATE, Told, in_processes, numbers, pooled, rates
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread
from fedgauge.simulations.experiments.sweep_file import Sweep
from fedgauge.simulations.run.honest_rounds import honest_rounds

ROWS = (
    "none",
    "noise .1",
    "DP-SGD .05",
    "sign",
    "prune to 1 %",
    "2 bits",
    "batch of 16",
    "secure sum of 4",
    "DP-SGD 1",
)
LARGER: Mapping[str, tuple[str, int]] = {  # rows of the sweep with larger batches than the sweep has
    "batch of 64": ("none", 64),
    "batch of 256": ("none", 256),
    "noise .1, batch of 64": ("noise .1", 64),
}
SEEDS = (0, 1, 2)
UPDATES = 20  # of each seed and stage
MEMBERS = 512  # of each seed and stage, so that fewer updates of large batches are taken, but of each client one
ROUNDS = (1, 40)  # attacked, as in the sweep: the untrained network and the last round's
OFFSET = 1000  # rounds whose batches are drawn for the updates, so that training does not use up the seeds
SHOWN = ("likelihood_ratio", "matched_filter")
METHODS = (*SHOWN, "gradient_difference", "loss", "label_frequency")
STRANGERS = 600  # test images
OF_SHARD = 40  # images of each client's shard that are scored beside its batches


@dataclass(frozen=True, eq=False)
class _Scored:
    """Scores (K, N) beside the null's of one wave by method, and who the candidates are.

    Args:
        members: for each update, the candidates in its batch.
        labels: (N,); strangers: the candidates that no client holds.
        shards: for each update, candidates of the clients' shards that are not in its batch.
        clients: (K,) clusters: one for each seed and client.
        mu: (N,) of the exact curve, where noise is normal.
    """

    scores: Mapping[str, Tensor]
    members: tuple[Tensor, ...]
    labels: Tensor
    strangers: Tensor
    shards: tuple[Tensor, ...]
    clients: Tensor
    mu: Tensor | None


def tables_of_rows() -> dict[str, Table]:
    """The scenario of each row of the ready-made sweep, and of those with larger batches."""
    sweep = Sweep.load(Path(fedgauge.simulations.__path__[0]) / "defenses.toml")
    found = {cell.defense: cell.tables for cell in sweep.cells}
    for name, (row, size) in LARGER.items():
        found[name] = {**found[row], "data": {**found[row]["data"], "batch_size": size}}
    return found


def single_updates(
    progress: Progress,
    rows: Sequence[str] = (*ROWS, *LARGER),
    seeds: Sequence[int] = SEEDS,
    updates: int = UPDATES,
    rounds: Sequence[int] = ROUNDS,
) -> BenchmarkReport:
    """AUC and true positives at 1 % false positives on rows of the ready-made sweep, by each score."""
    tables = tables_of_rows()
    figures: list[Figure] = []
    records: list[dict[str, object]] = []
    work = [(tables[name], seed, updates, tuple(rounds)) for name in rows for seed in seeds]
    scored = in_processes(_measured, work, progress)
    for i, name in enumerate(rows):
        for stage in rounds:
            some, more = _row(name, stage, [found[stage] for found in scored[i * len(seeds) : (i + 1) * len(seeds)]])
            figures += some
            records += more
    settings = dict(
        sweep="simulations/defenses.toml: network, data, chains; updates as one client of the federation sends them",
        seeds=list(seeds), updates=f"{updates} of each seed and stage; of batches of 64 eight, of 256 four",
        stages="before round 1 (untrained) and round 40",
        positives="the images of the batch behind an update",
        negatives="test images (nobody's) of the member's label; also images of the shards outside the batch",
        null="half of the 500 auxiliary: log-ratios are calibrated by those of the same update and label, others standardised",
        population="the other half: the likelihood ratio's mean and axes of the unknown rest of the batch",
        intervals="bootstrap over clients (seed x client); one cluster a seed where all clients are summed",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings, tuple(records))


def _measured(tables: Table, seed: int, updates: int, rounds: Sequence[int]) -> dict[int, "_Scored"]:
    """One row of the sweep and seed, by stage."""
    with one_thread():
        fed = Federation(Scenario.from_tables({**tables, "seed": seed}).protocol)
        before = (now for now in honest_rounds(fed, max(rounds)) if now.round in rounds)
        return {now.round: _scored(fed, now.params, updates, seed) for now in before}


def _scored(fed: Federation, params: Params, updates: int, seed: int) -> _Scored:
    _, buffers = fed.initial()
    groups = fed.protocol.groups(1)
    seen, truth, held = [], [], []
    for i in range(min(updates, max(len(groups), MEMBERS // fed.shards.batch_size))):
        client, round = groups[i % len(groups)][0], OFFSET + i
        seen.append(Observation(1, client, params, fed.client_update(params, buffers, client, round)))
        truth.append(fed.rows_at(client, round))
        held.append(fed.shards.indices[client][:OF_SHARD])
    known, data = public_knowledge(fed), fed.shards.dataset
    rows = torch.cat([*truth, *held]).unique()
    strangers = batch_of(data.x_test, data.y_test, torch.arange(STRANGERS))
    null, public = null_and_population(known)
    everybody = concatenate([batch_of(data.x, data.y, rows), strangers, null])
    candidates = CandidateGradients(known, params, everybody)
    rest = RestOfBatch.of_population(CandidateGradients(known, params, public))
    wave, count = Wave.stack(seen), len(rows) + len(strangers.y)
    scoring, scores = Scoring(candidates, wave, rest), {}
    for name in METHODS:
        found = SCORES[name](scoring)
        own = found if name == "label_frequency" else beside_null(name)(found, everybody.y, found[:, count:], null.y)
        scores[name] = own[:, :count]
    members = tuple(torch.searchsorted(rows, mine) for mine in truth)
    shards = tuple(
        torch.searchsorted(rows, some[~torch.isin(some, mine)]) for some, mine in zip(held, truth, strict=True)
    )
    clients = torch.tensor([seed * fed.protocol.clients + one.client for one in seen])
    density = known.chain.update_distribution
    normal = density is not None and density.sigma > 0
    mu = detectability(candidates)[:count] if normal else None
    return _Scored(scores, members, everybody.y[:count], torch.arange(len(rows), count), shards, clients, mu)


# ------------------------------------------------------------------------------------------------------- figures


def _row(name: str, stage: int, scored: Sequence[_Scored]) -> tuple[list[Figure], list[dict[str, object]]]:
    where = f"{name}, {'untrained' if stage == 1 else f'before round {stage}'}"
    figures, records = [], []
    for method in METHODS:
        found = _gathered(scored, method, "strangers")
        rng = partial(generator, "membership", name, stage, method)
        told, auc, hits = rates(found, rng)
        record: dict[str, object] = {
            "row": name, "round": stage, "score": method, **told,
            "auc_against_own_shard": numbers(_gathered(scored, method, "shards").auc(rng("shards"))),
            "auc_shuffled": numbers(_gathered(scored, method, "shuffled").auc(rng("shuffled"))),
            "auc_untrained_on": numbers(_gathered(scored, method, "nobody").auc(rng("nobody"))),
        }  # fmt: skip
        if limit := _limit(scored):
            record["limit"] = limit
        records.append(record)
        if method in SHOWN:
            note = f"{auc.low:.3f} to {auc.high:.3f}, n = {len(found.members)}" if auc.low is not None else ""
            figures.append(Figure(f"{where}: {method}", auc.value, "AUC", note=note))
            note = f"{hits.low:.2f} to {hits.high:.2f}" if hits.low is not None else ""
            figures.append(Figure(f"{where}: {method}", hits.value, "TPR at 1 % FPR", note=note))
    return figures, records


def _limit(scored: Sequence[_Scored]) -> dict[str, float] | None:
    """Mean of the members' exact curves, for a server that knows the rest of the batch."""
    mus = [float(one.mu[i]) for one in scored if one.mu is not None for mine in one.members for i in mine]
    if not mus:
        return None
    return {
        "auc": round(sum(map(area, mus)) / len(mus), 4),
        "tpr_at_1_percent": round(sum(power(RATE, mu) for mu in mus) / len(mus), 4),
    }


def _gathered(scored: Sequence[_Scored], method: str, against: str) -> ScoredCandidates:
    """Members and others of the same labels, over updates and seeds.

    Args:
        against: strangers; shards; shuffled (the members of another update stand for the members); nobody (strangers
            stand for the members).
    """
    parts: list[Told] = []
    for one in scored:
        for k, mine in enumerate(one.members):
            row, other = one.scores[method][k], one.members[k - 1]
            pool = one.shards[k] if against == "shards" else one.strangers
            if against == "shuffled":
                mine = other[~torch.isin(other, mine)]
            if against == "nobody":
                order = pool[torch.randperm(len(pool), generator=generator("nobody", k, int(one.clients[k])))]
                mine, pool = order[: len(mine)], order[len(mine) :]
            others = pool[torch.isin(one.labels[pool], one.labels[mine])]
            parts.append((row[mine], row[others], one.clients[k]))
    return pooled(parts)
