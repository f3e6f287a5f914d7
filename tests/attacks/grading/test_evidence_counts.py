"""How often the comparison of the local training is right: over random networks, batches, steps and optimizers."""

import random

import pytest
import torch
from torch import nn

from fedgauge.attacks.grading.training_evidence import training_evidence
from fedgauge.attacks.source import FederationSource
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol

CHAINS = {
    "sum of gradients": {"use": "local_sgd", "rate": 0.05},
    "Adam": {"use": "local_training", "optimizer": "adam", "rate": 1e-3},
}


def network(kind: str) -> nn.Module:
    if kind == "relu":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    if kind == "tanh":
        hidden = nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 10))
    convolutions = nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 16, 5, 2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 10))


@pytest.mark.parametrize("seed", [*range(9), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(9, 96))])
def test_no_honest_client_is_accused_and_each_optimizer_is_distinguished_from_the_other(seed: int) -> None:
    rng = random.Random(seed)
    batch, steps, kind = rng.choice([2, 4, 8, 16]), rng.choice([1, 1, 1, 3, 5]), rng.choice(list(CHAINS))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = network(("relu", "tanh", "conv")[seed % 3])
    federations = {
        assumed: Federation(
            Protocol.from_tables(
                {
                    "rounds": 1,
                    "clients": 3,
                    "data": {"use": "mnist5k", "batch_size": batch, "auxiliary": 100},
                    "model": {"use": "mlp", "hidden": [8]},
                    "chain": [{**chain, "steps": steps}],
                }
            )
        ).having(model=model)
        for assumed, chain in CHAINS.items()
    }
    seen = FederationSource(federations[kind]).seen(0)
    found = {assumed: training_evidence(fed, seen) for assumed, fed in federations.items()}
    assert found[kind].fits is not False, found[kind].words
    if kind == "Adam":
        assert found["sum of gradients"].fits is False
    else:
        assert found["Adam"].kind == "sum of gradients" and found["Adam"].fits is False
