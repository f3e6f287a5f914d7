"""The preflight: what it says of a scenario is what an audit would find, and no client's data is touched for it."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.attacks.gaussian_prior import public_priors
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.limits import bayes_limit
from fedgauge.attacks.membership.limit import power
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import allowing
from fedgauge.client.data.batches import Shards
from fedgauge.client.rng import generator
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.preflight import Finding, closed_forms, preflight
from fedgauge.simulations.cli.main import main

SGD = {"use": "local_sgd", "rate": 0.1}
MLP = {"use": "mlp", "hidden": [32]}


@pytest.fixture(autouse=True)
def private(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*arguments: Any) -> None:
        raise AssertionError("a client's data was asked for")

    monkeypatch.setattr(Shards, "batch_at", touched)


def scenario(**changes: Any) -> Scenario:
    tables: dict[str, Any] = {
        "rounds": 5,
        "clients": 3,
        "data": {"use": "mnist5k", "auxiliary": 200},
        "model": MLP,
        "chain": [SGD],
    }
    return Scenario.from_tables(tables | changes)


def finding(found: list[Finding], *words: str) -> Finding:
    """The one finding that has these words."""
    having = [f for f in found if all(w in f.words for w in words)]
    assert len(having) == 1, f"{words}: {[f.words for f in found]}"
    return having[0]


def test_an_mlp_of_one_example_is_read_off() -> None:
    found = preflight(scenario())
    assert finding(found, "8 of 8 simulated").severity == "leaks"
    assert finding(found, "labels: 100\u00a0%").severity == "leaks"
    assert finding(found, "no defense").severity == "leaks"
    assert [f.severity for f in found][:3] == ["leaks"] * 3, "the worst first"


CHAINED = """
from torch import nn


def net(shape, classes, width=8, pooled=False):
    body = nn.Sequential(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten())
    return nn.Sequential(nn.MaxPool2d(2), nn.Upsample(28), body, nn.Linear(196 * width, classes)) if pooled else nn.Sequential(
        body, nn.Linear(196 * width, classes))
