"""Reports of runs that are unfinished, failed or damaged."""

from pathlib import Path

from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from tests.simulations.reports.report_pages import page_of, taped
from tests.small_runs import scenario


def test_a_run_without_rounds(tmp_path: Path) -> None:
    page = page_of(Run.create(tmp_path / "empty", scenario()))
    assert "after 0 of 2 rounds" in page.words
    assert "No round with" in page.words
    assert "attack that reconstructs" in page.words
    assert page.cards == []
    assert page.rounds == []


def test_a_run_not_attacked_yet_names_the_command(tmp_path: Path) -> None:
    run = taped(tmp_path / "waiting", scenario())
    page = page_of(run)
    assert "0 of 20 jobs" in page.words and f"fedgauge audit {run.folder}" in page.words
    assert "no attack has" in page.words
    assert [(f["metric"], [s["x"] for s in f["series"]]) for f in page.rounds] == [("", [[0, 1, 2]])], "the accuracy"
    assert "Not done yet:" in page.words


def test_an_interrupted_run_shows_what_there_is(tmp_path: Path) -> None:
    run = taped(tmp_path / "stopped", scenario(rounds=5))
    with run.ledger() as ledger:
        ledger.set_meta(state="interrupted")
    calls = iter(range(100))
    serve(run, LocalExecutor(), stop=lambda: next(calls) >= 3)
    with run.ledger() as ledger:
        progress = ledger.progress()
        assert 0 < progress.done < progress.total
    page = page_of(run)
    assert "interrupted after 2 of 5" in page.words
    assert f"{progress.done} of {progress.total} jobs" in page.words
    assert [tile for tile in page.tiles("inverting_gradients") if tile["image"]]


def test_a_failed_attack_is_reported_with_its_error(tmp_path: Path) -> None:
    run = taped(tmp_path / "damaged", scenario())
    damaged = sorted((run.folder / "tape").glob("round-00002-client-*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    serve(run, LocalExecutor())
    page = page_of(run)
    with run.ledger() as ledger:
        assert ledger.progress().failed > 0
        assert all(" ".join(row["reason"].split()) in page.words for row in ledger.reasons("failed"))
    assert any(tile["note"] == "failed" for tile in page.tiles("inverting_gradients"))


def test_a_reconstruction_that_is_gone_or_damaged_is_said_to_be(copied: Run) -> None:
    copied.reconstruction(1, 0, "inverting_gradients").unlink()
    copied.reconstruction(2, 1, "inverting_gradients").write_bytes(b"damaged")
    notes = [tile["note"] for tile in page_of(copied).tiles("inverting_gradients") if tile["image"] is None]
    assert len(notes) == 4
    assert all("file missing" in n and " dB" in n for n in notes[:2])
    assert all("file damaged" in n and " dB" in n for n in notes[2:])


def test_a_failed_replay_check_is_reported_at_the_top(copied: Run) -> None:
    with copied.ledger() as ledger:
        ledger.set_meta(replay="mismatch", replay_detail="cosine 0.5: the learning rate differs")
    words = page_of(copied).words
    assert words.index("learning rate differs") < words.index("Accuracy and leakage")


def test_what_attacks_said_of_themselves_stands_under_the_results(attacked: Run) -> None:
    page = page_of(attacked)
    with attacked.ledger() as ledger:
        (told,) = ledger.reasons()
    assert [row for row in page.rows if row[0] == "analytic" and len(row) == 3] == [["analytic", "4", told["reason"]]]
    start = page.words.index("Reasons that attacks gave")
    assert page.words.index("All rounds together") < start < page.words.index("Private images and")


def test_a_chain_without_a_derivative_is_a_warning(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "flat", scenario())
    with run.ledger() as ledger:
        plan = scenario().plan
        ledger.add_attacks(plan, {p.name: "a" for p in plan.attacks}, flat=[plan.attacks[0].name])
    words = page_of(run).words
    assert words.index(f"inverting_gradients: {NO_DERIVATIVE}.") < words.index("Accuracy and leakage")


def test_given_labels_are_not_shown_as_restored(tmp_path: Path) -> None:
    attack = {"use": "inverting_gradients", "iterations": 2, "labels": "given"}
    run = taped(tmp_path / "given", scenario(attack=[attack]), rounds=1)
    serve(run, LocalExecutor())
    page = page_of(run)
    labels = [tile["label"] for tile in page.tiles("inverting_gradients")]
    assert len(labels) == 4
    assert all("given" in label and "✓" not in label for label in labels)
    assert "labels are restored" not in page.words
