"""The command line: a user's mistake is one sentence and exit status 2; what it prints can be used by other programs."""

import csv
import io
import json
import os
import subprocess
from pathlib import Path

import pytest
import tomli_w

from fedgauge.attacks.grading.scores import ScoreRecord
from fedgauge.attacks.plan import AttackPlan
from fedgauge.client.federation import Federation
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger_rows import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.reading import state_of
from fedgauge.simulations.cli.main import _left, _tell, _tell_end, main
from fedgauge.simulations.run.simulate import cards, create_run, new_run

TABLES = {
    "seed": 1,
    "rounds": 2,
    "clients": 2,
    "data": {"use": "mnist5k", "batch_size": 1},
    "model": {"use": "mlp", "hidden": [16]},
    "chain": [{"use": "local_sgd", "rate": 0.1}],
    "attack": [{"use": "analytic"}],
    "audit": {"executor": "local"},
}


@pytest.fixture
def taped(tmp_path: Path) -> Run:
    """A run as training leaves it: two rounds on the tape, nothing attacked yet."""
    scenario = Scenario.from_tables(TABLES)
    run = new_run(scenario, "small", tmp_path / "runs")
    federation = Federation(scenario.protocol)
    params, buffers = federation.initial()
    tape = run.tape()
    with run.ledger() as ledger:
        for r in (1, 2):
            tape.write_round(r, params, buffers)
            updates = {c: federation.client_update(params, buffers, c, r) for c in range(2)}
            digests = {c: tape.write_update(r, c, u) for c, u in updates.items()}
            ledger.record_intake(r, [Participation(c, "accepted", "", 1, d) for c, d in digests.items()], scenario.plan)
            ledger.record_round(r, 0.1 * r, 2.0, 1.0, 0.01)
        ledger.set_meta(state="trained")
    return run


@pytest.fixture
def attacked(taped: Run) -> Run:
    serve(taped, LocalExecutor())
    return taped


