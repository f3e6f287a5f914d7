"""The truth that a tester hands in for an app's run: doubted where it does not give the updates, replaced, and kept for later."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedgauge.attacks.base import Observation, Reconstruction
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.source import FederationSource
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.server.pool.assumed_training import doubt, unchecked
from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main
from tests.server.strategy.test_three_apps import ADAM, ForeignApp, app, train, write_truth

__all__ = ["app"]  # a fixture

only_adam = pytest.mark.parametrize("app", [ADAM], indirect=True, ids=["ragged_adam"])


def changed(folder: Path, into: Path, **change: Any) -> Path:
    """The same files with other examples: x(pixels), y(labels), or those of the client after it."""
    into.mkdir()
    files = sorted(folder.iterdir())
    others = files[1:] + files[:1] if change.get("swapped") else files
    for path, other in zip(files, others, strict=True):
        with np.load(other) as stored:
            kept = {key: change.get(key, lambda array: array)(stored[key]) for key in ("x", "y")}
            np.savez(into / path.name, **kept)
    return into


def graded(run: Run) -> dict[tuple[str, int, int], float]:
    with run.ledger() as ledger:
        return {
            (r["attack"], r["client"], r["example"]): r["value"] for r in ledger.scores("psnr") if r["example"] >= 0
        }


@only_adam
def test_a_truth_that_does_not_give_the_updates_is_doubted_and_the_right_one_is_not(
    kit: Any, app: ForeignApp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, grid = train(kit, app, tmp_path, **{"num-server-rounds": 1})
    assert main(["audit", str(run.folder), "--log", "quiet"]) == 0
    right = write_truth(app, grid, tmp_path / "right")
    noise = {"x": lambda x: np.random.default_rng(0).integers(0, 255, x.shape, np.uint8)}
    for name, change in {"swapped": {"swapped": True}, "nothing": noise}.items():
        assert main(["audit", str(run.folder), "--truth", str(changed(right, tmp_path / name, **change))]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "graded 12 of 12" in told and "wrong examples: " in told, name
        report = (run.folder / "report.html").read_text()
        assert "wrong examples" in report
    assert main(["audit", str(run.folder), "--truth", str(right)]) == 0
    assert "WARNING" not in capsys.readouterr().out and run.ledger().meta()["truth_doubts"] == ""
    with run.ledger() as ledger:
        ledger.set_meta(drafted_chain=repr(run.scenario().tables["chain"]))
    observed = changed(right, run.folder / "truth", swapped=True)
    assert main(["audit", str(run.folder), "--truth", str(observed)]) == 0
    assert run.ledger().meta()["truth_doubts"] == "", (
        "these are what clients were seen to train on, in an order of theirs"
    )
    binary = changed(right, tmp_path / "binary", x=lambda x: (x > 127).astype(np.uint8))
    assert main(["audit", str(run.folder), "--truth", str(binary)]) == 2
    assert "0 and 1 as uint8" in capsys.readouterr().err
    number = changed(right, tmp_path / "number", y=lambda y: y.sum())
    assert main(["audit", str(run.folder), "--truth", str(number)]) == 2
    assert "y of shape ()" in capsys.readouterr().err


@only_adam
def test_a_later_truth_replaces_all_grades_and_grades_what_is_attacked_again(
    kit: Any, app: ForeignApp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, grid = train(kit, app, tmp_path, **{"num-server-rounds": 1})
    assert main(["audit", str(run.folder), "--log", "quiet"]) == 0
    truth = write_truth(app, grid, tmp_path / "truth")
    command = ["audit", str(run.folder), "--truth", str(truth), "--log", "quiet"]
    assert main(command) == 0
    before = graded(run)
    assert {client for _, client, _ in before} == {0, 1, 2}

    assert main(["audit", str(run.folder), "--retry", "all", "--log", "quiet"]) == 0
    assert graded(run) == before, "by the truth that the run remembers"

    left_out = sorted(truth.iterdir())[0]
    kept = left_out.read_bytes()
    left_out.unlink()
    capsys.readouterr()
    assert main(command[:-2]) == 0
    assert "graded 8 of 12" in capsys.readouterr().out
    after = graded(run)
    (gone,) = {client for _, client, _ in before} - {client for _, client, _ in after}
    assert len(after) == 45 and after.items() <= before.items(), "no grade of an earlier truth stays"
    assert f"truth of client {gone}" in run.ledger().meta()["grading"]

    left_out.write_bytes(kept)
    assert main(command) == 0 and graded(run) == before
    for path in truth.iterdir():
        path.unlink()
    assert main(["audit", str(run.folder), "--retry", "all"]) == 0
    told = capsys.readouterr().out
    assert "--truth" in told and graded(run) == {}


@only_adam
def test_labels_are_no_leak_because_the_truth_has_more_of_them_or_fewer(
    kit: Any, app: ForeignApp, tmp_path: Path
) -> None:
    """One claimed label for three examples, or three for one: what a guess without the update gets does not grow."""
    run, _ = train(kit, app, tmp_path, **{"num-server-rounds": 1})
    fed = run.scenario().federation
    x, y = fed.shards.dataset.x[:3].float() / 255, torch.tensor([4, 5, 6])
    grader = Auditor(FederationSource(fed)).grader

    def accuracy(guess: list[int], truth: Batch) -> float | None:
        found = Reconstruction(x[: len(guess)].flip(0), torch.tensor(guess), 0.0, 1, 0.0, "converged")
        rows = grader.grade("guess", 1, 0, found, truth)[1]
        (value,) = [r.value for r in rows if r.metric == "label_accuracy"]
        return value

    assert {accuracy([label], Batch(x, y)) for label in (4, 5, 6)} == {1 / 3}, "whichever example is nearest"
    assert accuracy([0], Batch(x, y)) == 0 and accuracy([4, 5, 6], Batch(x[:1], y[:1])) == 1 / 3


def test_another_clients_examples_are_doubted_whatever_the_order_of_training(
    make_federation: Callable[..., Federation],
) -> None:
    """Twenty shuffled steps: other examples of the same labels often give more than half of the update."""
    local = {"use": "local_training", "rate": 0.05, "batch_size": 8, "epochs": 5, "shuffle": True}
    data = {"use": "mnist5k", "batch_size": 32, "auxiliary": 100}
    fed = make_federation(chain=[local], model={"use": "mlp", "hidden": [16]}, clients=4, data=data)
    own, drawn = fed.shards.dataset, torch.Generator().manual_seed(0)
    patterns = torch.randint(90, (10, *own.shape), dtype=torch.uint8, generator=drawn)
    x = patterns[own.y] + torch.randint(60, own.x.shape, dtype=torch.uint8, generator=drawn)
    fed = fed.having(shards=replace(fed.shards, dataset=replace(own, x=x)))
    params, buffers = fed.initial()
    doubted = []
    for client in range(4):
        update = fed.update_fn()(params, fed.batch_at(client, 1), generator("client", client))
        seen = Observation(1, client, params, update, buffers)
        assert doubt(fed, seen, fed.batch_at(client, 1)) == ""
        doubted.append(doubt(fed, seen, fed.batch_at((client + 1) % 4, 1)) != "")
    assert sum(doubted) >= 2


@pytest.mark.parametrize(("p", "doubted"), [(0.0, True), (0.5, False)])
def test_a_dropout_that_drops_nothing_hides_no_wrong_truth(
    make_federation: Callable[..., Federation], p: float, doubted: bool
) -> None:
    fed = make_federation(model={"use": "mlp", "hidden": [8]}, clients=1)
    params, buffers = fed.initial()
    right = Batch(torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2]))
    seen = Observation(1, 0, params, fed.update_fn()(params, right, generator("client", 0)), buffers)
    fed.model.add_module("idle", nn.Dropout(p).train())
    wrong = Batch(torch.zeros_like(right.x), right.y)
    assert doubt(fed, seen, right) == ""
    gradients = replace(seen, update={k: -t for k, t in seen.update.items()})
    assert ("[tape] replies" in doubt(fed, gradients, right)) == doubted
    assert bool(doubt(fed, seen, wrong)) == doubted
    assert bool(unchecked(fed)) != doubted
