"""Guard detection: false alarms of a client's inspection in honest rounds, and its detection of malicious servers.

`python -m fedgauge.simulations.papers.malicious_servers.guard_detection guard|guard_patient FILE.json` computes the kept
figures again, in hours. The thresholds were chosen on honest rounds of other networks, settings and seeds: LeNet and a tanh MLP on
CIFAR-10, an MLP of two layers and ConvSmall on MNIST, a ConvNet with group norm.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Generator, Tensor

from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK, ServerAttack, craft_weights
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.components import Table, build
from fedgauge.client.federation import Federation
from fedgauge.client.inspection.policy import InspectionPolicy, fingerprint, inspect
from fedgauge.client.inspection.probes import ProbeSet, probe_examples
from fedgauge.client.inspection.results import DetectorResults
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.update import Params
from fedgauge.server.views.intervals import Rate
from fedgauge.simulations.experiments.measures import ComparedFigure
from fedgauge.simulations.experiments.paper_tables import PaperTable
from fedgauge.simulations.experiments.results import ResultsFile, head_of
from fedgauge.simulations.papers.malicious_servers.honest_rounds import honest_rounds

CLIENTS = 4
FALSE_ALARMS = 0.01  # of honest rounds, at most


@dataclass(frozen=True)
class GuardSetting:
    """A network, its data and its local training.

    Args:
        data, model: of fedgauge.client.data.images and fedgauge.client.models.vision; arguments: the model's.
        batch_size: examples in a round; each: examples in a local step, None: all of them.
        alpha: of the Dirichlet partition; None: labels are spread evenly.
    """

    data: str
    model: str
    arguments: Table
    batch_size: int
    rate: float
    steps: int = 1
    each: int | None = None
    alpha: float | None = None

    def federation(self, seed: int, architecture: Table | None = None) -> Federation:
        """The federation, with a malicious server's architecture if one is given."""
        slices = {} if self.each is None else {"batch_size": self.each}
        local: Table = {"use": "local_sgd", "rate": self.rate, "steps": self.steps, **slices}
        skew = {} if self.alpha is None else {"partition": "dirichlet", "alpha": self.alpha}
        data = {"use": self.data, "batch_size": self.batch_size, **skew}
        model = {"use": self.model, **self.arguments}
        if architecture is not None:
            model["architectures"] = [architecture]
        return Federation(Protocol(seed, 1, CLIENTS, data, model, (local,)))


def _settings(data: str, model: str, rate: float, **arguments: object) -> tuple[GuardSetting, ...]:
    """FedSGD with one example and with eight, FedAvg with uneven labels."""
    one = GuardSetting(data, model, arguments, 1, rate)
    return one, replace(one, batch_size=8), replace(one, batch_size=16, rate=rate / 2, steps=4, each=4, alpha=0.5)


NETWORKS: Mapping[str, tuple[GuardSetting, ...]] = {
    "lenet, MNIST": _settings("mnist5k", "lenet", 0.1),
    "mlp, MNIST": _settings("mnist5k", "mlp", 0.1, hidden=[256]),
    "convnet 16, CIFAR-10": _settings("cifar10", "convnet", 0.05, width=16),
}
OTHERS: Mapping[str, tuple[GuardSetting, ...]] = {  # for server attacks that need a special network
    "lenet without strides, MNIST": _settings("mnist5k", "lenet", 0.1, stride=1),
}


@dataclass(frozen=True, eq=False)
class InspectedRound:
    """The weights that one client receives in one round, and those of the round before, None in the first."""

    federation: Federation
    client: int
    round: int
    params: Params
    previous: Params | None

    def findings(self, params: Params | None = None, agreed: str = "") -> DetectorResults:
        """Inspect the received weights, or others in their place."""
        given = self.params if params is None else params
        return inspect(self.probes, given, self.previous, agreed=agreed, rng=self.rng("inspection"))

    @property
    def probes(self) -> ProbeSet:
        """The examples on which the client probes weights."""
        fed = self.federation
        probe = probe_examples(fed.shards, self.client, fed.shards.rows_at(self.client, self.round))
        return ProbeSet(fed.model, probe, fed.loss, fed.shards.dataset.normalise)

    def rng(self, purpose: str) -> Generator:
        """A random generator of this round and client."""
        return generator(self.federation.protocol.seed, purpose, self.client, self.round)

    def crafted(self, server_attack: ServerAttack) -> Params:
        """The weights that a malicious server sends instead; ValueError if the network lacks what the attack needs."""
        known = public_knowledge(self.federation)
        return craft_weights(server_attack, "server attack", self.params, known, self.rng("malice"))


def honest(fed: Federation, rounds: int) -> Iterator[InspectedRound]:
    """Rounds of an honest federation, each seen by another client."""
    previous: Params | None = None
    for now in honest_rounds(fed, rounds):
        yield InspectedRound(fed, now.round % CLIENTS, now.round, now.params, previous)
        previous = now.params


