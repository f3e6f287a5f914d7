"""Planned against attacked updates: counts that verdict, gate, terminal, page and report share."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.update import Params
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.gate import Threshold, gate_of_run
from fedgauge.server.views.notices import notices
from fedgauge.server.views.plan_coverage import PlanCoverage, plan_coverage
from fedgauge.server.views.snapshot import read_once
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.cli.run_summary import print_summary
from fedgauge.simulations.reports.report import write_report
from fedgauge.simulations.run.exit_status import INCOMPLETE, exit_status
from tests.small_runs import scenario, trained

WEAK = [{"use": "inverting_gradients", "iterations": 2, "labels": "given"}]
ATTACK = WEAK[0]["use"]


def small(**changes: Any) -> Scenario:
    """Two clients, three rounds, of which the first and the last are attacked."""
    data = {"use": "mnist5k", "batch_size": 4, "auxiliary": 100}
    audit = {"executor": "local", "rounds": [1, 3]}
    return scenario(**{"clients": 2, "rounds": 3, "data": data, "audit": audit, "attack": WEAK, **changes})


def recorded(folder: Path, chosen: Scenario, rounds: dict[int, list[Participation]], state: str = "trained") -> Run:
    """A run with these observations, and jobs that nobody has carried out."""
    run = Run.create(folder, chosen)
    with run.ledger() as ledger:
        ledger.add_attacks(chosen.plan, {p.name: "" for p in chosen.plan.attacks})
        for round, seen in rounds.items():
            ledger.record_intake(round, seen, chosen.plan)
        ledger.set_meta(state=state)
    return run


def sent(*clients: int, **changes: Any) -> list[Participation]:
    return [replace(Participation(c, "accepted", "", 4, f"sent:{c}"), **changes) for c in clients]


def end_all(ledger: Ledger, status: str = "done") -> None:
    ledger._db.execute("UPDATE jobs SET state = ?", (status,))


def counted(run: Run, training: bool = False) -> PlanCoverage:
    with run.ledger() as ledger:
        return plan_coverage(ledger, run.scenario().tables, training)


def norm(update: Params) -> float:
    return float(sum((t**2).sum() for t in update.values()) ** 0.5)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in memory in which the larger update of round 1 is refused, and perhaps later ones; all others are attacked."""
    folder = tmp_path_factory.mktemp("refused") / "run"
    federation = small().federation
    norms = [norm(federation.client_update(*federation.initial(), client, 1)) for client in (0, 1)]
    trained(folder, small(validator={"max_norm": sum(norms) / 2}))
    run = Run(folder)
    with run.ledger() as ledger:
        ledger.set_meta(state="trained")
    serve(run, LocalExecutor())
    return run


