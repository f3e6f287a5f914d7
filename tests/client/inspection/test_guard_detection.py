"""What a client's inspection is worth: few false alarms over honest rounds, and no dishonest server unseen."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Generator

from fedgauge.attacks.base import Knowledge, Observation
from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK, ServerAttack
from fedgauge.client.federation import Federation
from fedgauge.client.inspection.policy import inspect
from fedgauge.client.inspection.results import THRESHOLDS
from fedgauge.client.update import Params
from fedgauge.simulations.papers.malicious_servers import guard_detection
from fedgauge.simulations.papers.malicious_servers.guard_detection import (
    NETWORKS,
    OTHERS,
    AttackTrial,
    GuardSetting,
    attempts,
    example_of,
    guard_world,
    honest,
    inspected_rounds,
    persistent_attacks,
)

SMALL = {name: NETWORKS[name] for name in ("mlp, MNIST",)}
ONLY_NETWORK = ("carried_input", "reversible_blocks")  # weights of theirs are as honest ones: their architecture is not
# of rows that were never seen in another order nobody can say that they were swapped; an MLP's components look like any weights
ONLY_LATER = ("label_flipping", "optimised_features")


def tried(use: str) -> list[AttackTrial]:
    for settings in {**SMALL, **OTHERS}.values():
        if made := attempts(example_of(use), settings[1], 2, 5):
            return made
    raise AssertionError(f"{use} applies to no network here")


@pytest.mark.parametrize("use", SERVER_ATTACK.names())
def test_every_malice_is_seen_by_a_client_that_knows_the_network_and_the_last_round(use: str) -> None:
    first, later = tried(use)
    assert later.agreed.alarms, later.agreed
    assert (first.first, later.first) == (True, False)
    assert bool(first.agreed.alarms) == (use not in ONLY_LATER)
    assert bool(later.unknown.alarms) == (use not in ONLY_NETWORK)


@pytest.mark.parametrize(("use", "seen"), [("class_fishing", True), ("label_flipping", False)])
def test_who_never_met_honest_weights_misses_what_only_a_comparison_shows(use: str, seen: bool) -> None:
    """What raised no alarm is what the next round is compared with."""
    found = persistent_attacks(example_of(use), SMALL["mlp, MNIST"][1], 3, 5)
    assert [bool(f.alarms) for f in found] == [seen] * 3


def test_honest_rounds_of_the_networks_at_hand_raise_no_alarm() -> None:
    found = inspected_rounds(NETWORKS["lenet, MNIST"], 12, 40) + inspected_rounds(NETWORKS["mlp, MNIST"], 12, 40)
    assert [f.reasons for f in found if f.alarms] == []
    assert len(found) == 24
    assert max(f.suspicion for f in found) > 0.05, "it looked"


@pytest.mark.parametrize(("hidden", "seed", "rounds"), [(16, 7, 6), (256, 5, 5), (64, 2, 10)])
def test_a_client_that_trains_alone_on_one_example_a_round_does_not_jump(
    hidden: int, seed: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last layer moves by up to 2.2 times its size: of 24 such trainings those in which it moves most."""
    monkeypatch.setattr(guard_detection, "CLIENTS", 1)
    met = list(honest(GuardSetting("mnist5k", "mlp", {"hidden": [hidden]}, 1, 0.1).federation(seed), rounds))
    scores = [f.score for m in met[1:] for f in m.findings().results if f.detector == "jump"]
    assert len(scores) == rounds - 1 and 0.5 < max(scores) < THRESHOLDS["jump"]


def test_a_jump_that_only_a_comparison_shows_is_seen_a_round_later_too() -> None:
    first, second = honest(NETWORKS["mlp, MNIST"][1].federation(0), 2)
    found = inspect(
        second.probes,
        second.crafted(example_of("optimised_features")),
        first.params,
        apart=2,
        rng=second.rng("inspection"),
    )
    assert {f.detector for f in found.alarms} == {"jump"}


def test_honest_rounds_are_federated_averaging() -> None:
    """Two rounds by hand: the mean of the clients' updates is added."""
    fed = NETWORKS["mlp, MNIST"][1].federation(3)
    first, second = honest(fed, 2)
    updates = [fed.client_update(first.params, {}, c, 1) for c in range(guard_detection.CLIENTS)]
    for name, t in second.params.items():
        torch.testing.assert_close(t, first.params[name] + sum(u[name] for u in updates) / len(updates))
    assert first.previous is None
    assert second.previous is first.params


@dataclass(frozen=True)
class breaking(ServerAttack):
    """Sends what it was given, and breaks from its n-th round on."""

    n: int
    met: list[Knowledge] = field(default_factory=list)

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        self.met.append(known)
        if len(self.met) >= self.n:
            raise ValueError("a defect of its own")
        return sent


def test_a_malice_says_in_its_first_round_alone_that_it_does_not_apply() -> None:
    setting = NETWORKS["mlp, MNIST"][1]
    assert attempts(breaking(1), setting, 3, 0) == []
    with pytest.raises(ValueError, match="a defect of its own"):
        attempts(breaking(3), setting, 3, 0)
    assert len(attempts(breaking(4), setting, 3, 0)) == 3


def test_a_malice_knows_what_a_server_knows() -> None:
    server_attack, protocol = breaking(2), NETWORKS["mlp, MNIST"][1].federation(0).protocol
    fed = Federation(replace(protocol, loss={"use": "mean_squared_error"}))
    next(honest(fed, 1)).crafted(server_attack)
    (known,) = server_attack.met
    assert known.loss is fed.loss
    assert known.model is fed.model
    assert (known.batch_size, known.classes, known.shape) == (8, 10, (1, 28, 28))


def test_rows_say_how_many_of_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_detection, "OTHERS", {})
    monkeypatch.setattr(type(SERVER_ATTACK), "names", lambda _: ["label_flipping"])
    rows = {(r.cell, r.attack, r.metric): r for r in guard_world(6, 0, 3, SMALL)}
    alarms = rows["mlp, MNIST", "none", "false_alarms"]
    assert (alarms.here, alarms.n, alarms.low) == (0, 6, pytest.approx(0, abs=1e-12))
    assert alarms.high == pytest.approx(0.3903, abs=1e-4), "Wilson's interval for 0 of 6"
    assert rows["all networks", "none", "false_alarms"].n == 6
    flipped = rows["mlp, MNIST", "label_flipping", "detected"]
    assert (flipped.here, flipped.n) == (1, 2)
    assert rows["mlp, MNIST", "label_flipping", "detected_first"].here == 0
    assert ("mlp, MNIST", "label_flipping", "detected_by_weights") not in rows
