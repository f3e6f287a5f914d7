"""Claims about the text quickstart: it is sound, it is examined beforehand, and a real run of it ends with scores."""

from pathlib import Path

import pytest

from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.preflight import preflight
from fedgauge.simulations.checks.scenario_check import check
from fedgauge.simulations.cli.main import main
from tests.small_runs import in_this_process

pytest.importorskip("transformers", reason="the extra [text] is not installed")
pytest.importorskip("rouge_score", reason="the extra [text] is not installed")
QUICKSTART = Path(__file__).parents[3] / "simulations" / "quickstart-text.toml"
LORA = QUICKSTART.with_name("quickstart-lora.toml")
NEXT = [
    "data.task=next_token",
    "model.use=tiny_gpt2",
    "model.tied=false",
    "loss.use=next_token",
]


@pytest.mark.parametrize("settings", [[], NEXT], ids=["classification", "next_token"])
def test_the_doctor_finds_nothing_wrong_with_text(settings: list[str]) -> None:
    found = {finding.name: finding for finding in check(Scenario.load(QUICKSTART, settings))}
    assert not [f"{f.name}: {f.message}" for f in found.values() if f.works is False and f.needed]
    assert "3,200 + 800 sentences of 16 tokens" in found["data"].message


@pytest.mark.parametrize("settings", [[], NEXT], ids=["classification", "next_token"])
def test_preflight_reports_that_rows_of_embeddings_name_words(settings: list[str]) -> None:
    (leak,) = [f for f in preflight(Scenario.load(QUICKSTART, settings)) if "word embeddings" in f.words]
    assert leak.severity == "leaks" and "the words of" in leak.words
    frozen = [*settings, 'model.freeze=["words"]']
    (note,) = [f for f in preflight(Scenario.load(QUICKSTART, frozen)) if "word embeddings" in f.words]
    assert note.severity == "note" and "frozen" in note.words


@pytest.mark.slow
def test_the_text_quickstart_runs_and_ends_with_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", in_this_process)
    quick = ["--rounds", "1", "--set", "clients=2"]
    assert main(["run", str(QUICKSTART), "--runs", str(tmp_path), *quick]) == 0
    (ledger,) = tmp_path.glob("*/ledger.sqlite")
    with Run(ledger.parent).ledger() as found:
        rows = list(found.scores("rouge1"))
        assert found.meta()["replay"] == "ok"
    assert {row["client"] for row in rows} == {0, 1}
    assert all(row["value"] is not None for row in rows)
    assert (ledger.parent / "report.html").exists()
    told = capsys.readouterr().out
    assert "mean ROUGE-1 (%)" in told and "dB" not in told
    for attack in ("exact", "dager"):
        assert {row["value"] for row in rows if row["attack"] == attack} == {100.0}, f"{attack} recovers every sentence"


@pytest.mark.full
@pytest.mark.slow
def test_the_lora_quickstart_reads_the_factors_from_the_second_round_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="the extra [adapters] is not installed")
    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", in_this_process)
    quick = ["--rounds", "2", "--set", "attack.1.iterations=2"]
    assert main(["run", str(LORA), "--runs", str(tmp_path), *quick]) == 0
    (ledger,) = tmp_path.glob("*/ledger.sqlite")
    run = Run(ledger.parent)
    with run.ledger() as found:
        rows = [row for row in found.scores("rouge1") if row["attack"] == "dager" and row["round"] == 2]
        assert found.meta()["replay"] == "ok"
    assert [row["value"] for row in rows] == [100.0] * 4
    told = capsys.readouterr().out
    assert "spans all 8 dimensions" in told and "Batch membership leaks" in told
    assert (ledger.parent / "report.html").exists()