def test_a_refused_update_counts_everywhere(refused: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with refused.ledger() as ledger:
        planned = [o for o in ledger.observations() if o["round"] in (1, 3)]
        lost = sum(o["status"] == "rejected" for o in planned)
    assert 0 < lost < len(planned) == 4
    found = counted(refused)
    assert (found.updates, found.attacked, found.missed) == (4, 4 - lost, {"refused": lost})
    assert found.words.startswith(f"{lost} of 4 planned") and "refused" in found.words

    with read_once(refused) as reading:
        verdict, (gate,) = verdict_of(reading), gate_of_run(reading, [Threshold("worst.psnr", 1000.0)])
        assert (verdict.word, verdict.reconstruction) == ("undetermined", "undetermined")
        assert found.words in verdict.sentences[0]
        assert gate.outcome == "incomplete" and found.words in str(gate)
        assert f"{found.words}." in [words for words, _ in notices(reading)]
    assert f"{4 - lost} of 4 planned" in write_report(refused).read_text()

    print_summary(refused, quiet=False)
    assert found.words in capsys.readouterr().out

    assert exit_status(refused) == INCOMPLETE == 4
    assert main(["gate", str(refused.folder), "--fail-above", "worst.psnr=1000"]) == 4
    assert main(["gate", str(refused.folder), "--fail-above", "psnr=-100"]) == 1, "what leaks, leaks"
    assert "incomplete" in capsys.readouterr().out


ABSENT = Participation(1, "missing", "no reply", silent=True)
REFUSED = Participation(1, "rejected", "not finite")


@pytest.mark.parametrize(
    ("last", "updates", "missed", "missed_rounds"),
    [
        pytest.param(sent(0), 3, {}, (), id="not selected"),
        pytest.param([*sent(0), ABSENT], 3, {}, (), id="silent"),
        pytest.param([replace(ABSENT, client=0), ABSENT], 2, {}, (3,), id="nobody sent anything"),
        pytest.param([*sent(0), REFUSED], 4, {"refused": 1}, (), id="one refused"),
        pytest.param([replace(REFUSED, client=0)], 3, {"refused": 1}, (3,), id="all refused"),
        pytest.param(
            [*sent(0), *sent(1, digest=None, reason="not recorded: No space left on device")],
            4,
            {"lost": 1},
            (),
            id="not on the tape",
        ),
        pytest.param([], 2, {}, (3,), id="never trained"),
    ],
)
def test_updates_that_were_sent_but_not_attacked_count(
    tmp_path: Path,
    last: list[Participation],
    updates: int,
    missed: dict[str, int],
    missed_rounds: tuple[int],
) -> None:
    run = recorded(tmp_path / "run", small(), {1: sent(0, 1), 2: [REFUSED], **({3: last} if last else {})})
    with run.ledger() as ledger:
        end_all(ledger)
    found = counted(run)
    assert (found.updates, found.missed, found.missed_rounds, found.rounds) == (updates, missed, missed_rounds, 2)
    assert bool(found.words) == bool(missed or missed_rounds)
    assert exit_status(run) == (INCOMPLETE if found.words else 0)


def test_rounds_to_come_count_once_the_training_has_ended(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", small(), {1: sent(0, 1), 2: sent(0, 1)}, state="training")
    with run.ledger() as ledger:
        end_all(ledger)
    assert not counted(run, training=True).words
    assert counted(run).missed_rounds == (3,)


def not_applicable(ledger: Ledger) -> None:
    end_all(ledger)
    ledger._db.execute(
        "INSERT INTO scores (job_id, attack, client, example, metric, round, value, status, seconds)"
        " SELECT j.id, a.name, client, -1, 'psnr', round, NULL, 'not_applicable', 0.1"
        " FROM jobs j JOIN attacks a ON a.id = attack_id"
    )


@pytest.mark.parametrize(
    ("spoil", "fate"),
    [
        (lambda ledger: None, "waiting"),
        (lambda ledger: end_all(ledger, "failed"), "failed"),
        (not_applicable, "not applicable"),
        (lambda ledger: ledger._db.execute("DELETE FROM jobs"), "without a job"),
    ],
)
def test_updates_whose_attacks_gave_nothing(tmp_path: Path, spoil: Callable[[Ledger], object], fate: str) -> None:
    run = recorded(tmp_path / "run", small(), {1: sent(0, 1), 3: sent(0, 1)})
    with run.ledger() as ledger:
        spoil(ledger)
    found = counted(run)
    assert (found.updates, found.missed, found.missed_rounds) == (4, {fate: 4}, (1, 3))


def test_one_attack_of_several_suffices(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", small(attack=[*WEAK, {"use": "dlg"}]), {1: sent(0), 3: sent(0)})
    with run.ledger() as ledger:
        end_all(ledger, "failed")
        ledger._db.execute(
            "UPDATE jobs SET state = 'done' WHERE round = 1 AND attack_id = (SELECT id FROM attacks WHERE name = ?)",
            (ATTACK,),
        )
    assert (counted(run).missed, counted(run).missed_rounds) == ({"failed": 1}, (3,))


def test_a_baseline_or_a_limit_is_no_attack(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", small(), {1: sent(0), 3: sent(0)})
    with run.ledger() as ledger:
        end_all(ledger)
        ledger._db.execute(
            "UPDATE jobs SET state = 'failed' WHERE attack_id = (SELECT id FROM attacks WHERE name = ?)", (ATTACK,)
        )
    assert counted(run).missed == {"failed": 2}
    assert counted(recorded(tmp_path / "none", small(attack=[]), {1: sent(0), 3: [REFUSED]})) == PlanCoverage()


def test_clients_that_the_plan_leaves_out_do_not_count(tmp_path: Path) -> None:
    chosen = small(audit={"executor": "local", "every": 2, "clients": [0]})
    run = recorded(tmp_path / "run", chosen, {1: [*sent(0), REFUSED], 2: [REFUSED], 3: sent(1)})
    with run.ledger() as ledger:
        end_all(ledger)
    found = counted(run)
    assert (found.updates, found.rounds, found.words) == (1, 2, ""), "in round 3 client 0 was not selected"


def test_a_secure_sum_is_one_update(tmp_path: Path) -> None:
    audit = {"executor": "local"}
    chosen = small(clients=4, secure_sum={"group": 2, "threshold": 2}, audit=audit, rounds=2)
    alone = [Participation(c, "rejected", "no secure sum") for c in (0, 1)]
    summed = [replace(ABSENT, client=3), *sent(2)]
    run = recorded(tmp_path / "run", chosen, {1: [*sent(0), REFUSED, *summed], 2: [*alone, *summed]})
    with run.ledger() as ledger:
        end_all(ledger)
    found = counted(run)
    assert (found.updates, found.missed, found.missed_rounds) == (4, {"refused": 1}, ())


@pytest.mark.parametrize("audit", [{"every": 0}, {"rounds": "all"}, {"clients": [0.5]}])
def test_a_selection_from_elsewhere_is_read_typed(tmp_path: Path, audit: dict[str, Any]) -> None:
    run = recorded(tmp_path / "run", small(), {1: sent(0)})
    written = run.folder / "scenario.toml"
    (key, value) = next(iter(audit.items()))
    written.write_text(written.read_text().replace("[audit]", "[other]") + f"\n[audit]\n{key} = {json.dumps(value)}\n")
    with pytest.raises(LedgerError), read_once(run):
        pass
