"""`python -m tests.zoo.labels [NAME ...]`: what attacks read of every kind of label, and of the examples behind it.

Each row has n clients with a batch each, at untrained weights, without a defense, next to the guesses that read no update.
Intervals are 95 %, clustered by client. Data are made of the 5,000 digits and the made-up census, which need no file.
"""

import csv
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import allowing
from fedgauge.client.data.census import people
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data.images import mnist5k
from fedgauge.client.data.tables import Tabular, table
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.server.views.intervals import clustered_interval

HERE = "tests.zoo.labels"
FINDINGS, CLIENTS, CAP = 5, 8, 60.0
INVERTING = {"use": "inverting_gradients", "iterations": 1000}


def quarters(one_class: bool = False) -> Dataset:
    """Images of 32 x 32 with a digit or nothing in every quarter; five findings: is there a 0, 1, 2, 3 or 4?

    Args:
        one_class: the label is the first finding, and every image has one.
    """
    digits, rng = mnist5k(), torch.Generator().manual_seed(0)
    small = F.avg_pool2d(digits.x.float(), 2).byte()
    drawn = torch.randint(len(small), (3000, 4), generator=rng)
    shown = torch.rand(3000, 4, generator=rng) < 0.5
    tiles = small[drawn][:, :, 0] * shown[:, :, None, None]
    x = F.pad(tiles.view(-1, 2, 2, 14, 14).permute(0, 1, 3, 2, 4).reshape(-1, 1, 28, 28), (2, 2, 2, 2))
    here = F.one_hot(digits.y[drawn], 10).bool() & shown[:, :, None]
    y = here.any(1)[:, :FINDINGS].float()
    if one_class:
        some = y.any(1)
        x, y = x[some], y[some].argmax(1)
    test = len(y) // 5
    return Dataset("quarters", x[test:], y[test:], x[:test], y[:test], FINDINGS, (0.07,), (0.2,))


def savings() -> Tabular:
    """The made-up census, where the number to predict is a person's savings, which are skewed."""
    rows, _ = people()
    with tempfile.TemporaryDirectory() as folder, (path := Path(folder) / "savings.csv").open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        return table(path, "savings", target="number")


def narrow(shape: Sequence[int], outputs: int) -> nn.Module:
    """An MLP of 2 x 100."""
    layers = [nn.Linear(shape[0], 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, outputs)]
    return nn.Sequential(*layers)


class Autoencoder(nn.Module):
    """784-64-784."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(784, 64), nn.Linear(64, 784)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x.flatten(1)).relu())
        return out.view(x.shape)


def reconstruction(output: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.mse_loss(output, x)


@dataclass(frozen=True)
class Row:
    """A federation and its attacks."""

    name: str
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    loss: Mapping[str, Any]
    attacks: Sequence[Mapping[str, Any]]
    sizes: Sequence[int]
    rate: float = 0.1
    clients: int = CLIENTS


def rows() -> list[Row]:
    """All rows."""
    lenet, bce, ce = {"use": "lenet"}, {"use": "binary_cross_entropy"}, {"use": "cross_entropy"}
    images, one = {"use": f"{HERE}:quarters"}, {"use": f"{HERE}:quarters", "one_class": True}
    guess = {"use": "mean_image"}
    exact = [
        {"use": "spear", "iterations": 100},
        {"use": "tableak", "iterations": 300, "restarts": 10},
        {"use": "mode_row"},
    ]
    logit, numbers = {"use": f"{HERE}:narrow", "outputs": 1}, {"use": f"{HERE}:savings"}
    two = {"use": "mlp", "hidden": [100, 100]}
    auto = {"use": f"{HERE}:Autoencoder"}
    read = [{"use": "analytic"}, {"use": "spear", "iterations": 100}, guess]
    return [
        Row("findings", images, lenet, bce, [INVERTING, guess], (1, 4)),
        Row("one class", one, lenet, ce, [INVERTING, guess], (1, 4)),
        Row("one logit", {"use": "census"}, logit, bce, exact, (1, 8), clients=16),
        Row("two logits", {"use": "census"}, two, ce, exact, (1, 8), clients=16),
        Row("number", numbers, logit, {"use": "mean_squared_error"}, [{"use": "analytic"}, *exact], (1, 8), rate=1e-3),
        Row("autoencoder", {"use": "mnist5k"}, auto, {"use": f"{HERE}:reconstruction"}, read, (1, 8)),
    ]


def measured(row: Row, size: int) -> None:
    """Attack a row's federation and print each attack's scores."""
    tables = {
        "seed": 0, "rounds": 1, "clients": row.clients, "loss": row.loss, "model": row.model,
        "data": {"auxiliary": 200, "batch_size": size, **row.data}, "chain": [{"use": "local_sgd", "rate": row.rate}],
    }  # fmt: skip
    fed = Federation(Protocol.from_tables(tables)).check()
    source = FederationSource(fed)
    wave = source.wave(tuple(range(row.clients)))
    for number, attack in enumerate(row.attacks):
        began = time.perf_counter()
        planned = PlannedAttack.from_table(dict(attack), f"attack {number}")
        values: dict[str, list[tuple[int, float]]] = defaultdict(list)
        ended: dict[str, int] = defaultdict(int)
        for client, result in enumerate(Auditor(source).audit(planned, wave)):
            ended[f"{result.reconstruction.status} {result.reconstruction.reason}".strip()] += 1
            for r in result.rows:
                if r.value is not None:
                    values[r.metric].append((client, min(r.value, CAP) if r.metric == "psnr" else r.value))
        print(f"{row.name}, B = {size}, {attack['use']}: {dict(ended)}, {time.perf_counter() - began:.0f} s")
        for metric, pairs in values.items():
            clients, numbers = np.array([c for c, _ in pairs]), np.array([v for _, v in pairs])
            low, high = clustered_interval(numbers, clients) or (np.nan, np.nan)
            least = f", least {numbers.min():.4g}" if metric in ("psnr", "cells") else ""
            print(
                f"    {metric:16} {numbers.mean():9.4g} ({low:.4g} to {high:.4g}), n = {len(numbers)}{least}",
                flush=True,
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    with allowing([HERE]):
        for each in rows():
            if each.name in sys.argv[1:] or not sys.argv[1:]:
                for batch in each.sizes:
                    measured(each, batch)
