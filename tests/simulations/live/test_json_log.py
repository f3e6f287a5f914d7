"""The JSON log carries the ledger's numbers, and errors as events."""

import json
import math
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.live.view import Events
from tests.simulations.live.conftest import intake, work
from tests.small_runs import scores_of


def events_of(text: str) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_the_events_of_an_audit_carry_the_ledgers_numbers(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(taped.folder), "--log", "json"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    events = events_of(told.out)
    assert [e["event"] for e in (events[0], events[-1])] == ["started", "finished"]
    for e in events:
        assert datetime.fromisoformat(e["time"]).utcoffset() == timedelta(0)
    start, end = events[0], events[-1]
    assert (start["run"], start["folder"]) == (taped.name, str(taped.folder))
    assert (start["clients"], start["rounds"]) == (2, 4)
    assert start["attacks"] == ["analytic", "mean_image", "class_mean_image", "random_image"]
    with taped.ledger() as ledger:
        rounds = [(r["round"], r["accuracy"], r["loss"], r["seconds"]) for r in ledger.rounds()]
        leaks = leakage(scores_of(ledger), "psnr")
        meta = ledger.meta()
    of = {kind: [e for e in events if e["event"] == kind] for kind in ("round", "scores", "progress", "replay")}
    assert [(e["round"], e["accuracy"], e["loss"], e["seconds"]) for e in of["round"]] == rounds
    last = {(e["attack"], e["round"]): e for e in of["scores"]}
    by_round = [k for k in leaks if k.round is not None]
    assert last.keys() == {(k.attack, k.round) for k in by_round}
    for leak in by_round:
        e = last[leak.attack, leak.round or 0]
        assert (e["metric"], e["n"], e["failed"]) == ("psnr", leak.n, 0)
        assert e["mean"] == pytest.approx(leak.mean)
        assert (e["best"] is None and e["exact"]) or e["best"] == leak.best
        assert e["kind"] == ("attack" if leak.attack == "analytic" else "baseline")
    p = of["progress"][-1]
    assert (p["done"], p["expected"], p["queued"], p["leased"], p["failed"]) == (16, 16, 0, 0, 0)
    assert [(e["verdict"], e["words"]) for e in of["replay"]] == [("ok", meta["replay_detail"])]
    assert (end["run"], end["state"]) == (taped.name, "complete" if meta["rounds"] == "2" else end["state"])
    assert Path(end["report"]).is_file()
    assert end["verdict"] in ("leaks", "not shown to leak", "undetermined")
    pooled = {k.attack: k for k in leaks if k.round is None}
    assert {a["attack"]: (a["n"], a["mean"]) for a in end["attacks"]} == {a: (k.n, k.mean) for a, k in pooled.items()}
    assert end["attacks"][0]["attack"] == "analytic"


def test_numbers_that_are_not_finite_are_null(ledger: Ledger, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    ledger.record_round(1, math.nan, math.inf, 1.0, 0.0)
    intake(ledger, 1, clients=2)
    psnr = iter([math.inf, 20.0, 9.0, 9.0] * 2)
    work(ledger, lambda: next(psnr), waves=1)
    work(ledger, lambda: None, waves=1)
    with Events(RunSnapshot(run)).shown():
        pass
    events = events_of(capsys.readouterr().out)
    (round,) = [e for e in events if e["event"] == "round"]
    assert (round["accuracy"], round["loss"]) == (None, None)
    scores = {e["attack"]: e for e in events if e["event"] == "scores"}
    exact, none = scores["matching"], scores["other"]
    assert (exact["best"], exact["exact"], exact["mean"], exact["n"]) == (None, True, (60 + 20) / 2, 4)
    assert (none["best"], none["exact"], none["mean"], none["n"], none["failed"]) == (None, False, None, 0, 4)
    assert (scores["wrong_client(matching)"]["best"], scores["wrong_client(matching)"]["exact"]) == (9.0, False)


def test_errors_are_events_as_well_as_words(taped: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path), "--log", "json"]) == 2
    told = capsys.readouterr()
    (error,) = events_of(told.out)
    assert error["event"] == "error" and str(tmp_path) in error["words"]
    assert told.err == f"fedgauge: {error['words']}\n"
    for attack in ("analytic", "magic"):
        main(["audit", str(taped.folder), "--attack", attack, "--log", "quiet"])
        told = capsys.readouterr()
        assert (told.out == "") == (attack == "magic")
        assert ("'magic'" in told.err) == (attack == "magic")


@pytest.mark.parametrize("log", ["quiet", "json"])
def test_failures_are_reported_in_every_log_mode(taped: Run, capsys: pytest.CaptureFixture[str], log: str) -> None:
    damaged = sorted((taped.folder / "tape").glob("round-00002-client-*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(["audit", str(taped.folder), "--log", log]) == 1
    told = capsys.readouterr()
    if log == "quiet":
        assert "4 of 16 attacks" in told.err and damaged.name in told.err
    else:
        finished = events_of(told.out)[-1]
        assert finished["state"] == "attacks failed"
        assert any(str(taped.folder) in notice["command"] for notice in finished["notices"])
        assert len(finished["errors"]) == 1 and damaged.name in finished["errors"][0]
        assert [a["failed"] for a in finished["attacks"] if a["attack"] == "analytic"] == [1]


def test_a_replay_that_fails_is_reported_in_every_mode(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (taped.folder / "scenario.toml").write_text((taped.folder / "scenario.toml").read_text().replace("0.1", "0.2"))
    assert main(["audit", str(taped.folder), "--log", "quiet"]) == 1
    assert "the learning rate" in capsys.readouterr().err
    assert main(["audit", str(taped.folder), "--log", "json"]) == 1
    events = events_of(capsys.readouterr().out)
    (replay,) = [e for e in events if e["event"] == "replay"]
    assert replay["verdict"] == "mismatch" and "the learning rate" in replay["words"]
    assert events[-1]["event"] == "finished" and events[-1]["attacks"] == []


@pytest.mark.full
def test_who_reads_no_further_ends_the_command_in_silence(taped: Run) -> None:
    program = [sys.executable, "-m", "fedgauge.simulations.cli.main", "audit", str(taped.folder), "--log", "json"]
    command = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with command:
        assert command.stdout is not None and command.stderr is not None
        assert json.loads(command.stdout.readline())["event"] == "started"
        command.stdout.close()
        assert command.stderr.read() == ""
        assert command.wait(timeout=60) == 0
    assert main(["audit", str(taped.folder), "--log", "quiet"]) == 0, "what was not attacked is attacked now"
    with taped.ledger() as ledger:
        assert ledger.progress().done == ledger.progress().total == 16
