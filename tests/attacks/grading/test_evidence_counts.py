"""How often the comparison of the local training is right: over random networks, batches, optimizers, own heads, rates and noise.

Of 96 federations of three clients (seeds 0 to 95), of which round 1 is honest and round 2 may not be:

| | n | right | undecided, or unnamed | wrong |
|---|---|---|---|---|
| round 1 fits | 96 | 93 | 3 | 0 |
| round 2 of the same training fits (the rate may differ) | 28 | 27 | 1 | 0 |
| no head of the client's own is named | 50 | 50 | | 0 |
| a head of the client's own is named, without noise | 26 | 17 | 9, of them 2 called misfits for another reason | |
| no noise is named | 54 | 54 | | 0 |
| noise of .1 of the update is named | 19 | 9 | 10 | |
| noise of the update's size, or four times, is named | 23 | 15 | 8, all called misfits | |
| the same rate is not said to have changed (SGD) | 27 | 27 | | 0 |
| a halved rate is said to have changed (SGD, batches of 2 to 8) | 11 | 7 | 4 | |
| SGD is never called Adam | | | | 0 |

An own head under noise is not named: noise leaves neither zeros nor a low rank.
"""

import copy
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.training_evidence import TrainingEvidence, over_rounds, training_evidence
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


# some of the 96
NAMED = {6: "own", 15: "own", 94: "own", 5: "noise", 21: "noise", 47: "rate"}
HONEST = (13, 22, 44)


@pytest.mark.parametrize("seed", [*NAMED, *HONEST])
def test_what_the_clients_did_is_named_and_nothing_else(seed: int) -> None:
    truth = Truth.drawn(seed)
    first, second, both = compared(truth, seed)
    assert first.fits is True
    expected = NAMED.get(seed)
    named = {
        "own": "starts from the client's own last reply" in second.words,
        "noise": second.kind == "noise",
        "rate": "the sum of the steps' rates was" in both.words,
    }
    # seed 15 has both a head of its own and a slower rate
    assert named == {kind: kind == expected or (seed == 15 and kind == "rate") for kind in named}
    assert both.fits is (expected is None)


@pytest.mark.full
def test_of_all_96_no_honest_client_is_accused() -> None:
    found = {"own": 0, "noise": 0, "rate": 0}
    for seed in range(96):
        truth = Truth.drawn(seed)
        first, second, both = compared(truth, seed)
        assert first.fits is not False
        own, noise = "starts from the client's own last reply" in second.words, second.kind == "noise"
        rate = "the sum of the steps' rates was" in both.words
        assert truth.kept or not own
        assert truth.noise or not noise
        assert truth.slower < 1 or not rate
        assert truth.optimizer == "adam" or second.kind != "Adam"
        found["own"] += own
        found["noise"] += noise and truth.noise >= 1
        found["rate"] += rate
    assert found["own"] >= 15 and found["noise"] >= 13 and found["rate"] >= 6