"""


def test_a_chain_of_layers_is_exact_or_names_what_stays_open(tmp_path: Path) -> None:
    """By counting: 8 channels give 1,568 values and 72 gradients for 784 pixels, one channel gives 196 and 9."""
    (tmp_path / "chained_layers.py").write_text(CHAINED)
    with allowing(["chained_layers"], [tmp_path]):
        (wide,) = closed_forms(scenario(model={"use": "chained_layers:net"}))
        assert wide.severity == "leaks" and "2 of 2 simulated" in wide.words
        (narrow,) = closed_forms(scenario(model={"use": "chained_layers:net", "width": 1}))
        (left,) = re.findall(r"layer '0.0': (\d+) of 784", narrow.words)
        assert narrow.severity == "note" and int(left) == pytest.approx(579, abs=5)
        (pooled,) = closed_forms(scenario(model={"use": "chained_layers:net", "pooled": True}))
        assert "max_pool2d" in pooled.words


def test_an_example_that_alone_excites_a_neuron_is_reported() -> None:
    """By hand: of 300 random neurons nearly every one of two digits has one of its own; clipping each leaves the quotient."""
    data = {"use": "mnist5k", "batch_size": 2, "auxiliary": 200}
    wide = preflight(scenario(model={**MLP, "hidden": [300]}, data=data))
    assert finding(wide, "16 of 16 simulated", "(read_rows").severity == "leaks"
    narrow = preflight(scenario(model={**MLP, "hidden": [2]}, data={"use": "mnist5k", "batch_size": 64}))
    assert finding(narrow, "read_rows").severity == "note"
    chain = [SGD, {"use": "gaussian", "sigma": 0.1}]
    noisy = preflight(scenario(data=data, chain=chain))
    assert finding(noisy, "read_rows").severity == "note", "noise disturbs what it reads"


@pytest.mark.parametrize(
    "link",
    [
        {"use": "clip", "max_norm": 0.1, "each": True},
        pytest.param({"use": "mixup", "alpha": 1.0}, marks=pytest.mark.full),
        pytest.param({"use": "ats", "policy": "7-4-15"}, marks=pytest.mark.full),
    ],
    ids=["clip each", "mixup", "ats"],
)
def test_what_leaves_the_quotient_of_a_row_does_not_hide_what_was_trained_on(link: dict[str, Any]) -> None:
    data = {"use": "mnist5k", "batch_size": 2, "auxiliary": 200}
    wide = scenario(model={**MLP, "hidden": [200]}, data=data, chain=[link, SGD])
    assert finding(preflight(wide), "read off", "(read_rows").severity == "leaks"


@pytest.mark.parametrize("group", [2, 4])
def test_a_secure_sum_is_examined_as_a_batch(group: int) -> None:
    found = preflight(scenario(clients=4, secure_sum={"group": group}))
    assert f"{group} examples" in finding(found, "unknown pixels").words
    assert not [f for f in found if "no defense" in f.words]


def test_the_limit_is_the_auditors_and_strong_noise_holds() -> None:
    def noisy(sigma: float) -> Scenario:
        return scenario(chain=[{"use": "gaussian", "sigma": sigma}, SGD])

    weak = noisy(1e-3)
    told = finding(preflight(weak), "one round")
    auditor = Auditor(FederationSource(weak.federation), weak.plan.seed)
    known = auditor.knowledge(PlannedAttack("limit", {"use": "idlg"}))
    mse = bayes_limit(
        known,
        weak.federation.initial()[0],
        public_priors(weak.federation.shards),
        generator(weak.plan.seed, "preflight"),
    )
    assert f"{min(60.0, -10 * math.log10(mse)):.1f} dB as" in told.words
    assert told.severity == "weak" and told.change
    assert finding(preflight(noisy(100.0)), "one round").severity == "holds"
    assert finding(preflight(scenario()), "no limit").severity == "weak"


def test_membership_is_estimated_from_norms_and_noise() -> None:
    """Clipped gradients far above the bound have its norm, so that mu is bound / (batch size * sigma) on paper."""
    clip = {"use": "clip", "max_norm": 0.01, "each": True}
    chosen = scenario(chain=[clip, {"use": "gaussian", "sigma": 0.004}, SGD], data={"use": "mnist5k", "auxiliary": 200})
    mu = 0.01 / 0.004
    often = mu * math.sqrt(max(1.0, 5 / min(map(len, chosen.federation.shards.indices))))
    told = finding(preflight(chosen), "batch membership")
    assert told.severity == "weak"
    assert f"at least {100 * power(0.01, mu):.0f}\u00a0%" in told.words
    assert f"{100 * power(0.01, often):.0f}\u00a0% after all" in told.words
    strong = scenario(chain=[clip, {"use": "gaussian", "sigma": 0.1}, SGD])
    assert finding(preflight(strong), "batch membership").severity == "holds"
    assert finding(preflight(scenario()), "batch membership", "no noise").severity == "weak"


def test_epsilon_is_reported_where_it_holds_and_why_where_it_does_not() -> None:
    certain = [
        {"use": "clip", "max_norm": 1.0, "each": True},
        {"use": "gaussian", "sigma": 50.0},
    ]
    assert "delta 1e-05; 5 rounds" in finding(preflight(scenario(chain=[*certain, SGD])), "every client").words
    signed = preflight(scenario(chain=[SGD, {"use": "sign"}]))
    assert finding(signed, "no epsilon").severity == "note"


BROUGHT = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, classes):
        super().__init__(nn.Conv2d(1, 2, 3, stride=4), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(98, classes))
"""


def test_batch_statistics_and_local_steps_are_reported(tmp_path: Path) -> None:
    norms = preflight(scenario(model={"use": "convnet", "width": 1, "mode": "train"}))
    told = finding(norms, "BatchNorm in train mode ('norm0'")
    assert told.severity == "leaks" and "GroupNorm" in told.change
    with allowing(["brought_norm"], [tmp_path]):
        (tmp_path / "brought_norm.py").write_text(BROUGHT)
        theirs = finding(
            preflight(scenario(model={"use": "brought_norm:Net", "mode": "train"})),
            "BatchNorm in train mode",
            "uploaded",
        )
    assert "GroupNorm" in theirs.change
    assert "2 local steps" in finding(preflight(scenario(chain=[{**SGD, "steps": 2}])), "unroll").words


def test_the_command_prints_both_ways_and_refuses_mistakes(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.toml"
    path.write_text(tomli_w.dumps(dict(scenario().tables)))
    assert main(["preflight", str(path), "--set", "model.hidden=[16]"]) == 0
    shown = capsys.readouterr().out
    assert "leaks" in shown and "change:" in shown
    assert main(["preflight", str(path), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert {f["severity"] for f in read["findings"]} <= {"leaks", "weak", "unknown", "note", "holds"}
    assert main(["preflight", str(tmp_path / "no.toml")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_every_ready_scenario_can_be_examined(make_scenario: Callable[..., Scenario]) -> None:
    assert preflight(make_scenario())
