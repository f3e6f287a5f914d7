"""Vigilance: how often a client's inspection cries wolf in honest rounds, and what of a dishonest server it sees.

Thresholds were chosen on honest rounds of other networks, settings and seeds (TUNING) than those that are reported.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Generator, Tensor

from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK, ServerAttack
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.components import Table, build
from fedgauge.client.federation import Federation
from fedgauge.client.inspection.policy import InspectionPolicy, fingerprint, inspect
from fedgauge.client.inspection.probes import ProbeSet, probe_examples
from fedgauge.client.inspection.results import DetectorResults
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.update import Params, average
from fedgauge.server.views.intervals import Rate
from fedgauge.simulations.experiments.gaussian_world import WorldFigure

CLIENTS = 4
FALSE_ALARMS = 0.01  # of honest rounds, at most


@dataclass(frozen=True)
class GuardSetting:
    """A network on data, and how it is trained locally.

    Args:
        data, model: of fedgauge.client.data.images and fedgauge.client.models.vision; arguments: the model's.
        batch_size: examples a round; each: of them in each local step, None: all.
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

    def federation(self, seed: int, dishonest: Table | None = None) -> Federation:
        """Built, with a dishonest server's architecture if one is given."""
        slices = {} if self.each is None else {"batch_size": self.each}
        local: Table = {"use": "local_sgd", "rate": self.rate, "steps": self.steps, **slices}
        skew = {} if self.alpha is None else {"partition": "dirichlet", "alpha": self.alpha}
        data = {"use": self.data, "batch_size": self.batch_size, **skew}
        model = {"use": self.model, **self.arguments}
        if dishonest is not None:
            model["architectures"] = [dishonest]
        return Federation(Protocol(seed, 1, CLIENTS, data, model, (local,)))


def _ways(data: str, model: str, rate: float, **arguments: object) -> tuple[GuardSetting, ...]:
    """FedSGD with one example and with eight, FedAvg with uneven labels."""
    one = GuardSetting(data, model, arguments, 1, rate)
    return one, replace(one, batch_size=8), replace(one, batch_size=16, rate=rate / 2, steps=4, each=4, alpha=0.5)


NETWORKS: Mapping[str, tuple[GuardSetting, ...]] = {
    "lenet, MNIST": _ways("mnist5k", "lenet", 0.1),
    "mlp, MNIST": _ways("mnist5k", "mlp", 0.1, hidden=[256]),
    "convnet 16, CIFAR-10": _ways("cifar10", "convnet", 0.05, width=16),
}
OTHERS: Mapping[str, tuple[GuardSetting, ...]] = {  # for what needs a network of its own kind
    "lenet without strides, MNIST": _ways("mnist5k", "lenet", 0.1, stride=1),
}
TUNING: Mapping[str, tuple[GuardSetting, ...]] = {
    "lenet, CIFAR-10": _ways("cifar10", "lenet", 1.0),
    "mlp of tanh, CIFAR-10": _ways("cifar10", "mlp", 0.1, hidden=[64], activation="tanh"),
    "mlp of two layers, MNIST": _ways("mnist5k", "mlp", 0.2, hidden=[128, 64]),
    "convsmall, MNIST": _ways("mnist5k", "convsmall", 0.1),
    "convnet 8 with group norm, CIFAR-10": _ways("cifar10", "convnet", 0.1, width=8, norm="group"),
}


@dataclass(frozen=True, eq=False)
class InspectedRound:
    """What one client meets in one round.

    Args:
        previous: None in the first round.
    """

    federation: Federation
    client: int
    round: int
    params: Params
    previous: Params | None

    def findings(self, params: Params | None = None, agreed: str = "") -> DetectorResults:
        """Of the weights that came, or of others in their place."""
        given = self.params if params is None else params
        return inspect(self.probes, given, self.previous, agreed=agreed, rng=self.rng)

    @property
    def probes(self) -> ProbeSet:
        """What the client tries weights on."""
        fed = self.federation
        probe = probe_examples(fed.shards, self.client, fed.shards.rows_at(self.client, self.round))
        return ProbeSet(fed.model, probe, fed.loss, fed.shards.dataset.normalise)

    @property
    def rng(self) -> Generator:
        """The inspection's."""
        return generator(self.federation.protocol.seed, "inspection", self.client, self.round)

    def crafted(self, server_attack: ServerAttack) -> Params:
        """What a dishonest server sends in their place; ValueError where the network does not have what it needs."""
        rng = generator(self.federation.protocol.seed, "malice", self.client, self.round)
        return server_attack.craft(self.params, public_knowledge(self.federation), rng)


def honest(fed: Federation, rounds: int) -> Iterator[InspectedRound]:
    """Rounds of an honest federation as one of its clients meets them, another one in each."""
    params, buffers = fed.initial()
    previous: Params | None = None
    for round in range(1, rounds + 1):
        yield InspectedRound(fed, round % CLIENTS, round, params, previous)
        mean = average([fed.own_update(params, buffers, c, round) for c in range(CLIENTS)], [1] * CLIENTS)
        previous, params = params, {k: t + mean[k] for k, t in params.items()}


