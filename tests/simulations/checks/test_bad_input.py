"""What somebody brings and cannot be trained or attacked as it is: named before anything is trained, with the remedy."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console

from fedgauge.client.components import SpecError, allowing
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.preflight import preflight
from fedgauge.simulations.checks.scenario_check import check, warnings_before
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.deploy.folder import Deployment
from fedgauge.simulations.experiments.sweep import try_cells
from fedgauge.simulations.experiments.sweep_file import Sweep

LOCAL = {"use": "local_sgd", "rate": 0.1}
HERE = Path(__file__).parent
TABLES: dict[str, Any] = {
    "rounds": 1,
    "clients": 2,
    "data": {"use": "mnist5k", "batch_size": 2, "auxiliary": 100},
    "model": {"use": "brought:Good"},
    "chain": [LOCAL],
    "attack": [{"use": "inverting_gradients", "iterations": 20}],
}


def model(name: str) -> dict[str, Any]:
    return {"model": {"use": f"brought:{name}"}}


def defense(name: str, **table: Any) -> dict[str, Any]:
    return {"chain": [{"use": f"brought:{name}", **table}, LOCAL]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # what is brought, and what the sentence names
    "shape": (model("Colour"), "'body.0' (Conv2d)"),
    "logits": (model("Fewer"), "(4, 7)"),
    "second argument": (model("Masked"), "(x, mask)"),
    "list": (model("Listed"), "'head.weight'"),
    "checkpoint": (model("Checkpointed"), "'conv' (Conv2d)"),
    "lazy": (model("Lazy"), "layer '1' is lazy"),
    "nan": (model("NotANumber"), "'head' (Linear)"),
    "overflow": (model("Overflowing"), "'conv' (Conv2d)"),
    "drops": (defense("dropping"), "which parameters"),
    "doubles": (defense("doubled"), "torch.float64"),
    "divides": (defense("dividing"), "not finite"),
    "draws": (defense("drawing_by_itself"), "generator=rng"),
    "noise if given": (defense("undeclared_if_given"), "declares none"),
    "raises": (defense("failing"), "KeyError: 'momentum'"),
}
WARNED: dict[str, tuple[dict[str, Any], str]] = {
    "softmax": (model("Softmax"), "softmax"),
    "float": (defense("scaled_by_a_float"), "differentiate"),
    "noise": (defense("undeclared_noise"), "without a generator"),
    "detached": (defense("detached"), "derivative"),
    "overwrites": (defense("overwriting"), "(overwriting)"),
}


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with allowing(["brought"], [HERE]):
        yield


@pytest.mark.parametrize(("changes", "named"), REFUSED.values(), ids=list(REFUSED))
def test_what_no_client_can_train_with_or_nobody_can_replay_is_refused_in_one_sentence(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(SpecError) as told:
        list(warnings_before(Scenario.from_tables(TABLES | changes)))
    assert named in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(("changes", "named"), WARNED.values(), ids=list(WARNED))
def test_scenarios_without_attack_or_replay_are_reported_before_training(changes: dict[str, Any], named: str) -> None:
    told: list[str] = []
    with suppress(SpecError):  # if for this very reason no planned attack works
        told.extend(warnings_before(Scenario.from_tables(TABLES | changes)))
    assert any(named in text for text in told), told


@pytest.mark.parametrize("changes", [
    model("Good"), model("LogSoftmax"), defense("halving"), defense("halving", each=True),
    {"chain": [{"use": "clip", "max_norm": 1.0, "each": True}, {"use": "gaussian", "sigma": 0.1}, LOCAL]},
    {"chain": [{"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 0.5}, LOCAL, {"use": "top_k", "keep": 0.3}]},
    {"chain": [LOCAL, {"use": "sign"}]}, {"chain": [LOCAL, {"use": "quantize", "bits": 4}]},
    {"chain": [{"use": "mixup", "alpha": 0.4}, LOCAL, {"use": "mask", "keep": 0.5}]},
    {"chain": [{"use": "ats", "policy": "7-4-15"}, {"use": "soteria", "rate": 0.5}, LOCAL]},
    {"chain": [LOCAL, {"use": "prune", "keep": 0.3}, {"use": "laplace", "scale": 0.1}, {"use": "freeze", "layers": ["conv"]}]},
    {"chain": [{"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 0.5}, {**LOCAL, "steps": 2, "batch_size": 1}]},
    {"clients": 4, "secure_sum": {"group": 2}}, {"chain": [{**LOCAL, "steps": 2, "batch_size": 1}]},
])  # fmt: skip
def test_honest_weights_raise_no_alarm(changes: dict[str, Any]) -> None:
    assert list(warnings_before(Scenario.from_tables(TABLES | changes))) == []


def test_a_run_says_before_training_that_none_of_its_attacks_applies() -> None:
    (alone,) = warnings_before(Scenario.from_tables(TABLES | {"attack": [{"use": "analytic"}]}))
    assert alone.startswith("the whole plan: ") and "(analytic: " in alone
    both = [{"use": "analytic"}, {"use": "inverting_gradients", "iterations": 20}]
    assert list(warnings_before(Scenario.from_tables(TABLES | {"attack": both}))) == []


def test_the_doctor_names_the_same_and_all_of_it() -> None:
    """One pass of the whole doctor over two faulty defenses and the network that ends in a softmax."""
    for changes, name, needed in (
        (defense("scaled_by_a_float"), "link #1 (scaled_by_a_float)", True),
        (defense("drawing_by_itself"), "link #1 (drawing_by_itself)", True),
        (model("Softmax"), "softmax", False),
    ):
        found = {r.name: r for r in check(Scenario.from_tables(TABLES | changes))}
        assert (found[name].works, found[name].needed) == (False, needed)
        assert found["second derivative"].works


def test_the_preflight_says_unknown_of_what_is_not_declared_and_never_that_there_is_no_noise() -> None:
    found = preflight(Scenario.from_tables(TABLES | defense("undeclared_noise")))
    (epsilon,) = [f for f in found if "epsilon" in f.words]
    assert "declares no noise" in epsilon.words


SWEEP: dict[str, Any] = {
    "seeds": [0, 1],
    "scenario": {k: v for k, v in TABLES.items() if k not in ("chain", "attack")},
    "defense": [{"name": "none", "chain": [LOCAL]}, {"name": "theirs", **defense("overwriting")}],
    "attack": TABLES["attack"],
}
COLOUR = "layer 'body.0' (Conv2d)"


@pytest.mark.parametrize("command", ["run", "preflight", "doctor", "sweep", "deploy"])
def test_the_commands_end_with_2_before_flower_is_started(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, runs, begun = tmp_path / "mine.toml", tmp_path / "runs", tmp_path / "begun"
    path.write_text(tomli_w.dumps(TABLES | model("Colour")))
    words = [command, str(path)]
    if command == "sweep":
        path.write_text(tomli_w.dumps(SWEEP | {"scenario": SWEEP["scenario"] | model("Colour")}))
        words += ["--output", str(begun)]
    elif command == "deploy":
        words = ["deploy", "init", str(begun), "--clients", "2", "--scenario", str(path)]
    assert main([*words, "--allow", "brought", *([] if command == "deploy" else ["--runs", str(runs)])]) == 2
    told = capsys.readouterr()
    assert COLOUR in " ".join((told.out + told.err).split())
    assert "Traceback" not in told.out + told.err
    assert not runs.exists() and not begun.exists()


def test_a_sweep_tries_each_defense_once_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grid.toml").write_text(tomli_w.dumps(SWEEP))
    cells = Sweep.load(tmp_path / "grid.toml").cells
    assert len(cells) == 4
    try_cells(cells, Console(stderr=True))
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("warning: [[defense]] theirs: ") and "(overwriting)" in told


def test_a_deployment_whose_scenario_was_changed_is_tried_before_its_first_run(tmp_path: Path) -> None:
    made = Deployment.create(tmp_path / "federation", 2)
    (made.folder / "scenario.toml").write_text(tomli_w.dumps(TABLES | model("Colour")))
    with pytest.raises(SpecError) as told:
        made.begin("first")
    assert COLOUR in str(told.value) and "scenario.toml" in str(told.value)
    assert list((made.folder / "runs").iterdir()) == []
