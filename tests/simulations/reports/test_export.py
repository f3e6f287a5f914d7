"""Export to TensorBoard: read back by TensorBoard's own reader, scalars are the analysis' and pictures the tape's."""

import importlib.util
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.attacks.grading.scores import ScoreRecord
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.client.federation import Federation
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.scores import known_metrics
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reports.export import MARK, write_tensorboard
from tests.small_runs import scores_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs TensorBoard: pip install fedgauge[tensorboard]"
)

ATTACKS = ["inverting_gradients", "analytic"]
BASELINES = ["mean_image", "class_mean_image", "random_image", *(f"wrong_client({attack})" for attack in ATTACKS)]


def scenario(**changes: Any) -> Scenario:
    tables: dict[str, Any] = {
        "seed": 1,
        "rounds": 2,
        "clients": 2,
        "data": {"use": "mnist5k", "batch_size": 2, "auxiliary": 100},
        "model": {"use": "mlp", "hidden": [16]},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
        "attack": [
            {"use": "inverting_gradients", "iterations": 20},
            {"use": "analytic"},  # does not apply to two examples an update
        ],
        "audit": {"executor": "local"},
    }
    return Scenario.from_tables(tables | changes)


def taped(folder: Path, chosen: Scenario) -> Run:
    """A run as training leaves it, its jobs queued; rounds took 2 and 3 seconds."""
    run, federation = Run.create(folder, chosen), Federation(chosen.protocol)
    params, buffers = federation.initial()
    with run.ledger() as ledger:
        ledger.add_attacks(chosen.plan, {p.name: knowledge_card(federation, p) for p in chosen.plan.attacks})
        ledger.record_round(0, 0.1, 2.5, 0.5, 0.0)
        for r in (1, 2):
            run.tape().write_round(r, params, buffers)
            updates = {c: federation.client_update(params, buffers, c, r) for c in range(2)}
            seen = [Participation(c, "accepted", "", 2, run.tape().write_update(r, c, u)) for c, u in updates.items()]
            ledger.record_intake(r, seen, chosen.plan)
            ledger.record_round(r, 0.25 * r, 2.5 - r, 1.0 + r, 0.0)
    return run


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = taped(tmp_path_factory.mktemp("runs") / "attacked", scenario())
    serve(run, LocalExecutor())
    return run


