"""How often the comparison of the local training is right: over random networks, batches, optimizers, own heads, rates and noise.

Of 96 federations of three clients (seeds 0 to 95) in round 2, after an honest round 1:

COUNTS
"""

import copy
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.training_by_round import over_rounds
from fedgauge.attacks.grading.training_evidence import TrainingEvidence, training_evidence
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.update import Params

CLIENTS = 3
RATES = {"sgd": 0.05, "adam": 1e-3}


@dataclass(frozen=True)
class Truth:
    """What the clients do; the chain assumes the optimizer, its steps and rate, and nothing else.

    Args:
        kept: their head starts from their last reply in round 2.
        noise: of round 2's reply, as a multiple of the update's size.
        slower: the rate of round 2 over that of round 1.
    """

    network: str
    batch: int
    steps: int
    optimizer: str
    kept: bool
    noise: float
    slower: float

    @classmethod
    def drawn(cls, seed: int) -> "Truth":
        rng = random.Random(seed)
        network, batch, steps = (
            ("relu", "tanh", "conv")[seed % 3],
            rng.choice([2, 4, 8, 16]),
            rng.choice([1, 1, 1, 3, 5]),
        )
        optimizer = "adam" if rng.random() < 0.3 else "sgd"
        kept, noise = rng.random() < 0.4, rng.choice([0, 0, 0, 0.1, 1, 4])
        return cls(network, batch, steps, optimizer, kept, noise, 0.5 if rng.random() < 0.3 else 1.0)

    def model(self) -> nn.Module:
        if self.network == "relu":
            return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
        if self.network == "tanh":
            hidden = nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()
            return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 10))
        convolutions = nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 16, 5, 2), nn.ReLU()
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 10))

    @property
    def chain(self) -> dict[str, object]:
        rate = {"rate": RATES[self.optimizer], "steps": self.steps}
        return (
            {"use": "local_sgd", **rate}
            if self.optimizer == "sgd"
            else {"use": "local_training", "optimizer": "adam", **rate}
        )


def observations(truth: Truth, seed: int) -> tuple[Federation, list[Observation]]:
    """Client 0's observations of both rounds."""
    tables = {
        "rounds": 2,
        "clients": CLIENTS,
        "data": {"use": "mnist5k", "batch_size": truth.batch, "auxiliary": 100},
        "model": {"use": "mlp", "hidden": [8]},
        "chain": [truth.chain],
    }
    fed = Federation(Protocol.from_tables(tables))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = fed.__dict__["model"] = truth.model()
        head = [name for name, _ in model.named_parameters()][-2:]
        sent: Params = {k: p.detach().clone() for k, p in model.named_parameters()}
        last: list[Params] = []
        seen = []
        for round in (1, 2):
            replies = []
            for client in range(CLIENTS):
                own = {k: last[client][k] for k in head} if truth.kept and last else {}
                replies.append(_reply(fed, truth, {**sent, **own}, client, round))
            seen.append(Observation(round, 0, sent, {k: t - sent[k] for k, t in replies[0].items()}, {}))
            last, sent = replies, {k: torch.stack([reply[k] for reply in replies]).mean(0) for k in sent}
    return fed, seen


def _reply(fed: Federation, truth: Truth, start: Params, client: int, round: int) -> dict[str, Tensor]:
    model = copy.deepcopy(fed.model)
    model.load_state_dict(start)
    rate = RATES[truth.optimizer] * (truth.slower if round == 2 else 1)
    make = torch.optim.SGD if truth.optimizer == "sgd" else torch.optim.Adam
    optimizer, batch = make(model.parameters(), lr=rate), fed.shards.batch_at(client, round)
    for _ in range(truth.steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(fed.shards.dataset.normalise(batch.x)), batch.y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    reply = {k: p.detach().clone() for k, p in model.named_parameters()}
    if truth.noise and round == 2:
        size = torch.cat([(t - start[k]).flatten() for k, t in reply.items()]).square().mean().sqrt()
        reply = {k: t + truth.noise * size * torch.randn_like(t) for k, t in reply.items()}
    return reply


def compared(truth: Truth, seed: int) -> tuple[TrainingEvidence, TrainingEvidence, TrainingEvidence]:
    """Of round 1, of round 2, and of both."""
    fed, (first, second) = observations(truth, seed)
    found = {(1, 0): training_evidence(fed, first), (2, 0): training_evidence(fed, second, first)}
    return found[1, 0], found[2, 0], over_rounds(found)
