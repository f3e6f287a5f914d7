"""What clients' guards notice in real runs: no alarm at honest weights, and one at each server attack's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run.in_memory import train

NETWORKS: Mapping[str, dict[str, Any]] = {
    "mlp": {"use": "mlp", "hidden": [256]},
    "lenet": {"use": "lenet"},
    "lenet without strides": {"use": "lenet", "stride": 1},
}
FEDSGD = {"use": "local_sgd", "rate": 0.1}
FEDAVG = {"use": "local_sgd", "rate": 0.05, "steps": 4, "batch_size": 4}
UNEVEN = {"partition": "dirichlet", "alpha": 0.5}
# of rows never seen in another order nobody can say that they were swapped; an MLP's components look like any weights
ONLY_LATER = {"label_flipping", "optimised_features"}
QUICK = ("label_flipping", "trap_weights")


def alarms(folder: Path, **changes: Any) -> dict[int, list[bool]]:
    """Train in this process; whether each client's guard alarmed, by round."""
    tables = {
        "seed": 5,
        "rounds": 2,
        "clients": 4,
        "data": {"use": "mnist5k", "batch_size": 8},
        "model": NETWORKS["mlp"],
        "chain": [FEDSGD],
        "guard": {"inspect": "log"},
        "audit": {"curious": False},
    }
    run = Run.create(folder, Scenario.from_tables(tables | changes))
    train(run)
    with run.ledger() as ledger:
        seen = ledger.observations()
    assert all(o["status"] == "accepted" and "suspicion" in o["reason"] for o in seen)
    return {r: [bool(o["alarm"]) for o in seen if o["round"] == r] for r in {o["round"] for o in seen}}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("network", ["mlp", "lenet"])
@pytest.mark.parametrize(("batch_size", "local", "skew"), [(8, FEDSGD, {}), (16, FEDAVG, UNEVEN)])
def test_honest_rounds_raise_no_alarm(
    network: str, batch_size: int, local: dict[str, Any], skew: dict[str, Any], tmp_path: Path
) -> None:
    data = {"use": "mnist5k", "batch_size": batch_size, **skew}
    found = alarms(tmp_path / "run", rounds=10, data=data, model=NETWORKS[network], chain=[local])
    assert [len(told) for told in found.values()] == [4] * 10
    assert not any(map(any, found.values()))


@pytest.mark.parametrize(
    "use",
    [pytest.param(u, marks=[] if u in QUICK else [pytest.mark.full, pytest.mark.slow]) for u in SERVER_ATTACK.names()],
)
def test_every_server_attack_is_noticed(use: str, tmp_path: Path) -> None:
    """By clients that know the network; what only a comparison with earlier weights shows, not in the first round."""
    network = "lenet without strides" if use == "identity_convolutions" else "mlp"
    attack = {"use": use, **({"target": 0} if use == "feature_fishing" else {})}
    chosen = {"server": "malicious", "model": NETWORKS[network]}
    first = alarms(tmp_path / "first", **chosen, rounds=1, server_attack=[attack])
    assert first == {1: [use not in ONLY_LATER] * 4}
    later = alarms(tmp_path / "later", **chosen, server_attack=[{**attack, "rounds": [2]}])
    assert all(later[2])