def inspected_rounds(settings: Sequence[GuardSetting], n: int, seed: int) -> list[DetectorResults]:
    """Inspection results of n honest rounds, spread over the settings."""
    shares = [n // len(settings) + (i < n % len(settings)) for i in range(len(settings))]
    return [
        inspected.findings(agreed=fingerprint(inspected.federation.model))
        for i, (setting, share) in enumerate(zip(settings, shares, strict=True))
        for inspected in honest(setting.federation(seed + i), share)
    ]


# ----------------------------------------------------------------------------------------------------- malicious rounds


ARGUMENTS: Mapping[str, Table] = {"feature_fishing": {"target": 0}}  # that have no default


class AttackTrial(NamedTuple):
    """One server attack in one round: findings of a client that knows the agreed network, and of one that does not."""

    first: bool
    agreed: DetectorResults
    unknown: DetectorResults


def attempts(server_attack: ServerAttack, setting: GuardSetting, rounds: int, seed: int) -> list[AttackTrial]:
    """A server attack in each of the first rounds; empty if the network lacks what it needs."""
    normal = fingerprint(setting.federation(seed).model)
    crafted = _crafted(server_attack, honest(setting.federation(seed, server_attack.architecture), rounds))
    return [AttackTrial(r.previous is None, r.findings(sent, normal), r.findings(sent)) for r, sent in crafted]


def _crafted(server_attack: ServerAttack, rounds: Iterable[InspectedRound]) -> Iterator[tuple[InspectedRound, Params]]:
    """The rounds with what is sent in them; none if the network lacks what the server attack needs."""
    for i, inspected in enumerate(rounds):
        try:
            params = inspected.crafted(server_attack)
        except ValueError:
            if i:  # it is a defect, as the first round went well
                raise
            return
        yield inspected, params


def persistent_attacks(
    server_attack: ServerAttack, setting: GuardSetting, rounds: int, seed: int
) -> list[DetectorResults]:
    """Results of a client attacked in every round from its first on, so that it remembers only crafted weights; may be empty."""
    policy = InspectionPolicy("log", fingerprint(setting.federation(seed).model))
    state: dict[str, Tensor] = {}
    first = (replace(r, client=0) for r in honest(setting.federation(seed, server_attack.architecture), rounds))
    return [
        policy.findings(r.probes, sent, r.round, state, r.rng("inspection"))
        for r, sent in _crafted(server_attack, first)
    ]


def patient_world(
    n: int = 1, seed: int = 0, iterations: int = 6, networks: Mapping[str, Sequence[GuardSetting]] = NETWORKS
) -> list[ComparedFigure]:
    """Return each server attack's detection rate at a client that has never received honest weights.

    Args:
        n: settings of each network, the middle one first.
        iterations: rounds, with the first.
    """
    rows = []
    for use in SERVER_ATTACK.names():
        for name, settings in {**networks, **OTHERS}.items():
            middle, server_attack = len(settings) // 2, example_of(use)
            chosen = [settings[(middle + i) % len(settings)] for i in range(min(n, len(settings)))]
            tried = (persistent_attacks(server_attack, s, iterations, seed + i) for i, s in enumerate(chosen))
            if alarms := [bool(found.alarms) for results in tried for found in results]:
                rows.append(_rate(name, use, "detected", alarms))
    return rows


def guard_world(
    n: int = 200, seed: int = 0, iterations: int = 6, networks: Mapping[str, Sequence[GuardSetting]] = NETWORKS
) -> list[ComparedFigure]:
    """False alarms in n honest rounds of each network, and how often each server attack is detected.

    `detected` counts from a client's second round on; `detected_first` counts its first; `detected_by_weights` is for a client
    that does not know the agreed network.

    Args:
        iterations: malicious rounds of each server attack on each network, at least 2.
    """
    rows, every = [], []
    for name, settings in networks.items():
        alarms = [bool(result.alarms) for result in inspected_rounds(settings, n, seed)]
        every += alarms
        rows.append(_rate(name, "none", "false_alarms", alarms, FALSE_ALARMS))
    rows.append(_rate("all networks", "none", "false_alarms", every, FALSE_ALARMS))
    for use in SERVER_ATTACK.names():
        for name, settings in {**networks, **OTHERS}.items():
            if trials := attempts(example_of(use), settings[len(settings) // 2], iterations, seed):
                rows += _detection(name, use, trials)
    return rows


def _detection(name: str, use: str, trials: Sequence[AttackTrial]) -> list[ComparedFigure]:
    later = [trial.agreed for trial in trials if not trial.first]
    rows = [
        _rate(name, use, "detected", [bool(found.alarms) for found in later], 1.0),
        _rate(name, use, "detected_first", [bool(trial.agreed.alarms) for trial in trials if trial.first]),
    ]
    if example_of(use).architecture is not None:
        rows.append(_rate(name, use, "detected_by_weights", [bool(trial.unknown.alarms) for trial in trials]))
    levels = [found.suspicion for found in later]
    mean = sum(levels) / len(levels)
    return [*rows, ComparedFigure(name, use, "suspicion", 1.0, mean, min(levels), max(levels), len(levels))]


def example_of(use: str) -> ServerAttack:
    """A server attack with its default arguments."""
    built: ServerAttack = build({"use": use, **ARGUMENTS.get(use, {})}, "server_attack", SERVER_ATTACK)
    return built


def _rate(
    cell: str, server_attack: str, metric: str, hits: Sequence[bool], reference: float | None = None
) -> ComparedFigure:
    rate = Rate(sum(hits), len(hits))
    assert rate.fraction is not None
    return ComparedFigure(cell, server_attack, metric, reference, rate.fraction, *rate.interval, rate.n)


if __name__ == "__main__":
    name, output = sys.argv[1:]
    world, n = {"guard": (guard_world, 200), "guard_patient": (patient_world, 1)}[name]
    file = ResultsFile(Path(output), ComparedFigure, head_of(PaperTable(name, "Clients that notice", "", 0)))
    file.write([replace(row, budget=f"n {n}, iterations at most 6") for row in world(n)])
