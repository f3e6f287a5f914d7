"""Membership in deployments: the examples that a tester hands in make the simulation's own scores, and no attack sees them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.membership.attack import membership
from fedgauge.client.update import Batch
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.pool.tester_grading import with_examples
from fedgauge.server.store.run import Run
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run.create import create_run
from fedgauge.simulations.run.exit_status import FAILED, INCOMPLETE
from fedgauge.simulations.run.in_memory import train
from tests.server.strategy.test_client_grading import deployed, owners, small

TESTS = [
    {"use": "membership", "strangers": 200, "held": 40},
    {"use": "membership_over_rounds", "strangers": 200, "held": 40, "score": "matched_filter"},
]
DATA = {"use": "mnist5k", "batch_size": 2, "auxiliary": 400}
Rows = Mapping[tuple[int, int, str, str], list[float | None]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The same scenario as a simulation and as a deployment whose clients draw as in the simulation; not to be changed."""
    folder, scenario = (
        tmp_path_factory.mktemp("pair"),
        small(attack=TESTS, data=DATA, model={"use": "mlp", "hidden": [8]}),
    )
    simulation = create_run(scenario, folder / "simulation")
    train(simulation)
    serve(simulation, LocalExecutor())
    return simulation, deployed(folder, scenario, owners(folder, scenario, grading={"mode": "off"}))


def told(run: Run) -> Rows:
    found: dict[tuple[int, int, str, str], list[float | None]] = {}
    with run.ledger() as ledger:
        for row in ledger.scores():
            if "membership" in row["metric"]:
                found.setdefault((row["round"], row["client"], row["attack"], row["metric"]), []).append(row["value"])
    return found


def verdict(run: Run) -> Any:
    reading = RunSnapshot(run)
    with reading.now():
        return verdict_of(reading)


def handed_in(run: Run, folder: Path, clients: range = range(3)) -> Path:
    """A file of each client's examples in each round."""
    folder.mkdir()
    fed = run.scenario().federation
    for client in clients:
        for round in (1, 2):
            rows, data = fed.rows_at(client, round), fed.shards.dataset
            np.savez(folder / f"client-{client}-round-{round}.npz", x=data.x[rows].numpy(), y=data.y[rows].numpy())
    return folder


def test_the_truth_gives_a_deployment_the_simulations_scores(
    pair: tuple[Run, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulation, deployment = pair[0], Run(Path(shutil.copytree(pair[1].folder, tmp_path / "run")))
    before = told(deployment)
    assert {value for values in before.values() for value in values} == {None}
    assert verdict(deployment).members == () and "--truth" in verdict(deployment).sentence

    truth = handed_in(simulation, tmp_path / "truth")
    assert main(["audit", str(deployment.folder), "--truth", str(truth)]) == 0
    assert "tests of membership" in " ".join(capsys.readouterr().out.split())
    expected, found = told(simulation), told(deployment)
    own = {
        key
        for key in expected
        if key[2] in ("membership", "label_frequency", "loss") and key[3].startswith("membership")
    }
    assert len(own) >= 3 * 6 and own <= found.keys()
    for key in own:
        assert found[key] == pytest.approx(expected[key], abs=0.02), key
    over = {key[:3] for key in found if key[2] == "membership_over_rounds" and key[3] == "dataset_membership"}
    assert over == {(round, client, "membership_over_rounds") for round in (1, 2) for client in range(3)}
    assert verdict(deployment).word == verdict(simulation).word == "leaks"
    report = " ".join((deployment.folder / "report.html").read_text().split())
    assert "Batch membership leaks" in report and "batches are missing" not in report

    for path in truth.glob("client-2-*"):
        path.unlink()
    # client 2's updates were planned to be tested, and no test is left of them
    assert main(["audit", str(deployment.folder), "--truth", str(truth), "--log", "quiet"]) == INCOMPLETE
    less = told(deployment)
    assert {values[0] for key, values in less.items() if key[1] == 2 and "wrong" not in key[2]} == {None}
    assert {key: v for key, v in less.items() if key in own and key[1] != 2} == {
        key: v for key, v in found.items() if key in own and key[1] != 2
    }
    with deployment.ledger() as ledger:
        assert {row["reason"] for row in ledger.reasons()} == {f"no truth of client 2 in round {r}" for r in (1, 2)}

    # a further test is done by the truth that the run remembers
    assert (
        main(["audit", str(deployment.folder), "--attack", "membership name=cosine score=cosine", "--log", "quiet"])
        == 0
    )
    assert told(deployment)[1, 0, "cosine", "membership"] != [None]


def test_a_test_that_raises_while_grading_fails_alone(
    pair: tuple[Run, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = membership.scores

    def raises(self: membership, wave: Wave, known: Knowledge, candidates: Batch) -> torch.Tensor:
        if 1 in wave.clients:
            raise ZeroDivisionError("of client 1")
        return real(self, wave, known, candidates)

    simulation, deployment = pair[0], Run(Path(shutil.copytree(pair[1].folder, tmp_path / "run")))
    truth = handed_in(simulation, tmp_path / "truth")
    monkeypatch.setattr(membership, "scores", raises)
    ask = ["audit", str(deployment.folder), "--truth", str(truth), "--log", "quiet"]
    assert main(ask) == FAILED
    failed = {key[1] for key, v in told(deployment).items() if key[2:] == ("membership", "membership") and None in v}
    assert failed == {1}
    with deployment.ledger() as ledger:
        assert {row["reason"] for row in ledger.reasons("failed")} == {"ZeroDivisionError: of client 1"}
    monkeypatch.undo()
    assert main(ask) == 0, "graded again, the same test is done"


def test_a_simulation_has_its_own_truth(
    pair: tuple[Run, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = handed_in(pair[0], tmp_path / "truth")
    assert main(["audit", str(pair[0].folder), "--truth", str(truth)]) == 2
    assert "own data" in capsys.readouterr().err


def test_no_example_handed_in_stays_public_or_a_stranger(pair: tuple[Run, Run]) -> None:
    """A tester may hand in what the scenario takes for public, and the same example for several rounds."""
    fed = pair[0].scenario().federation
    shards, data = fed.shards, fed.shards.dataset
    public, own = shards.auxiliary_batch(), shards.batch_at(0, 1)
    test = type(own)(data.x_test[:3].float() / 255, data.y_test[:3])
    found = {(1, 0): own, (2, 0): own, (1, 1): type(own)(public.x[:5], public.y[:5]), (2, 1): test}
    made = with_examples(fed, found).shards
    assert made.rows_at(0, 1).tolist() == made.rows_at(0, 2).tolist() == made.indices[0].tolist()
    assert len(made.indices[1]) == 8 and len(made.indices[2]) == 0
    assert len(made.auxiliary) == len(shards.auxiliary) - 5
    assert len(made.dataset.y_test) == len(data.y_test) - 3
    assert json.dumps(made.batch_at(1, 2).x.tolist()) == json.dumps(test.x.tolist())


def test_a_ledgers_client_number_costs_no_work_for_those_below_it(
    pair: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger from elsewhere may number its clients up to 2^21."""
    fed, last, joined = pair[0].scenario().federation, 2**21 - 1, list[int]()
    real = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, *more, **named: joined.append(1) or real(parts, *more, **named))
    made = with_examples(fed, {(1, 0): fed.shards.batch_at(0, 1), (1, last): fed.shards.batch_at(1, 1)}).shards
    assert len(joined) < 20
    assert len(made.indices) == last + 1
    assert [len(made.indices[client]) for client in (0, 1, last - 1, last)] == [2, 0, 0, 2]
