"""fedgauge doctor SCENARIO.toml: what is wrong with somebody's data, model or loss is told before a run finds it out."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

from fedgauge.client.components import allowing
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.check_result import CheckResult
from fedgauge.simulations.checks.scenario_check import check
from fedgauge.simulations.cli.main import main

MODELS = '''
import itertools
import torch
from torch import nn
from torch.nn import functional as F

class Good(nn.Module):
    def __init__(self, classes, width: int = 4):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, width, 3, stride=4), nn.Linear(width * 49, classes)
    def forward(self, x):
        return self.head(torch.sigmoid(self.conv(x)).flatten(1))

class Dropped(Good):
    def __init__(self, classes):
        super().__init__(classes)
        self.drop = nn.Dropout(0.5)
    def forward(self, x):
        return self.drop(super().forward(x))

class Drawing(Good):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, training=True)

class Pair(Good):
    def forward(self, x):
        return super().forward(x), x

class Once(torch.autograd.Function):
    """A layer whose second derivative lacks a term."""
    @staticmethod
    def forward(x):
        return x.exp()
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].detach().exp()

class Single(Good):
    def forward(self, x):
        return self.head(Once.apply(self.conv(x)).flatten(1))

class Idle(Good):
    def __init__(self, classes):
        super().__init__(classes)
        self.spare = nn.Linear(2, 2)

class Detached(Good):
    def forward(self, x):
        return super().forward(x.detach())

class Rounded(Good):
    def forward(self, x):
        return super().forward((10 * x).round() / 10)

class Vanishing(Good):
    def forward(self, x):
        return self.head(torch.sigmoid(1e-11 * self.conv(x)).flatten(1))

class Looked(Good):
    def __init__(self, classes):
        super().__init__(classes)
        self.colours = nn.Embedding(256, 1)
    def forward(self, x):
        return super().forward(self.colours((9 * x + 99).long().clamp(0, 255))[..., 0])

counter = itertools.count(1)
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data.images import mnist5k
def shuffled() -> Dataset:
    data = mnist5k()
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(next(counter)))
    return Dataset("shuffled", data.x[order], data.y[order], data.x_test, data.y_test, 10, data.mean, data.std)

def total(logits, labels):
    return F.nll_loss(logits.log_softmax(1), labels, reduction="sum")
'''
TABLES: dict[str, Any] = {
    "rounds": 2,
    "clients": 2,
    "data": {"use": "mnist5k", "batch_size": 2, "auxiliary": 100},
    "model": {"use": "doctored:Good"},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
}
Examine = Callable[..., dict[str, CheckResult]]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "doctored.py").write_text(MODELS)
    yield tmp_path
    sys.modules.pop("doctored", None)


@pytest.fixture
def examine(folder: Path) -> Iterator[Examine]:
    with allowing(["doctored"], [folder]):
        yield lambda **changes: {f.name: f for f in check(Scenario.from_tables(TABLES | changes))}


def wrong(found: dict[str, CheckResult]) -> dict[str, str]:
    return {name: f.code for name, f in found.items() if f.needed and not f.works}


def noted(found: dict[str, CheckResult]) -> dict[str, str]:
    return {name: f.code for name, f in found.items() if not f.needed and not f.works}


def test_a_good_scenario_is_found_so_and_replays_to_rounding(examine: Examine) -> None:
    found = examine()
    assert wrong(found) == noted(found) == {}
    assert found["one client's step"].message.endswith("exact to rounding")
    assert all(part in found["data"].message for part in ("4,000 + 1,000 ", "1 x 28 x 28 ", "10 classes"))
    assert "2,010 parameters" in found["model"].message, "4 * 9 + 4 + 196 * 10 + 10"


@pytest.mark.parametrize(
    ("model", "where", "code"),
    [
        ({"use": "doctored:Dropped", "mode": "train"}, "second derivative", "draws"),
        ({"use": "doctored:Drawing"}, "second derivative", "draws"),
        ({"use": "doctored:Pair"}, "model", "no logits"),
        ({"use": "doctored:Single"}, "second derivative", "derivative"),
        ({"use": "doctored:Detached"}, "second derivative", "derivative"),
        ({"use": "doctored:Rounded"}, "second derivative", "derivative"),
    ],
    ids=lambda v: v["use"] if isinstance(v, dict) else "",
)
def test_a_model_that_cannot_be_attacked_is_reported(examine: Examine, model: Any, where: str, code: str) -> None:
    assert wrong(examine(model=model))[where] == code


def test_a_derivative_below_the_rounding_of_the_gradient_lacks_no_part(examine: Examine) -> None:
    assert wrong(examine(model={"use": "doctored:Vanishing"})) == {}


def test_a_network_that_looks_values_up_is_read_no_further(examine: Examine) -> None:
    found = examine(model={"use": "doctored:Looked"}, data={**TABLES["data"], "batch_size": 1})
    assert wrong(found) == {"second derivative": "derivative"}


def test_data_that_come_otherwise_each_time_are_reported(examine: Examine) -> None:
    told = wrong(examine(data={**TABLES["data"], "use": "doctored:shuffled"}))
    assert told["data, built again"] == "two builds"


def test_costs_are_notes(examine: Examine) -> None:
    assert wrong(examine(loss={"use": "doctored:total"})) == {}
    assert noted(examine(model={"use": "doctored:Dropped"})) == {"dropout": "dropout"}
    assert wrong(examine(model={"use": "doctored:Idle"})) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_where_attacks_run_is_reported(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert examine()["devices"].message.endswith(" cpu")
    assert "devices" not in examine(audit={"curious": False}), "nothing is attacked"
    assert examine(audit={"devices": ["cuda:0"]})["devices"].message.startswith("[audit] devices: ")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    found = examine(audit={"devices": "cuda", "precision": "tf32"})["devices"]
    assert found.works
    assert "Ray cluster" in examine(audit={"devices": ["cuda:0"]})["devices"].message


def test_odd_data_are_noted(examine: Examine, tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 40, (400, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "odd.npz", x=x, y=2 * (np.arange(400) % 3))
    odd = {**TABLES["data"], "use": "npz", "path": str(tmp_path / "odd.npz")}
    found = examine(data={**odd, "mean": [0.5], "std": [0.1]})
    assert noted(found)["classes"] == "classes" and "2 classes, " in found["classes"].message
    assert noted(found)["normalisation"] == "normalisation"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"use": "resnet20", "mode": "train"}, "clients": 2},
        {"secure_sum": {"group": 2}, "clients": 4},
        {"chain": [{"use": "gaussian", "sigma": 0.1}, *TABLES["chain"]]},
    ],
    ids=["batchnorm", "secure sum", "noise"],
)
def test_federations_of_every_kind_replay(examine: Examine, changes: dict[str, Any]) -> None:
    found = examine(**changes)
    assert wrong(found) == {} and "exact to rounding" in found["one client's step"].message


def test_looking_leaves_the_model_as_it_was(folder: Path) -> None:
    scenario = Scenario.from_tables(TABLES | {"model": {"use": "resnet20", "mode": "train"}})
    before = {k: t.clone() for k, t in scenario.federation.model.state_dict().items()}
    check(scenario)
    after = scenario.federation.model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


# ---------------------------------------------------------------------------------------------------- the command itself


def test_the_command_finds_the_users_package_next_to_the_scenario(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(os.sep)
    path = folder / "own.toml"
    path.write_text(tomli_w.dumps(TABLES))
    assert main(["doctor", str(path)]) == 2
    assert "--allow doctored" in capsys.readouterr().err
    assert main(["doctor", str(path), "--allow", "doctored"]) == 0
    assert "exact to rounding" in capsys.readouterr().out
    assert main(["doctor", str(path), "--allow", "doctored", "--set", "model.use=doctored:Drawing"]) == 2
    told = capsys.readouterr().out
    assert "wrong" in told and "draws random numbers" in told
    assert main(["doctor", str(path), "--allow", "fedgauge"]) == 2
    assert "--allow" in capsys.readouterr().err
    assert "doctored" not in os.environ.get("FEDGAUGE_ALLOW", "")