def scenario_file(folder: Path, **changes: object) -> Path:
    path = folder / "wrong.toml"
    path.write_text(tomli_w.dumps({**TABLES, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"round": 3}, ["unknown key 'round'", "rounds"]),
        ({"rounds": "3"}, ["rounds", "whole number", "'3'"]),
        ({"rounds": 0}, ["rounds", "at least 1"]),
        ({"clients": 5000}, ["[data]", "5000 clients"]),
        ({"data": {"use": "imagenet"}}, ["[data]", "'imagenet'", "mnist5k"]),
        ({"data": {"use": "mnist5k", "batch_size": 2.5}}, ["[data]", "batch_size", "2.5"]),
        ({"data": {"use": "mnist5k", "partition": "dirichlet", "alpha": 0.0}}, ["[data]", "alpha", "0.0"]),
        ({"model": {"use": "lenet", "width": 3}}, ["[model]", "lenet()", "'width'"]),
        ({"model": {"use": "os:system"}}, ["[model]", "'os:system'", "mlp"]),
        ({"chain": []}, ["[[chain]]", "exactly one local_sgd"]),
        (
            {"chain": [{"use": "gaussian", "sigma": -1.0}, *TABLES["chain"]]},  # type: ignore[misc]
            ["[[chain]] #1", "sigma", "-1.0"],
        ),
        (
            {"chain": [{"use": "clip", "max_nrom": 1.0}, *TABLES["chain"]]},  # type: ignore[misc]
            ["[[chain]] #1", "clip() has no argument 'max_nrom'", "max_norm"],
        ),
        ({"strategy": {"use": "FedMagic"}}, ["[strategy]", "FedMagic", "FedAvg"]),
        (
            {"strategy": {"use": "FedAvg", "fraction_train": 2}},
            ["[strategy]", "fraction_train"],
        ),
        ({"attack": [{"use": "inverting_gradients", "rate": -1}]}, ["[[attack]] #1", "rate", "-1"]),
        ({"attack": [{"use": "dlg", "iterations": 0}]}, ["[[attack]] #1", "iterations", "0"]),
        ({"audit": {"rounds": [3]}}, ["[audit]", "rounds", "1..2", "3"]),
        ({"audit": {"executor": "cloud"}}, ["[audit]", "executor", "'ray'", "'cloud'"]),
        ({"tape": {"keep": "some"}}, ["[tape]", "keep", "'all'"]),
        ({"stragglers": {"probability": 1.5}}, ["[stragglers]", "probability", "1.5"]),
    ],
)
def test_a_wrong_scenario_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], words: list[str]
) -> None:
    path = scenario_file(tmp_path, **changes)
    assert main(["run", str(path), "--runs", str(tmp_path / "runs")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert str(path) in told.err
    assert "Traceback" not in told.err
    for word in words:
        assert word in told.err
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_files_that_are_no_scenarios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = = 1")
    for arguments in (
        ["run", str(broken)],
        ["run", str(tmp_path / "none.toml")],
        ["run", str(broken), "--set", "nonsense"],
    ):
        assert main(arguments) == 2
        assert "fedgauge: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["audit", "report", "export", "stop"])
def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_foreign_ledger_and_one_of_a_newer_version(attacked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    import sqlite3

    path = attacked.folder / "ledger.sqlite"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    assert main(["export", str(attacked.folder)]) == 2
    assert "version 99" in capsys.readouterr().err
    for side in attacked.folder.glob("ledger.sqlite*"):
        side.unlink()
    path.write_bytes(b"not a database, whatever its name says" * 100)
    assert main(["report", str(attacked.folder)]) == 2
    assert str(path) in capsys.readouterr().err


def test_the_audit_goes_on_where_it_stopped_and_adds_attacks(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(taped.folder)]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1] == str(taped.folder)
    with taped.ledger() as ledger:
        assert ledger.progress().done == 2 * 2 * 3  # rounds x clients x (analytic and two baselines)
    more = ["--attack", "inverting_gradients iterations=5 name=short", "--rounds", "2", "--clients", "1"]
    assert main(["audit", str(taped.folder), *more]) == 0
    with taped.ledger() as ledger:
        assert ledger.progress().done == 2 * 2 * 3 + 1
        assert [(r["round"], r["client"]) for r in ledger.scores("mse") if r["attack"] == "short"] == [(2, 1)]
    assert main(["audit", str(taped.folder), *more]) == 0, "asking again is free"
    with taped.ledger() as ledger:
        assert ledger.progress().done == 2 * 2 * 3 + 1
    assert main(["audit", str(taped.folder), "--attack", "inverting_gradients iterations=6 name=short"]) == 2
    assert "'short'" in capsys.readouterr().err
    assert main(["audit", str(taped.folder), "--attack", "magic"]) == 2
    assert "dlg" in capsys.readouterr().err


def test_a_damaged_tape_file_is_named_and_the_rest_goes_on(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = sorted((taped.folder / "tape").glob("round-00002-client-*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(["audit", str(taped.folder)]) == 0
    assert damaged.name in capsys.readouterr().out.replace("\n", "")
    with taped.ledger() as ledger:
        progress = ledger.progress()
        assert progress.failed > 0 and progress.done > 0 and progress.queued == 0
        failed = [r for r in ledger.scores() if r["status"] == "failed"]
        assert len(failed) == progress.failed and all(r["value"] is None for r in failed)


def test_export_is_one_long_table(attacked: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(attacked.folder)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(rows[0]) == [
        "run",
        "round",
        "client",
        "attack",
        "example",
        "metric",
        "value",
        "status",
        "seconds",
        "knowledge",
        "epsilon",
        "delta",
    ]
    exact = [float(r["value"]) for r in rows if r["attack"] == "analytic" and r["metric"] == "psnr"]
    assert len(exact) == 4 and min(exact) > 100
    assert {r["run"] for r in rows} == {attacked.name}
    assert {(r["epsilon"], r["delta"]) for r in rows} == {("", "")}, "a chain without noise has none"
    own = [r for r in rows if r["attack"] in ("analytic", "wrong_client(analytic)")]
    assert own and all("labels restored" in r["knowledge"] for r in own)
    assert all("and nothing else" in r["knowledge"] for r in rows if r not in own), "baselines restore nothing"

    import pyarrow.parquet

    target = tmp_path / "scores.parquet"
    assert main(["export", str(attacked.folder), "--to", "parquet", "-o", str(target)]) == 0
    table = pyarrow.parquet.read_table(target)
    assert table.num_rows == len(rows)
    assert table.column_names == list(rows[0])
    assert [v for v in table["round"].to_pylist()] == [int(r["round"]) for r in rows]


def test_a_damaged_run_is_listed_as_such_beside_the_others(attacked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    runs = attacked.folder.parent
    for name, data in (("damaged", b"not a database, whatever its name says" * 100), ("emptied", b"")):
        (runs / name).mkdir()
        (runs / name / "ledger.sqlite").write_bytes(data)
    assert main(["runs", "--runs", str(runs)]) == 0
    told = capsys.readouterr()
    assert attacked.name in told.out and "complete" in told.out
    lines = [line.split() for line in told.out.splitlines()]
    assert [line for line in lines if "unreadable" in line] == [["emptied", "unreadable"], ["damaged", "unreadable"]]
    assert str(runs / "damaged" / "ledger.sqlite") in told.err


def test_what_waits_and_what_was_at_work_are_parked_together(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with taped.ledger() as ledger:
        assert ledger.lease() is not None
        progress = ledger.progress()
        assert progress.queued and progress.leased
    _tell(taped)
    assert f"{progress.total} attacks are parked; go on with: fedgauge audit" in capsys.readouterr().out
    with taped.ledger() as ledger:
        ledger.release()
    assert main(["audit", str(taped.folder)]) == 0
    assert "parked" not in capsys.readouterr().out


def test_what_attacks_say_of_themselves_is_told_once_each(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with taped.ledger() as ledger:
        while (lease := ledger.lease()) is not None:
            rows = {
                c: [ScoreRecord(lease.round, c, lease.attack.name, 0, "psnr", None, "diverged", 0.1)]
                for c in lease.clients
            }
            random = lease.attack.name == "random_image"  # each of its four jobs has a reason of its own
            reasons = {c: f"[no] label {(lease.round, c) if random else ''}" for c in lease.clients}
            ledger.finish(lease, rows, reasons if lease.attack.name != "mean_image" else {})
    _tell(taped)
    told = [line.rstrip() for line in capsys.readouterr().out.splitlines() if " x): " in line]
    assert told == ["analytic (4 x): [no] label"] + [
        f"random_image (1 x): [no] label ({r}, {c})" for r in (1, 2) for c in (0, 1)
    ]


@pytest.fixture
def mismatched(taped: Run) -> Run:
    """A run whose scenario is not what its clients did."""
    (taped.folder / "scenario.toml").write_text((taped.folder / "scenario.toml").read_text().replace("0.1", "0.2"))
    return taped


def test_what_a_replay_does_not_explain_is_not_attacked(mismatched: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(mismatched.folder)]) == 1
    told = capsys.readouterr().out
    assert "the learning rate" in told
    assert "12 attacks wait: they would invert another computation than the clients'" in told
    assert f"fedgauge audit {mismatched.folder} (--force: attack anyway)" in told
    assert "parked" not in told
    with mismatched.ledger() as ledger:
        assert (ledger.progress().queued, ledger.progress().total) == (12, 12)
    assert main(["audit", str(mismatched.folder), "--force"]) == 0
    with mismatched.ledger() as ledger:
        assert ledger.progress().done == 12


def test_a_run_whose_replay_fails_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter(["mismatch", "ok"])

    def trained(run: Run, *_: object) -> None:
        with run.ledger() as ledger:
            ledger.set_meta(replay=next(outcomes), replay_detail="told")

    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", trained)
    command = ["run", str(scenario_file(tmp_path)), "--runs", str(tmp_path / "runs")]
    assert [main(command), main(command)] == [1, 0]


def state_after(run: Run, state: str) -> str:
    with run.ledger() as ledger:
        ledger.set_meta(state=state)
        return state_of(run, ledger)


def test_a_run_of_which_everything_is_done_is_no_failure(attacked: Run) -> None:
    for state in ("failed", "interrupted", "trained"):
        assert state_after(attacked, state) == "complete"
    with attacked.ledger() as ledger:
        ledger.set_meta(rounds="9")
    assert [state_after(attacked, s) for s in ("failed", "interrupted")] == ["failed", "interrupted"]


def test_what_is_left_to_do_is_said_in_every_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = Scenario.from_tables(TABLES)
    run = new_run(scenario, "stopped", tmp_path / "runs")

    def left() -> str:
        with run.ledger() as ledger:
            return _left(run, ledger)

    assert left() == "it ended before its first round: there is nothing to attack; begin again with: fedgauge run"
    assert main(["audit", str(run.folder)]) == 2
    assert "no updates on its tape: the run ended before its first round" in capsys.readouterr().err
    with run.ledger() as ledger:
        ledger.record_intake(1, [Participation(0, "rejected", "why not")], scenario.plan)
    assert left() == ""
    assert main(["audit", str(run.folder)]) == 2
    assert "no updates on its tape: no reply was accepted" in capsys.readouterr().err
    with run.ledger() as ledger:
        ledger.record_intake(2, [Participation(0, "accepted", "", 1, "digest")], scenario.plan)
    assert left() == f"3 attacks are parked; go on with: fedgauge audit {run.folder}"
    with run.ledger() as ledger:
        while (lease := ledger.lease()) is not None:
            ledger.finish(lease, {0: []})
        ledger.mark_deleted(2)
    assert left() == ""
    assert main(["audit", str(run.folder)]) == 2
    assert 'no updates on its tape: [tape] keep = "all" has deleted them' in capsys.readouterr().err


def test_a_deployment_begins_again_as_one(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    run = create_run(Scenario.from_tables(TABLES), tmp_path / "runs" / "one", mode="deployment")
    with run.ledger() as ledger:
        assert _left(run, ledger).endswith(f"begin again with: fedgauge deploy up {tmp_path} --local")


def test_the_end_of_a_deployment_says_who_was_missing_and_how_to_be_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run(scenario := Scenario.from_tables(TABLES), tmp_path / "runs" / "one", mode="deployment")
    with run.ledger() as ledger:
        for round in (1, 2):
            seen = [
                Participation(0, "accepted", "", 1, f"digest {round}"),
                Participation(1, "missing", "'mynets:Small' is not allowed"),
            ]
            ledger.record_intake(round, seen, scenario.plan)
        ledger.set_meta(grading="not graded: the owner does not allow it")
    words = "2 of 4 updates came in; client 1 missing in 2 rounds: 'mynets:Small' is not allowed"
    for log in ("auto", "quiet"):
        _tell_end(run, log)
        told = capsys.readouterr()
        assert words in (told.out if log == "auto" else told.err)
        if log == "auto":
            assert 'mode = "scores" under [grading]' in told.out and "labels are graded by no client" in told.out


def test_a_server_that_was_not_curious_leaves_nothing_to_attack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(Scenario.from_tables({**TABLES, "audit": {"curious": False}}), "blind", tmp_path / "runs")
    with run.ledger() as ledger:
        assert "was not curious" in _left(run, ledger)
    assert main(["audit", str(run.folder)]) == 2
    assert "no updates on its tape: the server was not curious" in capsys.readouterr().err


def test_numbers_that_are_none_are_told_without_our_names(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", str(taped.folder), "--attack", "dlg", "--rounds", "a,b"])
    told = capsys.readouterr().err
    assert "argument --rounds: expected whole numbers with commas between, 1,2,3, got 'a,b'" in told
    assert "_numbers" not in told


def test_every_number_has_its_unit(attacked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    _tell(attacked)
    heading = next(line for line in capsys.readouterr().out.splitlines() if "accuracy" in line)
    assert heading.count("PSNR") == heading.count("PSNR (dB)") == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rounds", "1"], "--attack"),
        (["--clients", "0"], "--attack"),
        (["--follow", "--attack", "dlg"], "--follow"),
        (["--workers", "0"], "workers must be at least 1, got 0"),
        (["--workers", "-1"], "workers must be at least 1, got -1"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    taped: Run, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["audit", str(taped.folder), *options]) == 2
    assert words in capsys.readouterr().err
    with taped.ledger() as ledger:
        assert ledger.progress().done == 0


def test_a_place_where_nothing_can_be_written_is_a_mistake_in_words(
    attacked: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    for arguments in (
        ["init", str(tmp_path / "none" / "x.toml")],
        ["export", str(attacked.folder), "-o", str(tmp_path / "file" / "x.csv")],
        ["export", str(attacked.folder), "--to", "parquet", "-o", str(tmp_path / "file" / "x.parquet")],
    ):
        assert main(arguments) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("fedgauge: ") and str(tmp_path) in told.err


def test_an_export_takes_the_place_of_a_file_and_goes_into_a_pipe(
    attacked: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(attacked.folder)]) == 0
    expected = capsys.readouterr().out
    target, pipe = tmp_path / "scores.csv", tmp_path / "pipe"
    target.write_text("old")
    assert main(["export", str(attacked.folder), "-o", str(target)]) == 0
    assert target.read_text() == expected
    assert target.stat().st_mode & 0o777 == 0o600, "scores are of somebody's data"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert main(["export", str(attacked.folder), "-o", str(pipe)]) == 0
    assert reader.communicate(timeout=60)[0] == expected
    assert pipe.is_fifo()


def test_runs_lists_and_stop_says_when_nothing_is_at_work(attacked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs", str(attacked.folder.parent)]) == 0
    out = capsys.readouterr().out
    assert attacked.name in out and "complete" in out and "2/2" in out
    assert "local_sgd(rate=0.1)" in out and "analytic" in out, "by what they were, runs can be told apart"
    assert "mean_image" not in out
    assert main(["stop", str(attacked.folder)]) == 0
    assert "nothing is at work" in capsys.readouterr().out


def test_init_writes_a_scenario_that_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.toml"
    assert main(["init", str(target)]) == 0
    assert Scenario.load(target).protocol.clients == 4
    assert main(["init", str(target)]) == 2
    assert "exists" in capsys.readouterr().err


def test_settings_reach_the_scenario_that_is_kept(tmp_path: Path) -> None:
    path = scenario_file(tmp_path)
    scenario = Scenario.load(path, ["data.batch_size=3", "chain.0.rate=0.5", "rounds=7"])
    run = new_run(scenario, path.stem, tmp_path / "runs")
    again = run.scenario()
    assert (again.protocol.rounds, again.protocol.data["batch_size"]) == (7, 3)
    assert Federation(again.protocol).chain.local.rate == 0.5
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["cores"] >= 1
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        assert environment["commit"].removesuffix("-dirty") == subprocess.check_output(command, text=True).strip()
    else:
        assert environment["commit"] is None


def test_what_is_not_checked_is_not_said_to_work(
    no_local_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedgauge.simulations.checks.doctor._ray", lambda: "not started here")
    main(["doctor"])
    marks = {line[13:].split()[0]: line[:13].strip() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert (marks["mnist5k"], marks["cifar10"], marks["LPIPS"]) == ("ok", "not checked", "optional")


def test_a_plan_has_a_card_for_each_attack() -> None:
    scenario = Scenario.from_tables(TABLES)
    plan: AttackPlan = scenario.plan
    assert set(cards(scenario, plan)) == {"analytic", "mean_image", "random_image"}