def inspected_rounds(settings: Sequence[GuardSetting], n: int, seed: int) -> list[DetectorResults]:
    """What inspection finds in n honest rounds, spread over the settings."""
    shares = [n // len(settings) + (i < n % len(settings)) for i in range(len(settings))]
    return [
        moment.findings(agreed=fingerprint(moment.federation.model))
        for i, (setting, share) in enumerate(zip(settings, shares, strict=True))
        for moment in honest(setting.federation(seed + i), share)
    ]


# ----------------------------------------------------------------------------------------------------- dishonest rounds


ARGUMENTS: Mapping[str, Table] = {"feature_fishing": {"target": 0}}  # where it needs some


@dataclass(frozen=True, eq=False)
class AttackTrial:
    """One malice in one round of one client.

    Args:
        first: it was the client's first round, with nothing to compare.
        agreed: what is found by a client that knows the network which was agreed on; alone: by one that does not.
    """

    first: bool
    agreed: DetectorResults
    alone: DetectorResults


def attempts(server_attack: ServerAttack, setting: GuardSetting, rounds: int, seed: int) -> list[AttackTrial]:
    """A malice in each of the first rounds; none where the network does not have what it needs."""
    normal = fingerprint(setting.federation(seed).model)
    moments = honest(setting.federation(seed, server_attack.architecture), rounds)
    first = next(moments)
    try:
        params = first.crafted(server_attack)
    except ValueError:  # a malice's word that the network lacks what it needs: it says so at once, or has a defect
        return []
    met = itertools.chain([(first, params)], ((moment, moment.crafted(server_attack)) for moment in moments))
    return [AttackTrial(m.previous is None, m.findings(sent, normal), m.findings(sent)) for m, sent in met]


def persistent_attacks(
    server_attack: ServerAttack, setting: GuardSetting, rounds: int, seed: int
) -> list[DetectorResults]:
    """A malice that one client meets in every round from its first on, so that it remembers crafted weights; none as above."""
    inspection_policy, memory = (
        InspectionPolicy("log", fingerprint(setting.federation(seed).model)),
        dict[str, Tensor](),
    )
    found: list[DetectorResults] = []
    for met in honest(setting.federation(seed, server_attack.architecture), rounds):
        moment = replace(met, client=0)
        try:
            params = moment.crafted(server_attack)
        except ValueError:
            if found:
                raise
            return []
        found.append(inspection_policy.findings(moment.probes, params, moment.round, memory, moment.rng))
    return found


def patient_world(
    n: int = 1, seed: int = 0, iterations: int = 6, networks: Mapping[str, Sequence[GuardSetting]] = NETWORKS
) -> list[WorldFigure]:
    """How often every malice there is gets detected by a client who never met honest weights.

    Args:
        n: settings of each network, the middle one first.
        iterations: rounds, the first among them.
    """
    rows = []
    for use in SERVER_ATTACK.names():
        for name, settings in {**networks, **OTHERS}.items():
            middle = len(settings) // 2
            chosen = [settings[(middle + i) % len(settings)] for i in range(min(n, len(settings)))]
            found = [
                f
                for i, setting in enumerate(chosen)
                for f in persistent_attacks(_named(use), setting, iterations, seed + i)
            ]
            if found:
                rows.append(_rate(name, use, "detected", [bool(f.alarms) for f in found]))
    return rows


def guard_world(
    n: int = 200, seed: int = 0, iterations: int = 6, networks: Mapping[str, Sequence[GuardSetting]] = NETWORKS
) -> list[WorldFigure]:
    """False alarms in n honest rounds of each network, and how often every malice there is gets detected.

    `detected` is from a client's second round on; `detected_first` in its first; `detected_by_weights` by a client that does
    not know which network was agreed on.

    Args:
        iterations: dishonest rounds of each malice on each network, at least 2.
    """
    rows, every = [], []
    for name, settings in networks.items():
        alarms = [bool(found.alarms) for found in inspected_rounds(settings, n, seed)]
        every += alarms
        rows.append(_rate(name, "none", "false_alarms", alarms, FALSE_ALARMS))
    rows.append(_rate("all networks", "none", "false_alarms", every, FALSE_ALARMS))
    for use in SERVER_ATTACK.names():
        rows += _of_malice(use, {**networks, **OTHERS}, max(iterations, 2), seed)
    return rows


def _of_malice(use: str, networks: Mapping[str, Sequence[GuardSetting]], rounds: int, seed: int) -> list[WorldFigure]:
    server_attack = _named(use)
    short, rows = use, []
    for name, settings in networks.items():
        made = attempts(server_attack, settings[len(settings) // 2], rounds, seed)
        later = [a for a in made if not a.first]
        if not made:
            continue
        rows.append(_rate(name, short, "detected", [bool(a.agreed.alarms) for a in later], 1.0))
        rows.append(_rate(name, short, "detected_first", [bool(a.agreed.alarms) for a in made if a.first]))
        if server_attack.architecture is not None:
            rows.append(_rate(name, short, "detected_by_weights", [bool(a.alone.alarms) for a in made]))
        levels = [a.agreed.suspicion for a in later]
        mean = sum(levels) / len(levels)
        rows.append(WorldFigure(name, short, "suspicion", 1.0, mean, min(levels), max(levels), len(levels)))
    if not rows:
        raise RuntimeError(f"{use} applies to none of {', '.join(networks)}: add a network that has what it needs")
    return rows


def _named(use: str) -> ServerAttack:
    found: ServerAttack = build({"use": use, **ARGUMENTS.get(use, {})}, "server_attack", SERVER_ATTACK)
    return found


def _rate(
    cell: str, server_attack: str, metric: str, hits: Sequence[bool], reference: float | None = None
) -> WorldFigure:
    rate = Rate(sum(hits), len(hits))
    assert rate.fraction is not None
    return WorldFigure(cell, server_attack, metric, reference, rate.fraction, *rate.interval, rate.n)
