"""The audit record: it holds for its run alone, and every change of it or of the run is noticed."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.federation import Federation
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.views.assurance.coverage import TEXTS, coverage
from fedgauge.server.views.reading import read_once
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reports.audit_record import (
    NAME,
    broken_link,
    chained,
    disagreements,
    read_record,
)
from fedgauge.simulations.reports.report import write_report


@pytest.fixture
def recorded(copied: Run) -> Run:
    write_report(copied)
    return copied


def test_a_record_holds_and_equal_runs_have_equal_records(recorded: Run) -> None:
    before = (recorded.folder / NAME).read_bytes()
    assert disagreements(recorded) == []
    write_report(recorded)
    assert (recorded.folder / NAME).read_bytes() == before
    assert (recorded.folder / NAME).stat().st_mode & 0o777 == 0o600


def test_the_digests_are_those_of_sha256_by_hand(recorded: Run) -> None:
    first, second, *_ = json.loads((recorded.folder / NAME).read_text())["entries"]
    for entry, before in ((first, "0" * 64), (second, first["digest"])):
        text = json.dumps([before, entry["about"], entry["says"]], sort_keys=True, separators=(",", ":"))
        assert entry["digest"] == hashlib.sha256(text.encode()).hexdigest()
    says = second["says"]
    assert says["sha256"] == hashlib.sha256((recorded.folder / "scenario.toml").read_bytes()).hexdigest()


def test_it_says_what_was_attacked_by_whom_and_with_which_data(recorded: Run) -> None:
    says = {entry.about: entry.says for entry in read_record(recorded.folder / NAME)}
    dataset = Federation(recorded.scenario().protocol).shards.dataset
    digest = hashlib.sha256(dataset.x.numpy().tobytes() + dataset.y.numpy().tobytes()).hexdigest()
    assert says["data"]["sha256"] == digest and says["data"]["named"]["use"] == "mnist5k"
    assert says["scenario"]["seed"] == 1 and says["updates"]["accepted"] == 4
    assert says["attack inverting_gradients"]["planned"]["budget"]["iterations"] == 60
    assert "labels restored" in says["attack inverting_gradients"]["knew"]
    assert "baseline mean_image" in says and says["other scores"].keys() >= {"wrong_client(inverting_gradients)"}


def altered(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    def alter(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content["entries"])
        path.write_text(json.dumps(content))

    return alter


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda entries: entries[1]["says"].update(seed=7), r"entry 2 \(scenario\) was altered"),
        (lambda entries: entries.pop(2), "entry 3 .* does not follow"),
        (lambda entries: entries.insert(2, entries[3]), "entry 3 .* does not follow"),
        (lambda entries: entries[3].update(digest="0" * 64), r"entry 4 \(environment\) was altered"),
        (lambda entries: entries.clear(), "no entry"),
    ],
)
def test_an_altered_record_is_noticed(
    recorded: Run, change: Callable[[list[dict[str, Any]]], object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    altered(change)(recorded.folder / NAME)
    (why,) = disagreements(recorded)
    assert re.search(says, why)
    if says != "no entry":
        assert main(["verify", str(recorded.folder)]) == 1
        assert re.search(says, capsys.readouterr().err)


def test_a_rewritten_chain_is_noticed_by_the_run_and_by_the_last_digest(recorded: Run) -> None:
    """Whoever alters an entry and hashes all that follow again has a chain that holds."""
    kept = read_record(recorded.folder / NAME)[-1].digest
    rechained(recorded.folder / NAME, lambda facts: facts.__setitem__(slice(-2, -1), [LIE]))
    assert broken_link(read_record(recorded.folder / NAME)) == ""
    assert [why.partition(":")[0] for why in disagreements(recorded)] == ["verdict"]
    (why,) = disagreements(recorded, last=kept)
    assert kept in why


def rechained(path: Path, change: Callable[[list[tuple[str, Any]]], object]) -> None:
    """Write a record of other entries, whose chain holds."""
    facts = [(entry.about, entry.says) for entry in read_record(path)]
    change(facts)
    path.write_text(json.dumps({"entries": [vars(entry) for entry in chained(iter(facts))]}))


LIE = ("verdict", {"word": "nothing leaks", "sentences": []})


def test_a_verdict_under_another_versions_name_is_not_passed_without_the_last_digest(
    recorded: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def lie(facts: list[tuple[str, Any]]) -> None:
        facts[0] = ("format", {**facts[0][1], "fedgauge": "0.0.1"})
        facts[:] = [LIE if about == "verdict" else (about, says) for about, says in facts]

    rechained(recorded.folder / NAME, lie)
    last = read_record(recorded.folder / NAME)[-1].digest
    assert main(["verify", str(recorded.folder)]) == 3
    assert "its verdict was not compared: it is of fedgauge 0.0.1" in capsys.readouterr().err
    assert main(["verify", str(recorded.folder), "--last", last]) == 0


def test_a_renamed_runs_verdict_is_compared(recorded: Run, tmp_path: Path) -> None:
    other = tmp_path / "renamed"
    shutil.copytree(recorded.folder, other)
    assert disagreements(Run.open(other)) == []
    rechained(other / NAME, lambda facts: facts.append(LIE))
    assert disagreements(Run.open(other)) == ["verdict: the record does not say what the run's folder holds today"]


def test_a_changed_score_and_a_changed_scenario_are_noticed(recorded: Run) -> None:
    with recorded.ledger() as ledger:
        ledger._db.execute("UPDATE scores SET value = value + 1 WHERE metric = 'psnr'")
    assert any("the record does not say" in why for why in disagreements(recorded))
    other = recorded.folder.parent / "other"
    shutil.copytree(recorded.folder, other)
    write_report(Run.open(other))
    text = (other / "scenario.toml").read_text()
    (other / "scenario.toml").write_text(text + "\n")
    assert "scenario: the record does not say what the run's folder holds today" in disagreements(Run.open(other))


def test_a_missing_and_a_broken_record_are_one_sentence(copied: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(copied.folder)]) == 2
    assert "write it with: fedgauge report" in capsys.readouterr().err
    for text in ("{", "[]", '{"entries": [1]}', '{"entries": [{"about": 1}]}'):
        (copied.folder / NAME).write_text(text)
        with pytest.raises(LedgerError, match="audit record"):
            read_record(copied.folder / NAME)


def test_verify_prints_the_digest_that_the_report_shows(recorded: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(recorded.folder)]) == 0
    digest = capsys.readouterr().out.split()[-1]
    assert f"<code>{digest}</code>" in (recorded.folder / "report.html").read_text()
    assert main(["verify", str(recorded.folder), "--last", digest]) == 0
    assert main(["verify", str(recorded.folder), "--last", digest[::-1]]) == 1


# ------------------------------------------------------------------------------------------- what was tested, what not


def test_what_was_not_tested_is_said(attacked: Run) -> None:
    with read_once(attacked) as reading:
        rows = coverage(reading)
    tested = [row for row in rows if row.tested]
    assert [row.by for row in tested] == [("inverting_gradients",)], "analytic does not apply to two examples"
    named = {row.maps_to[0]: row.tested for row in rows if row.maps_to[0]}
    assert named == {
        "data reconstruction": False,  # by a malicious server, which comes after the honest one's
        "membership inference": False,
        "property inference": False,
        "model extraction": False,
    }
    assert rows[0].maps_to[0] == "data reconstruction" and rows[0].tested
    assert all(row.found.startswith("not tested") for row in rows if not row.tested)
    assert all(row.found.count("not tested") == 1 for row in rows if not row.tested)
    asked = {row.question: row.found for row in rows if row.maps_to[0] == "membership inference"}
    assert asked.keys() == {"Who was in a batch", "Whom a client's data holds"}
    assert asked["Whom a client's data holds"].endswith("fedgauge audit RUN --attack membership_over_rounds")


def test_the_report_maps_and_never_says_that_anything_complies(recorded: Run) -> None:
    page = (recorded.folder / "report.html").read_text().partition("<h2>What was tested, what not</h2>")[2]
    section = page.partition("<h2>")[0]
    assert all(text in section for text in TEXTS) and section.count("maps to") == len(TEXTS)
    assert "Nothing here says that a system complies" in section and section.count("compl") == 1
    assert "about models" in section and "updates" in section
