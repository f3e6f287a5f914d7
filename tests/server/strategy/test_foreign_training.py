"""A foreign app's local training: what is assumed of it is compared with its first update before anything is attacked."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedgauge.server import tap_recorder as recorder
from fedgauge.simulations.cli.main import main
from tests.server.strategy.test_three_apps import ADAM, ForeignApp, app, train

__all__ = ["app"]  # a fixture

TAKEN_FOR_SGD = {"use": "local_sgd", "rate": 0.001, "steps": 3}


@pytest.mark.parametrize("app", [replace(ADAM, chain=TAKEN_FOR_SGD), ADAM], indirect=True, ids=["as SGD", "as Adam"])
def test_an_adam_taken_for_sgd_is_a_warning_on_the_card_and_the_run(kit: Any, app: ForeignApp, tmp_path: Path) -> None:
    run, _ = train(kit, app, tmp_path, **{"num-server-rounds": 1})
    for _ in range(2):  # an audit that goes on says it once
        assert main(["audit", str(run.folder)]) == 0
        with run.ledger() as ledger:
            cards = {row["name"]: row["knowledge"] for row in ledger.attacks()}
            words = ledger.meta()["training"]
            assert ledger.meta()["replay_detail"].endswith(words)
            assert ledger.meta()["training_fits"] == str(app.chain != TAKEN_FOR_SGD)
        warning = "WARNING: the assumed local training does not explain the update, so attacks may show noise"
        assert words.startswith(warning) is (app.chain == TAKEN_FOR_SGD), words
        assert cards["inverting_gradients"].count(words) == 1
        assert words not in cards["mean_image"]
    if app.chain != TAKEN_FOR_SGD:
        assert "each epoch assumed" in cards["inverting_gradients"]


def test_figures_are_found_by_their_names() -> None:
    assert recorder.test_figures({"eval_loss": 2.5, "eval_acc": 50.0}) == (0.5, 2.5)
    assert recorder.test_figures({"eval_loss": float("nan"), "f1": 0.5}) == (None, None)


@pytest.mark.parametrize("app", [replace(ADAM, chain=TAKEN_FOR_SGD)], indirect=True, ids=["as SGD"])
def test_after_the_scenario_of_an_app_was_corrected_every_attack_is_made_again_or_none(
    kit: Any, app: ForeignApp, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []  # Flower's log, whoever silenced it
    monkeypatch.setattr(recorder, "log", lambda level, text, *values: logged.append(text % values))
    run, _ = train(kit, app, tmp_path, **{"num-server-rounds": 1})
    assert any(f"fedgauge audit {run.folder}" in line for line in logged)
    assert main(["audit", str(run.folder)]) == 0
    path = run.folder / "scenario.toml"
    tables = tomllib.loads(path.read_text()) | {"chain": [ADAM.chain]}
    path.write_text(tomli_w.dumps(tables))
    with run.ledger() as ledger:
        ledger.set_meta(replay="ok")
    assert main(["audit", str(run.folder)]) == 2
    assert "--retry all" in capsys.readouterr().err
    assert main(["audit", str(run.folder), "--retry", "all"]) == 0
    with run.ledger() as ledger:
        cards = {row["name"]: row["knowledge"] for row in ledger.attacks()}
        assert "optimizer=adam" in cards["inverting_gradients"] and "WARNING" not in cards["inverting_gradients"]
        assert ledger.progress().total == ledger.progress().done == 12
        assert ledger.meta()["replay"] != "ok", "it was of other assumptions"