@pytest.fixture(scope="module")
def exported(attacked: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "board"
    assert write_tensorboard(attacked, folder) == "pictures: all 8 attacked examples"
    return folder


def scored(folder: Path, values: Mapping[str, float | None]) -> Run:
    """A run with one update, of which these attacks gave these PSNRs; None: no image."""
    run = Run.create(folder, scenario(attack=[]))
    plan = AttackPlan(tuple(PlannedAttack(name, {"use": "analytic"}) for name in values))
    with run.ledger() as ledger:
        ledger.add_attacks(plan, dict.fromkeys(values, "honest server"))
        ledger.record_intake(1, [Participation(0, "accepted", "", 1, "digest")], plan)
        while (lease := ledger.lease()) is not None:
            name = lease.attack.name
            ledger.finish(lease, {0: [ScoreRecord(1, 0, name, 0, "psnr", values[name], "converged", 0.1)]})
    return run


def read(folder: Path) -> Any:
    """All events of one TensorBoard run, by TensorBoard's reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    events = read(folder)
    return {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}


def pictures(folder: Path) -> dict[tuple[str, int], np.ndarray]:
    events = read(folder)
    found = ((tag, e) for tag in events.Tags()["images"] for e in events.Images(tag))
    return {(tag, e.step): np.asarray(Image.open(io.BytesIO(e.encoded_image_string))) for tag, e in found}


def everything(folder: Path) -> Iterator[tuple[tuple[str, int], float]]:
    for below in sorted(p for p in folder.iterdir() if p.is_dir()):
        yield from scalars(below).items()


# ---------------------------------------------------------------------------------------------------- what it contains


def test_each_attack_and_the_training_is_a_run_of_its_own(exported: Path) -> None:
    names = {p.name for p in exported.iterdir()}
    assert names == {"training", "gallery", *ATTACKS, *BASELINES, MARK}
    assert json.loads((exported / MARK).read_text()) == {"run": "attacked"}
    assert exported.stat().st_mode & 0o777 == 0o700, "the pictures are somebody's data"


def test_scalars_are_the_analysis(attacked: Run, exported: Path) -> None:
    with attacked.ledger() as ledger:
        scores = scores_of(ledger)
    for attack in (*ATTACKS, *BASELINES):
        expected = {}
        for metric in known_metrics(scores):
            for leak in leakage(scores, metric):
                if leak.attack == attack and leak.round is not None and leak.mean is not None:
                    expected[f"{metric}/mean", leak.round] = leak.mean
                    if metric != "identified" and attack in ATTACKS:
                        expected[f"{metric}/worst_case", leak.round] = leak.best
        found = scalars(exported / attack)
        assert found.keys() == expected.keys()
        assert found == {key: np.float32(value) for key, value in expected.items()}
    assert ("psnr/mean", 2) in scalars(exported / "inverting_gradients")
    assert scalars(exported / "analytic") == {}, "it gave nothing: there is nothing to draw, and least of all a NaN"


def test_training_is_accuracy_and_loss_at_the_time_of_the_run(attacked: Run, exported: Path) -> None:
    assert scalars(exported / "training") == {
        **{("test/accuracy", r): 0.25 * r for r in (1, 2)},
        ("test/accuracy", 0): np.float32(0.1),
        **{("test/loss", r): 2.5 - r for r in (0, 1, 2)},
    }
    begun = (attacked.folder / "scenario.toml").stat().st_mtime
    for run, tag in (("training", "test/loss"), ("mean_image", "psnr/mean")):
        times = {e.step: e.wall_time - begun for e in read(exported / run).Scalars(tag)}
        assert times == {r: pytest.approx(t, abs=1e-3) for r, t in {0: 0.5, 1: 2.5, 2: 5.5}.items() if r in times}
        assert {1, 2} <= times.keys()


def test_what_the_attacker_knew_goes_with_its_curves(exported: Path) -> None:
    (text,) = read(exported / "inverting_gradients").Tensors("knowledge/text_summary")
    assert b"labels restored" in text.tensor_proto.string_val[0]
    (text,) = read(exported / "training").Tensors("scenario/text_summary")
    assert b'use = "mnist5k"' in text.tensor_proto.string_val[0]


def test_pictures_are_the_truth_beside_what_came_back(attacked: Run, exported: Path) -> None:
    found, federation = pictures(exported / "gallery"), Federation(attacked.scenario().protocol)
    assert len(found) == 2 * 2 * 2  # rounds x clients x examples
    for round in (1, 2):
        for client in (0, 1):
            truth = federation.batch_at(client, round).x
            came_back = attacked.read_reconstruction(round, client, "inverting_gradients")["x"]
            for example in (0, 1):
                strip = found[f"truth | inverting_gradients | analytic/client {client}, example {example}", round]
                gap, white = np.full((28, 2), 255), np.full((28, 28), 255)
                tiles = [as_bytes(truth[example]), gap, as_bytes(came_back[example]), gap, white]
                assert strip.shape == (28, 88, 3)
                for channel in range(3):  # TensorBoard keeps grey pictures in colour
                    np.testing.assert_array_equal(strip[:, :, channel], np.concatenate(tiles, axis=1))


def as_bytes(x: Any) -> np.ndarray:
    return (x[0].clamp(0, 1) * 255).round().byte().numpy()


def test_a_choice_of_pictures_says_so_and_keeps_its_names_over_rounds(
    attacked: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgauge.simulations.reports.sampling.BYTES", 31_000)  # six cards of eight
    words = write_tensorboard(attacked, tmp_path / "board")
    found = {(tag.split("/")[1], step) for tag, step in pictures(tmp_path / "board" / "gallery")}
    assert words.startswith(f"pictures: {len(found)} examples from 2 of 2 attacked rounds")
    assert found == {(name, r) for r in (1, 2) for name in ("leaked most", "leaked least", "at random 1")}


def test_an_exact_hit_is_capped_and_what_is_missing_is_left_out(tmp_path: Path) -> None:
    run = scored(tmp_path / "run", {"exact": math.inf, "none": None, "mean_image": 10.5})
    with run.ledger() as ledger:
        ledger.record_round(1, math.nan, math.inf, math.nan, 0.0)
    write_tensorboard(run, tmp_path / "board")
    psnr = {("psnr/mean", 1): 60.0, ("psnr/worst_case", 1): 60.0}
    assert scalars(tmp_path / "board" / "exact") == psnr
    assert scalars(tmp_path / "board" / "none") == {}
    assert scalars(tmp_path / "board" / "mean_image") == {("psnr/mean", 1): 10.5}, "a baseline has no worst case"
    assert scalars(tmp_path / "board" / "training") == {}
    assert all(math.isfinite(value) for _, value in everything(tmp_path / "board"))


def test_a_run_without_scores_exports_its_training(tmp_path: Path) -> None:
    run = taped(tmp_path / "run", scenario())
    assert "nothing has been reconstructed yet" in write_tensorboard(run, tmp_path / "board")
    assert {p.name for p in (tmp_path / "board").iterdir()} == {"training", MARK}


def test_a_name_cannot_leave_the_folder_nor_take_anothers_place(tmp_path: Path) -> None:
    names = ["../../outside", "..", "training", "gallery", "a/b", "a_b"]
    run = scored(tmp_path / "runs" / "run", dict.fromkeys(names, 20.0))
    write_tensorboard(run, tmp_path / "boards" / "board")
    assert {p.name for p in tmp_path.iterdir()} == {"runs", "boards"}
    assert [p.name for p in (tmp_path / "boards").iterdir()] == ["board"]
    found = [p for p in (tmp_path / "boards" / "board").iterdir() if p.is_dir()]
    assert len([p for p in found if scalars(p).get(("psnr/mean", 1)) == 20.0]) == len(names)
    assert scalars(tmp_path / "boards" / "board" / "training") == {}


# -------------------------------------------------------------------------------------------------- where it is written


def test_the_command_writes_into_the_run_and_an_export_replaces_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = scored(tmp_path / "run", {"exact": 20.0})
    board = run.folder / "tensorboard"
    for _ in range(2):
        assert main(["export", str(run.folder), "--to", "tensorboard"]) == 0
        told = capsys.readouterr()
        assert told.out == f"{board}\n"
        assert "pictures: " in told.err
        assert {p.name for p in board.iterdir()} == {"training", "exact", "gallery", MARK}
        assert len(list(board.rglob("*tfevents*"))) == 3, "no file of the export before"
    assert not list(run.folder.glob(".part-*"))


@pytest.mark.parametrize("place", ["file", "notes", "run", "mixed"])
def test_what_is_not_an_export_is_never_replaced(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = scored(tmp_path / "run", {"exact": 20.0})
    (tmp_path / "file").write_text("mine")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    write_tensorboard(run, tmp_path / "mixed")
    (tmp_path / "mixed" / "exact" / "notes.txt").write_text("mine")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert main(["export", str(run.folder), "--to", "tensorboard", "-o", str(tmp_path / place)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert str(tmp_path / place) in told.err and "--output" in told.err
    assert {p: p.read_bytes() for p in before} == before
    assert not list(tmp_path.glob(".part-*"))


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "board").mkdir()
    write_tensorboard(scored(tmp_path / "run", {"exact": 20.0}), tmp_path / "board")
    assert (tmp_path / "board" / "exact").is_dir()


def test_an_export_that_fails_leaves_the_one_before_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, board = scored(tmp_path / "run", {"exact": 20.0}), tmp_path / "board"
    write_tensorboard(run, board)
    before = {p: p.read_bytes() for p in board.rglob("*") if p.is_file()}
    # pictures are written last
    monkeypatch.setattr("fedgauge.simulations.reports.export.sample_examples", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_tensorboard(run, board)
    assert {p: p.read_bytes() for p in board.rglob("*") if p.is_file()} == before
    assert {p.name for p in tmp_path.iterdir()} == {"run", "board"}


def test_without_tensorboard_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scored(tmp_path / "run", {"exact": 20.0})
    for name in [m for m in sys.modules if m.split(".")[0] == "tensorboard" or m.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as Python itself marks what cannot be imported
    assert main(["export", str(run.folder), "--to", "tensorboard"]) == 2
    assert 'pip install "fedgauge[tensorboard]"' in capsys.readouterr().err
    assert not (run.folder / "tensorboard").exists()
