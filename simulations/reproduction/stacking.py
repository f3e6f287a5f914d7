"""Dataset membership by a stacking: a logistic regression on seven scores (the idea of 2604.12737, whose own signals differ).

`python -m fedgauge.simulations.reproduction.stacking FILE` needs CIFAR-10 in the local data.
"""

import sys
from pathlib import Path

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from fedgauge.attacks.base import Wave
from fedgauge.attacks.membership.attack import membership
from fedgauge.attacks.membership.candidates import above
from fedgauge.attacks.source import FederationSource
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.data.batches import Shards, batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.update import Batch, concatenate
from fedgauge.server.views.intervals import clustered_interval
from fedgauge.simulations.experiments.results import ResultsFile
from fedgauge.simulations.reproduction.measures import ComparedFigure

METHODS = ("fedmia", "cosine", "gradient_difference", "loss", "loss_change", "matched_filter", "likelihood_ratio")
EPOCH = {"use": "local_sgd", "rate": 0.1, "steps": 10, "batch_size": 10}
CELLS = {"none": (), "clip 1, noise .002": ({"use": "clip", "max_norm": 1.0}, {"use": "gaussian", "sigma": 0.002})}
HEAD = {"name": "membership_stacking", "title": "A stacking of seven scores", "note": "", "seed": 0, "version": 1}
GAIN, CLIENTS, SHARD, MEMBERS, OTHERS, ROUNDS = "stacking, minus the best", 5, 100, 30, 250, (8, 16)
DATA, MODEL = {"use": "cifar10", "batch_size": SHARD, "auxiliary": CLIENTS * SHARD + 3 * OTHERS}, {"use": "convsmall"}


def scores_of(fed: Federation, strangers: Batch) -> Tensor:
    """Train; sum over rounds the scores of each client's own images, then of images of no client: (5, 30 + 250, 7)."""
    data, known, (params, buffers) = fed.shards.dataset, public_knowledge(fed), fed.initial()
    images = concatenate([*(batch_of(data.x, data.y, mine[:MEMBERS]) for mine in fed.shards.indices), strangers])
    total = torch.zeros(len(METHODS), CLIENTS, len(images.y), dtype=torch.float64)
    for now in range(1, ROUNDS[-1] + 1):
        seen = [FederationSource(fed).seen(client, now, (params, buffers)) for client in range(CLIENTS)]
        if now in ROUNDS:
            total += torch.stack([membership(name).scores(Wave.stack(seen), known, images) for name in METHODS])  # type: ignore[arg-type]
        params = {k: p + torch.stack([one.update[k] for one in seen]).mean(0) for k, p in params.items()}
    own, others = total.split([CLIENTS * MEMBERS, OTHERS], 2)
    own = own.unflatten(2, (CLIENTS, MEMBERS)).diagonal(0, 1, 2).permute(2, 1, 0)
    return torch.cat([own, others.permute(1, 2, 0)], 1)


def attacked(chain: tuple[dict[str, object], ...], seed: int) -> Tensor:
    """Add to a federation's scores those of the stacking, fitted to a shadow federation that trains on the server's images."""
    fed, shadow = (Federation(Protocol(s, ROUNDS[-1], CLIENTS, DATA, MODEL, chain)) for s in (seed, seed + 1000))
    data = fed.shards.dataset
    public, outside, inside = fed.shards.auxiliary.split([2 * OTHERS, OTHERS, CLIENTS * SHARD])
    for one, held in ((fed, [mine[:SHARD] for mine in fed.shards.indices]), (shadow, inside.split(SHARD))):
        vars(one)["shards"] = Shards(data, tuple(held), public, SHARD, one.protocol.seed)
    rows = scores_of(shadow, batch_of(data.x, data.y, outside)).flatten(0, 1).numpy()
    fitted = LogisticRegression(max_iter=10_000).fit(rows, ([1] * MEMBERS + [0] * OTHERS) * CLIENTS)
    found = scores_of(fed, batch_of(data.x_test, data.y_test, torch.arange(OTHERS)))
    return torch.cat([found, found @ torch.from_numpy(fitted.coef_.T)], -1)


def figures(cell: str, scores: Tensor) -> list[ComparedFigure]:
    """AUC, and TPR at 1 % FPR, of each score, all clients pooled, and the stacking's gain over the best of the others."""
    pairs = [side.flatten(0, 1).T.contiguous() for side in scores.split([MEMBERS, scores.shape[1] - MEMBERS], 1)]
    wins = torch.stack([above(a, b) for a, b in zip(*pairs, strict=True)])
    hits = torch.stack([a > b.sort(descending=True).values[len(b) // 100] for a, b in zip(*pairs, strict=True)])
    rows, clients = list[ComparedFigure](), torch.arange(len(scores)).repeat_interleave(MEMBERS).numpy()
    for metric, each in (("AUC", wins), ("TPR at 1 % FPR", hits.double())):
        each = torch.cat([each, each[-1:] - each[each[:-1].mean(1).argmax()]])
        for name, values in zip((*METHODS, "stacking", GAIN), each.numpy(), strict=True):
            low, high = clustered_interval(values, clients, whole=None if name == GAIN else 1.0) or (None, None)
            rows.append(ComparedFigure(cell, name, metric, None, float(values.mean()), low, high, len(values)))
    return rows


if __name__ == "__main__":
    file = ResultsFile(Path(sys.argv[1]), ComparedFigure, {**HEAD, "computed": {}})
    cells = {name: torch.cat([attacked((EPOCH, *chain), seed) for seed in (0, 1)]) for name, chain in CELLS.items()}
    file.write([row for name, scores in cells.items() for row in figures(name, scores)])
